"""Sums the times of calls in a step, or takes their medians over several, by place and phase or for any selection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, PHASE_CODE, PHASES, ByPhase
from .calls import Calls, number_calls
from .chosen_step import ChosenSteps
from .columns import Bools, Column, Rows, find_rows, split_rows
from .placement import NOWHERE
from .quartiles import Quartiles, find_medians, find_quartiles


@dataclass(slots=True, eq=False)
class TimesOfSteps:
    """The summed times of calls in each of several steps: a column each, or of many groups of calls a matrix each."""

    step_ns: Column  # the durations of the steps
    has_calls: Bools
    calls: Column
    total_ns: Column
    self_ns: Column


@dataclass(frozen=True, kw_only=True, slots=True)
class OverSteps:
    """How the times of a phase differ between several steps, without steps in which no call ran."""

    steps: int  # in how many steps calls ran; of several modules, of the one for which it is fewest
    calls: Quartiles
    total_ns: Quartiles
    self_ns: Quartiles
    of_groups: TimesOfSteps = field(repr=False, compare=False)  # matrices, which many share
    group: int = field(repr=False, compare=False)

    @property
    def times(self) -> TimesOfSteps:
        """The times in each of the steps."""
        of, group = self.of_groups, self.group
        return TimesOfSteps(
            of.step_ns, of.has_calls[group], of.calls[group], of.total_ns[group], of.self_ns[group]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    """Summed times of the calls of one phase in a step. All exclude the time that modtrace spent measuring.

    Of several steps, they are medians over the steps in which calls ran, each by itself.
    """

    calls: int = 0
    total_ns: int = 0  # includes nested calls; a call inside a call of the same module counts once
    self_ns: int = 0  # excludes nested calls; 0 where children in several threads add up to more
    share: float | None = None  # `total_ns` as a part of the step's time; None if that is not known
    unfinished: int = 0  # the number of calls without time, as their end was not seen; summed over steps
    raised: int = 0  # the number of calls that ended with an exception; summed over steps
    shortest_ns: int | None = None  # the shortest time among the modules that a folded line stands for
    longest_ns: int | None = None
    over_steps: OverSteps | None = None  # None for a single step


class CallTimes:
    """The calls of the chosen steps, with the times that result from all of them together."""

    def __init__(self, calls: Calls, steps: ChosenSteps) -> None:
        self._calls = calls
        self._steps = steps
        #: For each call, the index of its step among the chosen ones; -1 for calls of other steps.
        self._step = find_rows(steps.numbers, calls.column("step"))
        self._order = number_calls(calls.levels, calls.parent)
        self._rows = _group(calls)
        self._totals = self._find_totals()
        #: The phases in which calls of the steps ran at some place.
        self.phases = frozenset(PHASES[phase] for _, phase in self._rows)
        is_counted = ~_is_within_wrapper(calls)
        #: For each call: 1, its time, its own time, and 1 if it counts, if it has not ended, and if it raised.
        self._sums: Sequence[Column] = (
            np.ones(len(calls)),
            calls.duration_ns,
            _own_times(calls),
            is_counted,
            is_counted & ~calls.ended,
            is_counted & calls.raised,
        )

    @property
    def several(self) -> bool:
        """Whether the calls are of several steps."""
        return self._steps.several

    def at(self, place: int, phase: str) -> Rows:
        """Returns the calls of the steps at a place."""
        return self._rows.get((place, PHASE_CODE[phase]), _NO_ROWS)

    def total_at(self, place: int, phase: str) -> Rows | None:
        """Returns the calls at a place that are inside no other of them; None if a step has no call there."""
        return self._totals.get((place, PHASE_CODE[phase]))

    def outermost(self, rows: Rows) -> Rows:
        """Returns those of the rows `rows` that are inside no other of them."""
        return self._order.outermost(rows)

    def in_other_steps(self, rows: Rows, than: Rows) -> Rows:
        """Returns those of the rows `rows` that are of steps of which no call is among the rows `than`."""
        has_calls = np.zeros(len(self._steps.numbers), bool)
        has_calls[self._step[than]] = True
        return rows[:0] if has_calls.all() else rows[~has_calls[self._step[rows]]]

    def sum_up(self, groups: Sequence[tuple[Rows, Rows]]) -> list[PhaseTimes]:
        """Returns the summed times of groups of calls.

        Args:
            groups: the calls of each group, and those over which its total is summed.
        """
        times, unfinished, raised = self._sum_in_steps(groups)
        to_times = _to_medians if self._steps.several else _to_single
        return to_times(times, unfinished.tolist(), raised.tolist())

    def sum_in_steps(self, groups: Sequence[tuple[Rows, Rows]]) -> TimesOfSteps:
        """Returns the summed times of groups, which are given as to `sum_up`, in each step: a row for each group."""
        return self._sum_in_steps(groups)[0]

    def _sum_in_steps(self, groups: Sequence[tuple[Rows, Rows]]) -> tuple[TimesOfSteps, Column, Column]:
        """Returns the times of `sum_in_steps`, and how many calls of each group have not ended, and how many raised."""
        own, total = (self._add_up([pair[at] for pair in groups]) for at in (0, 1))
        times = TimesOfSteps(
            step_ns=self._steps.duration_ns,
            has_calls=(own[0] > 0) | (total[0] > 0),
            calls=own[3].copy(),  # without the other sums
            total_ns=total[1].copy(),
            self_ns=own[2].copy(),
        )
        return times, own[4].sum(axis=1), own[5].sum(axis=1)

    def _find_totals(self) -> Mapping[tuple[int, int], Rows]:
        """Returns the outermost calls by place and phase, where calls ran in all steps, as at most places."""
        groups = [*self._rows.values()]
        rows = np.concatenate([_NO_ROWS, *groups])
        group = np.repeat(np.arange(len(groups)), [len(part) for part in groups])
        steps = len(self._steps.numbers)
        called = np.unique(group * steps + self._step[rows]) // max(steps, 1)
        in_all = np.bincount(called, minlength=len(groups)) == steps
        number = np.full(len(self._step), -1, np.int64)
        number[rows] = group
        outermost = self._order.outermost_of_groups(rows, group)
        keys = [*self._rows]
        return {keys[at]: of_group for at, of_group in split_rows(outermost, number[outermost]) if in_all[at]}

    def _add_up(self, groups: Sequence[Rows]) -> Column:
        """Returns a matrix for each of the sums, with a row for each group and a column for each step."""
        rows = np.concatenate([_NO_ROWS, *groups])
        group = np.repeat(np.arange(len(groups)), [len(part) for part in groups])
        shape = len(groups), len(self._steps.numbers)
        key = group * shape[1] + self._step[rows]
        # The sums are exact, as none reaches 2**53: that would be 104 days.
        sums = [np.bincount(key, column[rows], shape[0] * shape[1]) for column in self._sums]
        return np.array(sums).astype(np.int64).reshape(len(sums), *shape)

    def of_phase(self, phase: str) -> PhaseTimes:
        """Returns the summed times of a phase's calls that are inside no other call of that phase."""
        rows = self.outermost(
            np.flatnonzero(self._calls.in_step & (self._calls.phase == PHASES.index(phase)))
        )
        return self.sum_up([(rows, rows)])[0] if len(rows) else NO_CALLS

    def outside_ns(self) -> Column:
        """Returns the part of each step's time in which no call ran; -1 where it is not known."""
        rows = self.outermost(np.flatnonzero(self._calls.in_step))
        times = zip(self._steps.start_ns.tolist(), self._steps.end_ns.tolist(), strict=True)
        return np.array(
            [
                self._outside_of(rows[self._step[rows] == number], number, *ends)
                for number, ends in enumerate(times)
            ],
            np.int64,
        )

    def _outside_of(self, rows: Rows, step: int, start_ns: int, end_ns: int) -> int:
        if start_ns < 0 or end_ns < 0 or not self._calls.ended[rows].all():
            return -1
        starts, overhead_ns = self._calls.start_ns[rows], self._calls.overhead_ns[rows]
        ends = starts + self._calls.duration_ns[rows] + overhead_ns
        uncovered_ns = end_ns - start_ns - _covered_ns(starts, ends, start_ns, end_ns)
        # Calls in several threads may overlap, and then their sum may exceed the duration of the step.
        measuring_ns = max(int(self._steps.overhead_ns[step]) - int(overhead_ns.sum()), 0)
        # The overhead of optimizers is unknown in some recordings, and then the sum may exceed what is left of the
        # step.
        return uncovered_ns - measuring_ns if uncovered_ns >= measuring_ns else -1


NO_CALLS = PhaseTimes()


def find_quartile_ranges(of_rows: Sequence[ByPhase[PhaseTimes]]) -> list[float | None]:
    """Returns the interquartile range of the forward and backward of each row, as a part of their median.

    None stands for rows of a single step, and of which the median is 0.
    """
    over_steps = [
        [over.times for phase in (FORWARD, BACKWARD) if (over := row.phase(phase).over_steps)]
        for row in of_rows
    ]
    known = [row for row, times in enumerate(over_steps) if times]
    ranges: list[float | None] = [None] * len(of_rows)
    if known:
        has_calls = np.stack([np.any([part.has_calls for part in over_steps[row]], axis=0) for row in known])
        total_ns = np.stack([np.sum([part.total_ns for part in over_steps[row]], axis=0) for row in known])
        for row, of_row in zip(known, find_quartiles(total_ns, has_calls), strict=True):
            ranges[row] = of_row.range
    return ranges


def sum_times(times: Sequence[PhaseTimes], outer: Sequence[PhaseTimes]) -> PhaseTimes:
    """Returns the sum of several times. The total is summed over `outer` only, of which none is inside another.

    Over several steps it is the median of the sums.
    """
    unfinished, raised = sum(module.unfinished for module in times), sum(module.raised for module in times)
    over_steps = [module.over_steps for module in times if module.over_steps is not None]
    if over_steps:
        own = [over.times for over in over_steps]
        totals = [module.over_steps.times.total_ns for module in outer if module.over_steps is not None]
        summed = TimesOfSteps(
            step_ns=own[0].step_ns,
            has_calls=np.any([module.has_calls for module in own], axis=0)[None],
            calls=np.sum([module.calls for module in own], axis=0)[None],
            total_ns=np.sum(totals, axis=0)[None],
            self_ns=np.sum([module.self_ns for module in own], axis=0)[None],
        )
        [median] = _to_medians(summed, [unfinished], [raised])
        assert median.over_steps is not None
        fewest = min(over.steps for over in over_steps)
        return replace(median, over_steps=replace(median.over_steps, steps=fewest))
    shares = [module.share for module in outer if module.share is not None]
    return PhaseTimes(
        calls=sum(module.calls for module in times),
        total_ns=sum(module.total_ns for module in outer),
        self_ns=sum(module.self_ns for module in times),
        share=sum(shares) if shares else None,
        unfinished=unfinished,
        raised=raised,
    )


def _to_single(times: TimesOfSteps, unfinished: Sequence[int], raised: Sequence[int]) -> list[PhaseTimes]:
    """Returns the times of the groups in a single step."""
    step_ns = int(times.step_ns.max(initial=0))
    sums = (column.sum(axis=1).tolist() for column in (times.calls, times.total_ns, times.self_ns))
    return [
        PhaseTimes(
            calls=calls,
            total_ns=total_ns,
            self_ns=self_ns,
            share=total_ns / step_ns if step_ns > 0 else None,
            unfinished=of_group[0],
            raised=of_group[1],
        )
        for calls, total_ns, self_ns, *of_group in zip(*sums, unfinished, raised, strict=True)
    ]


def _to_medians(times: TimesOfSteps, unfinished: Sequence[int], raised: Sequence[int]) -> list[PhaseTimes]:
    """Returns the medians of the groups over the steps in which they have calls."""
    known = times.has_calls
    shares = find_medians(times.total_ns / np.maximum(times.step_ns, 1), known & (times.step_ns > 0))
    quartiles = (find_quartiles(column, known) for column in (times.calls, times.total_ns, times.self_ns))
    found = zip(known.sum(axis=1).tolist(), shares.tolist(), unfinished, raised, *quartiles, strict=True)
    return [
        PhaseTimes(
            calls=calls.median,
            total_ns=total_ns.median,
            self_ns=self_ns.median,
            share=share,
            unfinished=not_ended,
            raised=with_exception,
            over_steps=OverSteps(
                steps=steps,
                calls=calls,
                total_ns=total_ns,
                self_ns=self_ns,
                of_groups=times,
                group=group,
            ),
        )
        for group, (steps, share, not_ended, with_exception, calls, total_ns, self_ns) in enumerate(found)
    ]


_NO_ROWS: Rows = np.empty(0, np.int64)


def _group(calls: Calls) -> Mapping[tuple[int, int], Rows]:
    """Returns the rows of the step's calls by place and phase."""
    rows = np.flatnonzero(calls.in_step & (calls.place != NOWHERE))
    keys = calls.place[rows] * len(PHASES) + calls.phase[rows]
    return {divmod(key, len(PHASES)): group for key, group in split_rows(rows, keys)}


def _is_within_wrapper(calls: Calls) -> Column:
    """Returns whether a wrapper made each call, of the module that it wraps. Both share a node, so it counts once."""
    has_parent = calls.parent >= 0
    same_node = has_parent & (calls.place[calls.parent] == calls.place)
    within: Column = same_node & (calls.module[calls.parent] != calls.module)
    return within


def _own_times(calls: Calls) -> Column:
    """Returns the time of each call minus that of its children of the same phase."""
    inside = np.zeros(len(calls), np.int64)
    is_child = calls.parent >= 0
    np.add.at(inside, calls.parent[is_child], calls.duration_ns[is_child])
    own: Column = np.maximum(calls.duration_ns - inside, 0)
    return own


def _covered_ns(starts: Column, ends: Column, first_ns: int, last_ns: int) -> int:
    """Returns how much of the range from `first_ns` to `last_ns` some interval covers."""
    order = np.argsort(starts, kind="stable")
    starts, ends = np.clip(starts[order], first_ns, last_ns), np.clip(ends[order], first_ns, last_ns)
    reached = np.maximum.accumulate(np.concatenate([[first_ns], ends]))
    return int(np.maximum(ends - np.maximum(starts, reached[:-1]), 0).sum())
