"""Checks the rows of each step as they are written, and decides which triggers fire."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeGuard

import pyarrow as pa

from ..meta import Note
from .site_names import SiteNames
from .step_conditions import (
    SKIPS_WINDOW,
    Condition,
    Finder,
    IsNonFinite,
    NonFiniteFinding,
    StepRows,
    Use,
    are_many_skipped,
    condition_of,
    read_measured,
)
from .step_tables import GROWTH_STEPS, StepTables
from .tensor_rows import Batch
from .trigger_kinds import REPORT, STOP, OnSignal, Trigger, asks_for_origin, has_action


class TriggerFinding(NamedTuple):
    """A trigger's finding in a step, with what to report about it."""

    step: int
    then: str
    finding: NonFiniteFinding
    is_new: bool  # whether the step before had no finding


class TriggerWatch:
    """The triggers of one recording. Each fires in the step in which its condition becomes true.

    It can fire again after a step in which the condition was false. A step in which nothing was measured that a trigger
    checks does not change its state.
    """

    def __init__(self, triggers: Sequence[Trigger], find: Finder | None = None) -> None:
        """Creates a watch.

        Args:
            triggers: the triggers.
            find: finds what made values that are not finite; None to name the first tensor that holds some.
        """
        #: The findings in ended steps that were not taken yet.
        self.findings: list[TriggerFinding] = []
        self._names = SiteNames()
        self._tables = StepTables(GROWTH_STEPS if any(map(has_action, triggers)) else 0)
        #: Whether a trigger needs to know what made non-finite values.
        self.finds_origin = find is not None and asks_for_origin(triggers)
        self._armed = [
            _Armed(trigger, condition_of(trigger, find))
            for trigger in triggers
            if not isinstance(trigger, OnSignal)
        ]
        self.stops_runs = any(_stops(armed.condition) for armed in self._armed)
        self._skips: dict[int, list[Callable[[], bool | None]]] = {}  # by step, a function for each optimizer
        #: For the last steps with an optimizer, whether it left its parameters unchanged.
        self._skipped: deque[bool] = deque(maxlen=SKIPS_WINDOW)
        self._values: list[Mapping[str, pa.Array]] = []
        self._scalars: dict[str, list[float]] = {}

    def see(self, table: str, columns: Mapping[str, pa.Array]) -> None:
        """Receives rows of the step that is being written, as Arrow columns."""
        if not self._armed:
            return
        if self.finds_origin:
            self._tables.add(table, columns)
        if table == "modules":
            self._names.add_modules(columns)
        elif table == "sites":
            self._names.add_sites(columns)
        elif table == "values":
            self._values.append(columns)
        elif table == "scalars":
            for name, value in zip(columns["name"].to_pylist(), columns["value"].to_pylist(), strict=True):
                self._scalars.setdefault(name, []).append(value)

    def end_step(self, step: int) -> list[Note]:
        """Returns a note for each trigger that fires in the step whose rows were received since the last call."""
        if not self._armed:
            return []
        values, scalars = self._values, self._scalars
        self._values, self._scalars = [], {}
        skips = [self._skips.pop(number) for number in sorted(self._skips) if number <= step][-1:]
        if skips:
            self._skipped.append(False)  # corrected if something is found in the step

        @cache
        def find_use() -> Use:
            if not skips or not all(is_skipping() for is_skipping in skips[0]):
                return Use(None)
            self._skipped[-1] = True
            count = sum(self._skipped)
            return Use(are_many_skipped(count), count, len(self._skipped))

        step_rows = StepRows(read_measured(values), scalars, self._names, self._tables.read(), find_use)
        fired = []
        for armed in self._armed:
            reason = armed.condition(step_rows)
            if reason is None:
                continue
            if reason and isinstance(armed.condition, IsNonFinite):
                self._store_finding(step, armed, armed.condition, step_rows)
            if reason and armed.is_armed:
                fired.append(Note(step=step, kind=type(armed.trigger).__name__, reason=reason))
            armed.is_armed = not reason
        if self.finds_origin:
            self._tables.end_step()
        return fired

    def may_skip(self, step: int, is_skipping: Callable[[], bool | None]) -> None:
        """Records that an optimizer is called in a step and may leave its parameters unchanged.

        Args:
            step: the number of the step.
            is_skipping: returns whether it does, when the step has ended; it may wait for a device. None if unknown.
        """
        self._skips.setdefault(step, []).append(is_skipping)

    def _store_finding(self, step: int, armed: "_Armed", condition: IsNonFinite, seen: StepRows) -> None:
        if condition.then == STOP and seen.find_use().is_used is False:
            return  # no optimizer used the values, thanks to a GradScaler
        if condition.then in (REPORT, STOP) and condition.finding is not None:
            self.findings.append(TriggerFinding(step, condition.then, condition.finding, armed.is_armed))

    def find_in_open(self, batches: Sequence[Batch]) -> NonFiniteFinding | None:
        """Returns what a trigger that stops the run finds in a step whose optimizer is about to step, without firing.

        Args:
            batches: the rows of the step so far.
        """
        values = [columns for table, columns in batches if table == "values"]
        step_rows = StepRows(
            read_measured(values), {}, self._names, self._tables.read(batches), lambda: Use(True)
        )
        for armed in self._armed:
            if _stops(armed.condition):
                armed.condition(step_rows)
                if armed.condition.finding is not None:
                    return armed.condition.finding
        return None


def _stops(condition: Condition) -> TypeGuard[IsNonFinite]:
    return isinstance(condition, IsNonFinite) and condition.then == STOP


@dataclass
class _Armed:
    """A trigger with its state: whether it may fire."""

    trigger: Trigger
    condition: Condition
    is_armed: bool = True
