"""Reads what differs between steps of each module: its times, and the statistics of its tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.protocols import RecordingData
from ...recording.statistics.moments import StatColumns
from ..tables.calls import read_calls
from ..tables.columns import Column, Groups, Rows, column_of, find_rows
from ..tables.device_times import on_device, steps_on_device
from ..tables.placement import Placer, name_roots
from ..tables.shown_steps import take_steps
from ..tables.times import CallTimes, TimesOfSteps
from .module_tree import MODULE_PHASES, find_totals
from .value_summary import Kind
from .values import RowsOfPlaces, StepValues, find_rows_of_places, read_values

Place = tuple[str, str]  # the name of a root and a path

#: The kinds of values that modules have statistics of.
_KINDS: tuple[Kind, ...] = ("output", "gradient", "parameter", "parameter gradient")


@dataclass(frozen=True, kw_only=True)
class ModulesOverSteps:
    """The modules that ran in several steps. Matrices have a row for each place with values, a column for each step."""

    times: Mapping[str, tuple[Sequence[Place], TimesOfSteps]]  # by phase, the places that ran, and matrices
    places: Sequence[Place]  # the places with values
    statistics: Mapping[Kind, StatColumns]  # matrices; those of parameters include what is inside
    nonfinite: Column  # as `nonfinite` and `nonfinite_inside` of summaries together
    measured: Column  # how many rows of its own a place has


def read_over_steps(data: RecordingData, steps: Column) -> ModulesOverSteps:
    """Returns the modules that ran in some steps.

    Args:
        data: the recording.
        steps: the numbers of two or more steps that have ended, ascending.
    """
    chosen, placer, values = take_steps(data, steps), Placer(data), read_values(data, steps)
    calls = read_calls(data.table("calls"), placer, steps, also=values.rows.call_id)
    times = CallTimes(on_device(calls), steps_on_device(chosen, calls))
    totals, _, _ = find_totals(placer.places, times)
    found = find_rows_of_places(values, calls)
    roots = name_roots(placer.places)
    names = [(roots.get(place.module.root_id, ""), place.path) for place in placer.places]
    merged = _Merger(values, steps, found)
    return ModulesOverSteps(
        times={phase: _sum_phase(times, totals, phase, names) for phase in MODULE_PHASES},
        places=[names[place] for place in found.places.tolist()],
        statistics={kind: merged.statistics(kind) for kind in _KINDS},
        nonfinite=merged.nonfinite(),
        measured=merged.measured(),
    )


def _sum_phase(
    times: CallTimes, totals: Mapping[tuple[int, str], Rows], phase: str, names: Sequence[Place]
) -> tuple[Sequence[Place], TimesOfSteps]:
    at = [place for place, of_phase in totals if of_phase == phase]
    summed = times.sum_in_steps([(times.at(place, phase), totals[place, phase]) for place in at])
    return [names[place] for place in at], summed


class _Merger:
    """Adds up the rows of places, step by step."""

    def __init__(self, values: StepValues, steps: Column, found: RowsOfPlaces) -> None:
        self._values = values
        self._found = found
        self._step = find_rows(steps, column_of(values.rows.table, "step"))
        self._shape = len(found.places), len(steps)

    def statistics(self, kind: Kind) -> StatColumns:
        """Returns the numbers of all rows of a kind together."""
        rows, cell = self._find_cells([self._found.of(kind)])
        stats = self._values.stats.take(rows)
        lowest, highest = np.full((2, self._shape[0] * self._shape[1]), np.nan)
        np.fmin.at(lowest, cell, stats.min)
        np.fmax.at(highest, cell, stats.max)
        return StatColumns(
            count=self._add(cell, stats.count).astype(np.int64),
            min=lowest.reshape(self._shape),
            max=highest.reshape(self._shape),
            sum=self._add(cell, stats.sum),
            sumsq=self._add(cell, stats.sumsq),
            nan_count=self._add(cell, stats.nan_count).astype(np.int64),
            inf_count=self._add(cell, stats.inf_count).astype(np.int64),
        )

    def nonfinite(self) -> Column:
        """Returns how many elements are not finite, with those inside."""
        rows, cell = self._find_cells([self._found.bad_inside, *self._found.bad.values()])
        return self._add(cell, self._values.stats.nonfinite[rows])

    def measured(self) -> Column:
        """Returns how many rows of its own each place has."""
        rows, cell = self._find_cells([*self._found.own.values()])
        return self._add(cell, np.ones(len(rows)))

    def _find_cells(self, of_kinds: Sequence[Groups]) -> tuple[Rows, Rows]:
        """Returns the rows of all places, and for each the number of its cell, that of a place and a step."""
        taken = [groups.take(self._found.places) for groups in of_kinds]
        rows = np.concatenate([rows for rows, _ in taken])
        place = np.concatenate([np.repeat(np.arange(self._shape[0]), counts) for _, counts in taken])
        return rows, place * self._shape[1] + self._step[rows]

    def _add(self, cell: Rows, values: Column) -> Column:
        size = self._shape[0] * self._shape[1]
        added: Column = np.bincount(cell, values, size).reshape(self._shape)
        return added
