"""Reads an Arrow stream, which may end anywhere, to its last complete batch, and checks everything in it."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc

from ..errors import DamagedRecordingError
from ..recording.arrow.arrays import absent_column
from ..recording.arrow.dictionary_codes import share_dictionaries
from ..recording.arrow.table_rules import Fault, find_fault, map_in_threads
from ..recording.schema import schema
from .arrow_messages import Damage, Messages, find_messages
from .damage import damaged_batch, not_a_stream, other_columns
from .regular_file import map_regular, read_regular

#: The exceptions that Arrow raises for invalid bytes.
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError)


def read_table(path: Path, name: str, *, is_final: bool = False) -> pa.Table:
    """Returns the rows of a table's file, which follow the rules of the table; see `read_stream`.

    Raises:
        DamagedRecordingError: as for `read_stream`, or a row breaks a rule.
        FileNotFoundError: there is no file.
        RecordingError: it cannot be read.
    """
    table = read_stream(path, schema(name), is_final=is_final)
    fault = find_fault(name, table)
    if fault is not None:
        raise _breaks_rule(path, table, fault)
    return table


def read_stream(path: Path, wanted: pa.Schema, *, is_final: bool = False) -> pa.Table:
    """Returns the rows of all complete batches, in the schema `wanted`. Each batch is validated in full.

    Columns that the file lacks are null; those that the schema lacks are left out.

    Args:
        path: the file.
        wanted: the schema of the table.
        is_final: no process writes to the file any more, so it is memory-mapped. Otherwise it is read up to its
            present size, because reading a mapped file that becomes shorter kills the process (SIGBUS).

    Raises:
        DamagedRecordingError: the file is not an Arrow stream, is of another table, or is damaged.
        FileNotFoundError: there is no file.
        RecordingError: it cannot be read.
    """
    data = map_regular(path) if is_final else read_regular(path)
    messages = _find_messages(path, data)
    if not messages.stop:
        return pa.Table.from_batches([], schema=wanted)
    stream = _open(path, data, messages, wanted)
    batches = _read_batches(path, stream, messages)
    return _conform(pa.Table.from_batches(batches, schema=stream.schema), wanted, path)


def read_messages(path: Path) -> Messages:
    """Returns the complete messages of a stream, and whether its end was written.

    Raises:
        DamagedRecordingError: the file is not a stream.
        FileNotFoundError: there is no file.
        RecordingError: it cannot be read.
    """
    return _find_messages(path, map_regular(path))


def _find_messages(path: Path, data: memoryview) -> Messages:
    try:
        return find_messages(data)
    except Damage as error:
        if not error.start:
            raise not_a_stream(path, size=len(data)) from error
        raise damaged_batch(path, number=error.batch, start=error.start, why=error) from error


def _open(path: Path, data: memoryview, messages: Messages, wanted: pa.Schema) -> ipc.RecordBatchStreamReader:
    """Returns a reader of the stream that reads only columns of the schema."""
    source = pa.BufferReader(pa.py_buffer(data[: messages.stop]))
    try:
        file_schema = ipc.read_schema(source)
        at = [number for number, name in enumerate(file_schema.names) if name in wanted.names]
        # Other widths of numbers and codes are accepted, because another version might write them.
        for number in at:
            field, kind = file_schema.field(number), wanted.field(file_schema.names[number]).type
            if _family(field.type) != _family(kind):
                raise LookupError(f"{field.name} is of type {field.type}, and {kind} is expected")
        source.seek(0)
        return ipc.open_stream(source, options=ipc.IpcReadOptions(included_fields=at))
    except LookupError as error:
        raise other_columns(path, why=error) from error
    except ARROW_ERRORS as error:
        raise not_a_stream(path, size=len(data)) from error


def _family(kind: pa.DataType) -> str:
    """Returns a name for a type that ignores its width."""
    if pa.types.is_dictionary(kind):
        return f"words of {kind.value_type}"
    if pa.types.is_list(kind):
        return f"list of {_family(kind.value_type)}"
    if pa.types.is_signed_integer(kind):
        return "integer"
    return "float" if pa.types.is_floating(kind) else str(kind)


def _read_batches(
    path: Path, stream: ipc.RecordBatchStreamReader, messages: Messages
) -> list[pa.RecordBatch]:
    """Returns all batches. They are complete, so an error means that their bytes are wrong."""
    batches: list[pa.RecordBatch] = []
    unreadable: Exception | None = None
    try:
        for _ in messages.batches:
            batches.append(stream.read_next_batch())
    except (StopIteration, *ARROW_ERRORS) as error:
        unreadable = error
    rows = sum(batch.num_rows for batch in batches)
    for number, invalid in enumerate(map_in_threads(_find_invalid, batches, rows)):
        if invalid is not None:
            why = next(_faults_of_columns(batches[number]), str(invalid))
            raise damaged_batch(path, number=number, start=messages.batches[number], why=why) from invalid
    if unreadable is not None:
        number, why = len(batches), f"it cannot be read: {unreadable}"
        raise damaged_batch(path, number=number, start=messages.batches[number], why=why) from unreadable
    return batches


def _find_invalid(batch: pa.RecordBatch) -> Exception | None:
    """Returns what is wrong with an offset, a code or a text of the batch; None if all are right."""
    try:
        batch.validate(full=True)
    except ARROW_ERRORS as error:
        return error
    return None


def _faults_of_columns(batch: pa.RecordBatch) -> Iterator[str]:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except ARROW_ERRORS as error:
            yield f"column {name!r}: {error}"


def _breaks_rule(path: Path, table: pa.Table, fault: Fault) -> DamagedRecordingError:
    """Returns the error for a broken rule, with the number and the position of the row's batch."""
    ends = list(accumulate(len(chunk) for chunk in table[fault.column].chunks))
    number = bisect_right(ends, fault.row)
    row = fault.row - (ends[number - 1] if number else 0)
    start = _find_messages(path, read_regular(path)).batches[number]
    why = f"column {fault.column!r} {fault.why} (row {row})"
    return damaged_batch(path, number=number, start=start, why=why)


def _conform(table: pa.Table, wanted: pa.Schema, path: Path) -> pa.Table:
    """Returns the table in the present schema, if an older or newer minor version wrote it."""
    try:
        if not table.schema.equals(wanted):
            columns = [_column(table, field) for field in wanted]
            table = pa.Table.from_arrays(columns, schema=wanted)
        return share_dictionaries(table)
    except ARROW_ERRORS as error:
        raise other_columns(path, why=error) from error


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name in table.column_names:
        return table.column(field.name).cast(field.type)
    if not field.nullable:
        raise LookupError(f"there is no column {field.name!r}")
    return pa.chunked_array([absent_column(field, table.num_rows)], type=field.type)
