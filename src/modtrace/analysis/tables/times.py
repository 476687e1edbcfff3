"""Sums the times of a step's calls, by place and phase or for any selection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.phase import PHASES
from .calls import Calls, number_calls
from .chosen_step import ShownStep
from .columns import Column, Rows, split_rows
from .placement import NOWHERE


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Summed times of the calls of one phase in a step. All exclude the time that modtrace spent measuring."""

    calls: int = 0
    total_ns: int = 0  # includes nested calls; a call inside a call of the same module counts once
    self_ns: int = 0  # excludes nested calls; 0 where children in several threads add up to more
    share: float | None = None  # `total_ns` as a part of the step's time; None if that is not known
    unfinished: int = 0  # the number of calls without time, as their end was not seen
    raised: int = 0  # the number of calls that ended with an exception
    shortest_ns: int | None = None  # the shortest time among the modules that a folded line stands for
    longest_ns: int | None = None


class CallTimes:
    """The calls of a step, with the times that result from all of them together."""

    def __init__(self, calls: Calls, step: ShownStep | None) -> None:
        self._calls = calls
        self._step = step
        self._order = number_calls(calls.levels, calls.parent)
        self._rows = _group(calls)
        #: The phases in which calls of the step ran at some place.
        self.phases = frozenset(PHASES[phase] for _, phase in self._rows)
        is_counted = ~_is_within_wrapper(calls)
        #: For each call: its time, its own time, and 1 if it counts, if it has not ended, and if it raised.
        self._sums = np.stack(
            [
                calls.duration_ns,
                _own_times(calls),
                is_counted,
                is_counted & ~calls.ended,
                is_counted & calls.raised,
            ],
            axis=1,
        ).astype(np.int64)

    def at(self, place: int, phase: str) -> Rows:
        """Returns the calls of the step at a place."""
        return self._rows.get((place, PHASES.index(phase)), _NO_ROWS)

    def outermost(self, rows: Rows) -> Rows:
        """Returns those of the rows `rows` that are inside no other of them."""
        return self._order.outermost(rows)

    def sum_up(self, rows: Rows, *, total: Rows) -> PhaseTimes:
        """Returns the summed times of the calls `rows`; the total is summed over the calls `total`."""
        if not len(rows) and not len(total):
            return NO_CALLS
        total_ns, self_ns, calls, unfinished, raised = self._add_up(rows)
        if total is not rows:
            total_ns = self._add_up(total)[0]
        step_ns = self._step.duration_ns if self._step else None
        return PhaseTimes(
            calls=calls,
            total_ns=total_ns,
            self_ns=self_ns,
            share=total_ns / step_ns if step_ns else None,
            unfinished=unfinished,
            raised=raised,
        )

    def _add_up(self, rows: Rows) -> list[int]:
        sums: list[int] = (self._sums[rows[0]] if len(rows) == 1 else self._sums[rows].sum(axis=0)).tolist()
        return sums

    def of_phase(self, phase: str) -> PhaseTimes:
        """Returns the summed times of a phase's calls that are inside no other call of that phase."""
        rows = self.outermost(
            np.flatnonzero(self._calls.in_step & (self._calls.phase == PHASES.index(phase)))
        )
        return self.sum_up(rows, total=rows)

    def outside_ns(self) -> int | None:
        """Returns the part of the step's time in which no call ran; None if it is not known."""
        rows = self.outermost(np.flatnonzero(self._calls.in_step))
        step = self._step
        if step is None or step.start_ns is None or step.end_ns is None or not self._calls.ended[rows].all():
            return None
        starts, overhead_ns = self._calls.start_ns[rows], self._calls.overhead_ns[rows]
        ends = starts + self._calls.duration_ns[rows] + overhead_ns
        uncovered_ns = step.end_ns - step.start_ns - _covered_ns(starts, ends, step.start_ns, step.end_ns)
        # Calls in several threads may overlap, and then their sum may exceed the duration of the step.
        measuring_ns = max(step.overhead_ns - int(overhead_ns.sum()), 0)
        # The overhead of optimizers is unknown in some recordings, and then the sum may exceed what is left of the
        # step.
        return uncovered_ns - measuring_ns if uncovered_ns >= measuring_ns else None


NO_CALLS = PhaseTimes()


def sum_times(times: Sequence[PhaseTimes], outer: Sequence[PhaseTimes]) -> PhaseTimes:
    """Returns the sum of several times. The total is summed over `outer` only, of which none is inside another."""
    shares = [module.share for module in outer if module.share is not None]
    return PhaseTimes(
        calls=sum(module.calls for module in times),
        total_ns=sum(module.total_ns for module in outer),
        self_ns=sum(module.self_ns for module in times),
        share=sum(shares) if shares else None,
        unfinished=sum(module.unfinished for module in times),
        raised=sum(module.raised for module in times),
    )


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
