"""Puts a sink in front of another one that passes on only rows that readers accept."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ..failure_reporter import FailureReporter
from ..protocols import Sink
from ..schema import schema
from .arrays import from_list, from_numpy
from .batches import null_misfits, to_columns
from .table_rules import BadRows, find_bad_rows, is_surely_right


class CheckedSink:
    """A `Sink` that checks the rows of a collector once, before they are held, kept or written."""

    def __init__(self, sink: Sink, reporter: FailureReporter) -> None:
        """Creates a sink in front of `sink`; `reporter` receives texts about values that break a rule."""
        self._sink = sink
        self._reporter = reporter
        # Everything except rows goes to the other sink unchecked.
        self.put_tensor, self.end_step = sink.put_tensor, sink.end_step
        self.mark, self.note, self.close, self.abandon = sink.mark, sink.note, sink.close, sink.abandon

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Takes a batch of rows of one table; see `Sink.write`.

        Raises:
            ValueError: the columns do not fit the table, or with `strict` a value breaks a rule of it.
        """
        accepted, faults = check_rows(table, columns)
        if faults:
            steps = accepted["step"].to_pylist() if "step" in accepted else ()
            self._reporter.rows_refused(table, faults, min(steps, default=None))
        if accepted and len(next(iter(accepted.values()))):
            self._sink.write(table, accepted)


def check_rows(table: str, columns: Mapping[str, Any]) -> tuple[dict[str, pa.Array], list[str]]:
    """Returns the columns with nulls in place of values that break a rule, and a text for each broken rule.

    If the column may not be null, the whole row is left out.

    Raises:
        ValueError: the columns are not those of the table, or of different lengths.
    """
    faults: list[str] = []
    fields = schema(table)
    try:
        converted: dict[str, pa.Array] = to_columns(table, columns)
    except ValueError as error:
        if not columns or not columns.keys() <= {*fields.names}:
            raise
        converted = to_columns(table, null_misfits(table, columns), with_nulls=True)
        faults.append(str(error))
    if is_surely_right(table, converted):
        return converted, faults
    given_schema = pa.schema([fields.field(name) for name in converted])
    while bad := next(
        find_bad_rows(table, pa.Table.from_arrays([*converted.values()], schema=given_schema)), None
    ):
        used = _only_used(converted[bad.column])
        if used is not converted[bad.column]:
            converted[bad.column] = used  # the bad word was only in the dictionary, not in a row
            continue
        row = int(np.argmax(bad.rows))
        faults.append(f"{table}.{bad.column} of row {row} {bad.describe(row)}")
        converted = _without(table, converted, bad)
    return converted, faults


def _without(table: str, given: Mapping[str, pa.Array], bad: BadRows) -> dict[str, pa.Array]:
    """Returns the columns without the values that break a rule, or without their rows."""
    field = schema(table).field(bad.column)
    if field.nullable:
        at = from_numpy(np.ma.masked_array(np.arange(len(bad.rows)), bad.rows), pa.int64())
        return {**given, bad.column: given[bad.column].take(at)}
    keep = from_numpy(np.flatnonzero(~bad.rows), pa.int64())
    return {name: column.take(keep) for name, column in given.items()}


def _only_used(column: pa.Array) -> pa.Array:
    """Returns the column without dictionary words that no row uses, because these would be written as well.

    The dictionary of a phase is always that of all phases.
    """
    if not pa.types.is_dictionary(column.type) or column.type.index_type == pa.int8():
        return column
    used = from_list(column.to_pylist(), column.type)
    return used if len(used.dictionary) < len(column.dictionary) else column
