"""Exports whole tables for `modtrace export`."""

from pathlib import Path

from ..recording.protocols import RecordingData
from ..store.csv_tables import write_csv as write_tables
from ..store.parquet import write_parquet as write_rank
from ..store.ranks import open_ranks
from ..store.reader import FolderReader
from .export_formats import ExportOptions


def write_parquet(data: RecordingData, path: Path, options: ExportOptions) -> list[Path]:
    """Writes all ranks of the recording, each to files of its own."""
    if not isinstance(data, FolderReader):
        return write_rank(data, path)
    return [file for each in open_ranks(data) for file in write_rank(each.data, path, name=each.name)]


def write_csv(data: RecordingData, path: Path, options: ExportOptions) -> list[Path]:
    """Writes a CSV file for each table of the selected rank."""
    return write_tables(data, path)
