"""Checks the rows that collectors write by the rules of the reader, so that no recording refuses its own rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ..schema import schema
from .arrays import from_list, from_numpy
from .batches import null_misfits, to_columns
from .table_rules import BadRows, find_bad_rows


def check_rows(table: str, columns: Mapping[str, Any]) -> tuple[dict[str, pa.Array], list[str]]:
    """Returns the columns with nulls in place of values that break a rule, and what was wrong, one text a rule.

    Where the column may not be null, the row is left out. All else is unchanged.

    Raises:
        ValueError: the columns are not those of the table, or of different lengths.
    """
    faults: list[str] = []
    try:
        given = to_columns(table, columns)
    except ValueError as error:
        given = to_columns(table, null_misfits(table, _known(table, columns, error)), with_nulls=True)
        faults.append(str(error))
    while bad := next(find_bad_rows(table, _as_table(table, given)), None):
        used = _only_used(given[bad.column])
        if used is not given[bad.column]:
            given[bad.column] = used  # a word of its dictionary was wrong, which no row may have
            continue
        row = int(np.argmax(bad.rows))
        faults.append(f"{table}.{bad.column} of row {row} {bad.describe(row)}")
        given = _without(table, given, bad)
    return given, faults


def _known(table: str, columns: Mapping[str, Any], error: ValueError) -> Mapping[str, Any]:
    """Returns the columns if they are columns of the table; raises `error` otherwise."""
    if columns and columns.keys() <= {*schema(table).names}:
        return columns
    raise error


def _as_table(table: str, given: Mapping[str, pa.Array]) -> pa.Table:
    fields = schema(table)
    return pa.Table.from_arrays([*given.values()], schema=pa.schema([fields.field(name) for name in given]))


def _without(table: str, given: Mapping[str, pa.Array], bad: BadRows) -> dict[str, pa.Array]:
    """Returns the columns without the values that break a rule, or without their rows."""
    field = schema(table).field(bad.column)
    if field.nullable:
        at = from_numpy(np.ma.masked_array(np.arange(len(bad.rows)), bad.rows), pa.int64())
        return {**given, bad.column: given[bad.column].take(at)}
    keep = from_numpy(np.flatnonzero(~bad.rows), pa.int64())
    return {name: column.take(keep) for name, column in given.items()}


def _only_used(column: pa.Array) -> pa.Array:
    """Returns the column without words in its dictionary that no row has, for these would be written too.

    The dictionary of a phase is always that of all phases.
    """
    if not pa.types.is_dictionary(column.type) or column.type.index_type == pa.int8():
        return column
    used = from_list(column.to_pylist(), column.type)
    return used if len(used.dictionary) < len(column.dictionary) else column
