"""Reads an Arrow stream, which may end anywhere, to its last whole batch."""

import os
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc

from ..errors import DamagedRecordingError
from ..recording.absent import absent_column
from ..recording.words import share_dictionaries

_MESSAGE_START = b"\xff\xff\xff\xff"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_stream(path: Path, schema: pa.Schema) -> pa.Table:
    """The rows of all whole batches, in `schema`, memory-mapped.

    Columns that the file does not have are null; those that the schema does not have are left out.

    Raises:
        DamagedRecordingError: the file is no Arrow stream, or not of this table.
        OSError: it cannot be read.
    """
    if path.stat().st_size == 0:
        return pa.Table.from_batches([], schema=schema)
    with pa.memory_map(str(path)) as mapped:
        try:
            stream = ipc.open_stream(mapped)
        except (OSError, pa.ArrowInvalid) as error:
            if _is_start_of_stream(path):
                return pa.Table.from_batches([], schema=schema)
            raise _not_a_stream(path) from error
        batches = _whole_batches(stream)
        return _conform(pa.Table.from_batches(batches, schema=stream.schema), schema, path)


def is_ended(path: Path) -> bool:
    """Whether the stream has its end-of-stream marker: whoever wrote it had come to the end."""
    with open(path, "rb") as file:
        file.seek(-min(len(_END_OF_STREAM), path.stat().st_size), os.SEEK_END)
        return file.read() == _END_OF_STREAM


def _whole_batches(stream: ipc.RecordBatchStreamReader) -> list[pa.RecordBatch]:
    batches = []
    try:
        while True:
            batches.append(stream.read_next_batch())
    except (StopIteration, OSError, pa.ArrowInvalid):  # the last two where the stream is cut
        return batches


def _is_start_of_stream(path: Path) -> bool:
    """Whether the file is what is left of a stream cut within its first message, the schema."""
    with open(path, "rb") as file:
        start, length = file.read(4), file.read(4)
    complete = len(length) == 4 and path.stat().st_size >= 8 + int.from_bytes(length, "little")
    return _MESSAGE_START.startswith(start) and not complete


def _not_a_stream(path: Path) -> DamagedRecordingError:
    return DamagedRecordingError(
        f"{path}: not an Arrow stream ({path.stat().st_size} bytes). "
        "Copy the file again, or delete it to read the other tables."
    )


def _conform(table: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    """The table in today's schema, though an older or newer minor version wrote it."""
    try:
        if not table.schema.equals(schema):
            columns = [_column(table, field) for field in schema]
            table = pa.Table.from_arrays(columns, schema=schema)
        return share_dictionaries(table)
    except (pa.ArrowException, LookupError) as error:
        raise DamagedRecordingError(
            f"{path}: its columns are not those of the table: {error}. "
            "Delete the file to read the other tables."
        ) from error


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name in table.column_names:
        return table.column(field.name).cast(field.type)
    if not field.nullable:
        raise LookupError(f"there is no column {field.name!r}")
    return pa.chunked_array([absent_column(field, table.num_rows)], type=field.type)
