"""Turns columns as collectors hold them into Arrow columns of a table's schema."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..phase import PHASE_CODE, PHASES
from ..schema import schema
from .arrays import Coded, absent_column, from_coded, from_list, from_numpy, from_rows, from_strings

_PHASE_TYPE = pa.dictionary(pa.int8(), pa.string())


def to_batch(table: str, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """Returns one batch of `table` from its columns; `Sink.write` and `to_columns` describe their form.

    Raises:
        ValueError: the columns do not fit the table.
    """
    converted = to_columns(table, columns)
    rows = len(next(iter(converted.values())))
    fields = schema(table)
    arrays = [
        converted[field.name] if field.name in converted else absent_column(field, rows) for field in fields
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=fields)


class TableColumns(dict[str, pa.Array]):
    """What `to_columns` has returned, and returns again as it is."""

    def __init__(self, table: str, columns: Mapping[str, pa.Array]) -> None:
        super().__init__(columns)
        self.table = table


def to_columns(table: str, columns: Mapping[str, Any], *, with_nulls: bool = False) -> TableColumns:
    """Returns the given columns, in the order and with the types of the schema.

    A masked array is null where it is masked. Integers given for a phase are codes of `PHASES`. A 2-D array given for a
    list column is one list a row. NaN stays NaN, and is not null. Numpy arrays are copied, so the caller may reuse
    them. `with_nulls` accepts nulls in columns that may have none.

    Raises:
        ValueError: a column is not in the schema, none is given, lengths differ, a value is not of the column's type,
            or there is a null in a column that may have none. The message names the column.
    """
    if isinstance(columns, TableColumns) and columns.table == table:
        return columns
    wanted = _wanted_columns(table)
    if not columns or not columns.keys() <= wanted.keys():
        unknown = ", ".join(repr(name) for name in columns if name not in wanted)
        raise ValueError(f"table {table!r} has no column {unknown or '(none was given)'}")
    if len(set(map(len, columns.values()))) > 1:
        lengths = {name: len(values) for name, values in columns.items()}
        raise ValueError(f"columns of table {table!r} are of different lengths: {lengths}")
    converted = {}
    for name, column in wanted.items():
        if name in columns:
            converted[name] = _checked(column, columns[name], with_nulls=with_nulls)
        elif column.is_phase and not column.nullable:
            raise ValueError(f"{column.title}: must be given")
    return TableColumns(table, converted)


def null_misfits(table: str, columns: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the columns as lists, with None in place of each value that is not of the column's type.

    This is slow, because each value is converted by itself.
    """
    fitting: dict[str, list[Any]] = {}
    for name, values in columns.items():
        column, fitting[name] = _wanted_columns(table)[name], []
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            values = values.to_pylist()
        for value in values.tolist() if isinstance(values, np.ndarray) else values:
            try:
                _convert(column, [value]).validate(full=True)
                fitting[name].append(value)
            except _MISFITS:
                fitting[name].append(None)
    return fitting


class _Wanted(NamedTuple):
    """A column of a schema, with properties that are slow to read from Arrow for each batch."""

    title: str
    type: pa.DataType
    nullable: bool
    is_phase: bool


@cache
def _wanted_columns(table: str) -> dict[str, _Wanted]:
    return {
        field.name: _Wanted(f"{table}.{field.name}", field.type, field.nullable, field.type == _PHASE_TYPE)
        for field in schema(table)
    }


#: The exceptions that are raised for values of a wrong type.
_MISFITS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def _checked(column: _Wanted, values: Any, *, with_nulls: bool) -> pa.Array:
    try:
        array = _convert(column, values)
    except _MISFITS as error:
        raise ValueError(f"{column.title}: not a column of {column.type}: {error}") from error
    if not (with_nulls or column.nullable) and array.null_count:
        raise ValueError(f"{column.title}: {array.null_count} of {len(array)} values are null; none may be")
    return array


def _convert(column: _Wanted, values: Any) -> pa.Array:
    if column.is_phase:
        return _phases(values)
    wanted = column.type
    if isinstance(values, np.ndarray):
        if values.ndim == 2 and pa.types.is_list(wanted):
            return from_rows(values, wanted)
        if values.dtype.kind not in "OUS":
            return from_numpy(values, wanted)
        values = values.tolist()
    if isinstance(values, Coded):
        return from_coded(values, wanted)
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        return _as_type(values, wanted)
    if isinstance(values, (list, tuple, range)):
        return from_list(values, wanted)
    return pa.array(values, type=wanted)


def _as_type(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    if values.type == wanted:
        return values
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_dictionary(wanted):
        return values.cast(wanted.value_type).dictionary_encode()
    return values.cast(wanted)


def _phases(values: Any) -> pa.Array:
    """Returns a column whose dictionary is always `PHASES`, so that codes mean the same in every file."""
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        is_coded = isinstance(values, pa.Array) and values.type == _PHASE_TYPE
        if is_coded and values.dictionary.equals(_phase_dictionary()):
            return values
        values = values.to_pylist()
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        codes = from_numpy(values, pa.int8())
    else:
        unknown = next(
            (phase for phase in values if isinstance(phase, str) and phase not in PHASE_CODE), None
        )
        if unknown is not None:
            raise ValueError(f"no phase {unknown!r}; there are: {', '.join(PHASES)}")
        codes = from_list([PHASE_CODE.get(phase, phase) for phase in values], pa.int8())
    return pa.DictionaryArray.from_arrays(codes, _phase_dictionary())  # raises if a code has no phase


@cache
def _phase_dictionary() -> pa.Array:
    return from_strings(PHASES)
