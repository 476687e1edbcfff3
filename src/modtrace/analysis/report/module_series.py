"""Builds the table of what differs between steps of each module, in the steps that there is room for."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ...recording.protocols import RecordingData
from ...recording.statistics.moments import RAW, StatColumns
from ..modules.over_steps import ModulesOverSteps, read_over_steps
from ..modules.value_summary import Kind
from ..tables.columns import Column, column_of
from ..tables.sampled_steps import MOST_STEPS
from .limits import thin
from .module_columns import list_statistics, list_times
from .modules import ModuleRows
from .tables import NONE, ReportColumn, ReportTable, narrow, number_column, round_to_show

#: How many columns most recordings have of a module in a step.
_COLUMNS = 10


def choose_kept_steps(data: RecordingData, rows: ModuleRows, most: int, kept: int | None) -> Column:
    """Returns evenly chosen steps that have ended and have calls, with at most `most` numbers together, and `kept`.

    They are none if there are fewer than two, between which nothing could differ.
    """
    called = np.unique(column_of(data.table("calls"), "step"))
    ended = np.intersect1d(called, column_of(data.table("steps"), "step"))
    of_step = len(rows.nodes) * _COLUMNS
    steps = thin(ended, of_step, min(most, MOST_STEPS * of_step), kept)
    return steps if len(steps) > 1 else steps[:0]


def tabulate_module_series(
    data: RecordingData, rows: ModuleRows, modules: ReportTable, steps: Column, kept: Column
) -> Mapping[str, ReportTable]:
    """Returns what differs between steps: all steps of the first module, then of the second, and so on.

    Args:
        data: the recording.
        rows: the rows of modules.
        modules: the table of modules, of whose columns these are the values in other steps.
        steps: the numbers of all steps, in the order of their table.
        kept: the numbers of the steps that are shown; none gives no tables.
    """
    if not len(kept):
        return {}
    of_modules = {column.name: column for column in modules.columns}
    over_steps = read_over_steps(data, kept)
    columns = tuple(
        replace(of_modules[column.name], values=round_to_show(narrow(column.values)))
        for column in (*_times(over_steps, rows, len(kept)), *_statistics(over_steps, rows, len(kept)))
        if column.name in of_modules
    )
    step = number_column("step", "step", "step", np.searchsorted(steps, kept))
    return {
        "module_steps": ReportTable(rows=len(kept), columns=(step,)),
        "module_series": ReportTable(rows=len(rows.nodes) * len(kept), columns=columns),
    }


def _times(over_steps: ModulesOverSteps, rows: ModuleRows, steps: int) -> Iterator[ReportColumn]:
    def read(phase: str, name: str) -> Column:
        found = np.full((len(rows.nodes), steps), np.nan)
        places, times = over_steps.times[phase]
        at = np.array([rows.index.get(place, NONE) for place in places], np.int64)
        shown = at >= 0
        found[at[shown]] = np.where(times.has_calls, getattr(times, name) / 1e9, np.nan)[shown]
        is_unknown = np.isnan(found)
        total = rows.combine_alike(np.where(is_unknown, 0, found), np.add)
        return np.where(rows.combine_alike(is_unknown, np.logical_and), np.nan, total).reshape(-1)

    return list_times(read, "")


def _statistics(over_steps: ModulesOverSteps, rows: ModuleRows, steps: int) -> Iterator[ReportColumn]:
    """Yields the statistics of all rows; a row of equal modules has those of all of them together."""
    place_rows = np.array(
        [NONE if place is None else rows.index.get(place, NONE) for place in over_steps.places], np.int64
    )
    shown = np.flatnonzero(place_rows >= 0)

    def to_rows(matrix: Column, unknown: float, combine: np.ufunc) -> Column:
        of_rows = np.full((len(rows.nodes), steps), unknown, matrix.dtype)
        of_rows[place_rows[shown]] = matrix[shown]
        return rows.combine_alike(of_rows, combine).reshape(-1)

    @lru_cache(2)  # those of all kinds take as much memory as the tree
    def merge(kind: Kind) -> StatColumns:
        of_places = over_steps.statistics[kind]
        return StatColumns(
            **{name: to_rows(getattr(of_places, name), *_HOW.get(name, _ADDED)) for name in RAW}
        )

    yield from list_statistics(_StatisticsOfSteps(merge))
    measured = rows.sum_inside(to_rows(over_steps.measured, *_ADDED).reshape(-1, steps)).reshape(-1)
    nonfinite = to_rows(over_steps.nonfinite, *_ADDED)
    yield number_column("nonfinite", "", "count", np.where(measured > 0, nonfinite, NONE))


#: What a row without values has of a raw statistic, and how rows of equal modules are put together.
_ADDED = (0, np.add)
_HOW: Mapping[str, tuple[float, np.ufunc]] = {
    "min": (np.nan, np.fmin),
    "max": (np.nan, np.fmax),
}


class _StatisticsOfSteps:
    """The statistics of all rows in all kept steps, all steps of the first row first."""

    def __init__(self, merge: Callable[[Kind], StatColumns]) -> None:
        self._merge = merge

    def read(self, kind: str, stat: str) -> Column:
        """Returns a statistic of the values of one kind; NaN where nothing was measured."""
        merged = self._merge(_KIND_OF[kind])
        with np.errstate(all="ignore"):
            statistic = getattr(merged, stat)
        return np.where(merged.count > 0, statistic, np.nan)


#: The kinds of values by the names that `ValueSummary` has for them.
_KIND_OF: Mapping[str, Kind] = {
    "output": "output",
    "gradient": "gradient",
    "parameters": "parameter",
    "parameter_gradients": "parameter gradient",
}
