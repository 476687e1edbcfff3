"""Reads what differs between steps of each module: its times, and the statistics of its tensors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.protocols import RecordingData
from ...recording.statistics.moments import RAW, StatColumns
from ..tables.calls import Calls, read_calls
from ..tables.columns import Column, Groups, Rows, column_of, find_rows
from ..tables.device_times import on_device, steps_on_device
from ..tables.placement import Placer, name_roots
from ..tables.shown_steps import take_steps
from ..tables.times import CallTimes, TimesOfSteps
from .module_tree import MODULE_PHASES, find_totals
from .value_summary import Kind
from .values import SUMMARIZED, StepValues, find_rows_of_places, read_values

Place = tuple[str, str]  # the name of a root and a path

#: How statistics are merged that are no sums.
_EXTREMES = {"min": np.fmin, "max": np.fmax}

#: How many rows of values are merged at once: 800,000 take 300 MB.
_AT_ONCE = 250_000


@dataclass(frozen=True, kw_only=True)
class ModulesOverSteps:
    """The modules that ran in several steps. Matrices have a row for each place, a column for each step."""

    times: Mapping[str, tuple[Sequence[Place], TimesOfSteps]]  # by phase, the places that ran, and matrices
    places: Sequence[Place | None]  # all places; None for those without values
    statistics: Mapping[Kind, StatColumns]  # matrices; those of parameters include what is inside
    nonfinite: Column  # as `nonfinite` and `nonfinite_inside` of summaries together
    measured: Column  # how many rows of its own a place has


def read_over_steps(data: RecordingData, steps: Column) -> ModulesOverSteps:
    """Returns the modules that ran in some steps.

    Args:
        data: the recording.
        steps: the numbers of two or more steps that have ended, ascending.
    """
    chosen, placer = take_steps(data, steps), Placer(data)
    call_id = read_values(data, steps).rows.call_id
    calls = read_calls(data.table("calls"), placer, steps, also=call_id)
    merged = _merge_steps(data, steps, calls)
    times = CallTimes(on_device(calls), steps_on_device(chosen, calls))
    totals, _, _ = find_totals(placer.places, times)
    roots = name_roots(placer.places)
    names = [(roots.get(place.module.root_id, ""), place.path) for place in placer.places]
    has_values = np.any(merged["places"], axis=1)
    return ModulesOverSteps(
        times={phase: _sum_phase(times, totals, phase, names) for phase in MODULE_PHASES},
        places=[name if has else None for name, has in zip(names, has_values.tolist(), strict=True)],
        statistics={
            kind: StatColumns(**{name: merged[f"{kind} {name}"] for name in RAW}) for kind in SUMMARIZED
        },
        nonfinite=merged["nonfinite"],
        measured=merged["measured"],
    )


def _sum_phase(
    times: CallTimes, totals: Mapping[tuple[int, str], Rows], phase: str, names: Sequence[Place]
) -> tuple[Sequence[Place], TimesOfSteps]:
    at = [place for place, of_phase in totals if of_phase == phase]
    summed = times.sum_in_steps([(times.at(place, phase), totals[place, phase]) for place in at])
    return [names[place] for place in at], summed


def _merge_steps(data: RecordingData, steps: Column, calls: Calls) -> Mapping[str, Column]:
    """Returns what `_merge` does for all steps, of which it reads few at once."""
    step = find_rows(steps, column_of(read_values(data, steps).rows.table, "step"))
    before = np.cumsum(np.bincount(step, minlength=len(steps)))[:-1]
    merged: dict[str, Column] = {}
    for part in np.split(steps, np.flatnonzero(np.diff(before // _AT_ONCE, prepend=0)) + 1):
        is_in = np.isin(steps, part)
        for name, column in _merge(read_values(data, part), calls, part).items():
            empty = np.empty((len(column), len(steps)), column.dtype)
            merged.setdefault(name, empty)[:, is_in] = column
    return merged


def _merge(values: StepValues, calls: Calls, steps: Column) -> Mapping[str, Column]:
    """Returns matrices of the statistics of each kind, and of the other columns of `ModulesOverSteps`."""
    found = find_rows_of_places(values, calls)
    step = find_rows(steps, column_of(values.rows.table, "step"))
    shape = len(calls.placer.places), len(steps)
    has_values = np.zeros(shape, bool)
    has_values[found.places] = True

    def find_cells(of_kinds: Iterable[Groups]) -> tuple[Rows, Rows]:
        """Returns the rows of all places, and for each the number of its cell, that of a place and a step."""
        taken = [groups.take(np.arange(shape[0])) for groups in of_kinds]
        rows = np.concatenate([rows for rows, _ in taken])
        place = np.concatenate([np.repeat(np.arange(shape[0]), counts) for _, counts in taken])
        return rows, place * shape[1] + step[rows]

    def add(cell: Rows, numbers: Column) -> Column:
        added: Column = np.bincount(cell, numbers, shape[0] * shape[1]).reshape(shape)
        return added

    rows, cell = find_cells([found.bad_inside, *found.bad.values()])
    _, own = find_cells(found.own.values())
    merged = {
        "places": has_values,
        "nonfinite": add(cell, values.stats.nonfinite[rows]),
        "measured": add(own, np.ones(len(own))),
    }
    for kind in SUMMARIZED:
        rows, cell = find_cells([found.of(kind)])
        for name in RAW:
            numbers = getattr(values.stats, name)[rows]
            if name in _EXTREMES:
                merged[f"{kind} {name}"] = np.full(shape, np.nan)
                _EXTREMES[name].at(merged[f"{kind} {name}"].reshape(-1), cell, numbers)
            else:
                merged[f"{kind} {name}"] = add(cell, numbers).astype(numbers.dtype)
    return merged
