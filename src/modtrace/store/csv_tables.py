"""Writes a recording as CSV files, one a table, with lists as JSON text and bytes as hexadecimal digits."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ..recording.protocols import RecordingData
from .export import RUNS, export_names, export_tables, slices, staged


def write_csv(data: RecordingData, path: str | os.PathLike[str]) -> list[Path]:
    """Writes `path/<table>.csv` for every table, and `path/runs.csv`, which is written last.

    A field is empty if a value is unknown. Texts are in quotes, so an empty text is `""`. In lists of numbers "NaN",
    "Infinity" and "-Infinity" stand for numbers that JSON lacks.

    Args:
        data: the recording.
        path: a folder. An existing export is replaced, missing parents are made.

    Returns:
        the files.

    Raises:
        RecordingExistsError: something else is at `path`.
        RecordingError: it cannot be written, or a table cannot be read.
    """
    known = [_file_of(table) for table in export_names()]
    with staged(Path(path), name="csv", last=Path(_file_of(RUNS)), known=known) as to:
        for name, table in export_tables(data):
            _write_file(table, to / _file_of(name))
    return [Path(path, name) for name in known]


def _file_of(table: str) -> str:
    return f"{table}.csv"


def _write_file(table: pa.Table, file: Path) -> None:
    schema = pa.schema([(field.name, _plain_type(field.type)) for field in table.schema])
    with csv.CSVWriter(str(file), schema) as writer:
        for piece in slices(table):
            writer.write_table(
                pa.Table.from_arrays([_to_plain(column) for column in piece.columns], schema=schema)
            )


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type that a column gets for CSV."""
    is_text = pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_binary(kind)
    return pa.string() if is_text else kind


def _to_plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_list(column.type):
        return _to_json(column)
    if pa.types.is_binary(column.type):
        return _of_each(column, lambda value: value.hex())
    return column.cast(_plain_type(column.type))


def _to_json(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns each list as JSON text."""
    if pa.types.is_string(column.type.value_type):
        return _of_each(column, lambda value: json.dumps(value, ensure_ascii=False))
    joined = pc.binary_join(column.cast(pa.list_(pa.string())), ", ")
    if pa.types.is_floating(column.type.value_type):
        joined = pc.replace_substring_regex(joined, "nan", '"NaN"')
        joined = pc.replace_substring_regex(joined, "(-?)inf", r'"\1Infinity"')
    return pc.binary_join_element_wise("[", joined, "]", "")


def _of_each(column: pa.ChunkedArray, to_text: Callable[[Any], str]) -> pa.ChunkedArray:
    texts = [None if value is None else to_text(value) for value in column.to_pylist()]
    return pa.chunked_array([pa.array(texts, pa.string())])
