"""Makes the table of the steps, with what the user logged."""

from collections.abc import Iterator

import numpy as np

from ...recording.protocols import RecordingData
from ..tables.columns import Column, RowFinder, column_of, dictionary_codes
from .tables import NONE, ReportColumn, ReportTable, number_column, text_column


def number_steps(data: RecordingData) -> Column:
    """Returns the numbers of all steps that have rows, ascending."""
    found = [column_of(data.table(name), "step") for name in ("steps", "calls", "ops", "values", "scalars")]
    return np.unique(np.concatenate(found)).astype(np.int64)


def find_start(data: RecordingData) -> int | None:
    """Returns when the first step began, on the clock of the recording; None if no beginning was recorded."""
    starts = column_of(data.table("steps"), "start_ns")
    return int(starts[starts >= 0].min()) if (starts >= 0).any() else None


def tabulate_steps(data: RecordingData, numbers: Column, zero_ns: int | None) -> ReportTable:
    """Returns a row for each step; their starts count from `zero_ns`."""
    table = data.table("steps")
    row = RowFinder(column_of(table, "step"))(numbers)
    start, end, overhead = (
        np.append(column_of(table, name), NONE)[row] for name in ("start_ns", "end_ns", "overhead_ns")
    )
    kinds = [*table["kind"].to_pylist(), None]
    known = start >= 0
    taken = np.where(known, (end - start - np.maximum(overhead, 0)) / 1e9, np.nan)
    columns = (
        number_column("number", "step", "count", numbers),
        text_column("kind", "kind", (kinds[at] for at in row.tolist())),
        number_column("start", "start", "seconds", np.where(known, (start - (zero_ns or 0)) / 1e9, np.nan)),
        number_column("duration", "duration", "seconds", taken, overlay=True),
        *_scalars(data, numbers),
    )
    return ReportTable(rows=len(numbers), columns=columns)


def _scalars(data: RecordingData, numbers: Column) -> Iterator[ReportColumn]:
    """Yields two columns for each scalar: its value, of several in a step the last one, and whether it was logged."""
    table = data.table("scalars")
    codes, names = dictionary_codes(table["name"])
    at, values = RowFinder(numbers)(column_of(table, "step")), table["value"].to_numpy()
    for code, name in enumerate(names):
        column = np.full(len(numbers), np.nan)
        rows = np.flatnonzero(codes == code)
        column[at[rows]] = values[rows]
        yield number_column(f"scalar.{name}", name, "number", column, scalar=True, overlay=True)
        logged = np.zeros(len(numbers), np.uint8)
        logged[at[rows]] = 1  # tells a NaN that was logged from nothing
        yield number_column(f"logged.{name}", f"{name} was logged", "flag", logged)
