"""Writes a recording as a hive-partitioned Parquet dataset, which DuckDB, Polars, Spark, Ray and Dask can read."""

import os
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from ..recording.protocols import RecordingData
from .export import RUNS, export_names, export_tables, slices, staged
from .reader import RankOfRun


def write_parquet(
    data: RecordingData, path: str | os.PathLike[str], *, name: RankOfRun | None = None
) -> list[Path]:
    """Writes `path/<table>/run=<run id>/rank=<rank>/part-0.parquet` for every table, and one of table `runs`.

    Files of the same rank of the same run are replaced; those of other runs and ranks stay. If `runs` has a row for a
    rank, its other tables are complete. `modules` has each module once. Dictionary-encoded strings become plain
    strings.

    Args:
        data: the recording.
        path: a folder, which may contain other runs. Missing parents are made.
        name: the rank of the recording; None takes it from its meta data.

    Returns:
        the files.

    Raises:
        RecordingExistsError: something else is at `path`.
        RecordingError: it cannot be written, or a table cannot be read.
    """
    name = name or RankOfRun.of_meta(data.meta)
    # Each table's folder has a file of the rank. Readers decode `%20` to a space.
    part = Path(f"run={quote(name.run, safe='')}", f"rank={name.rank}", "part-0.parquet")
    with staged(
        Path(path), name=part.as_posix().replace("/", "."), last=RUNS / part, known=export_names()
    ) as to:
        for table_name, table in export_tables(data):
            file = to / table_name / part
            file.parent.mkdir(parents=True)
            _write_file(table, file)
    return [Path(path, table, part) for table in export_names()]


def _write_file(table: pa.Table, file: Path) -> None:
    """Writes row groups of some 100,000 rows, so that readers can skip those without the steps they need.

    One file a step would mean 10,000 files for a long run, and slower reading: from 4 million rows of 1,000 steps,
    DuckDB reads one step in 62 ms with one file a step, and in 4 ms with such row groups.
    """
    # Without Arrow's own schema, readers see strings where Arrow has dictionaries; the file still stores codes.
    with pq.ParquetWriter(file, table.schema, compression="zstd", store_schema=False) as writer:
        for piece in slices(table):
            writer.write_table(piece, row_group_size=max(piece.num_rows, 1))
