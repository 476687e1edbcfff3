"""Writes the rows of steps that have ended."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ...errors import describe_error
from ...recording.failure_reporter import FailureReporter
from ...recording.protocols import RecentCollectives, Sink
from ...recording.triggers.step_conditions import NonFiniteFinding
from ...recording.triggers.trigger_kinds import OnSignal
from ...recording.triggers.watch import TriggerFinding
from ..collectives.recorder import CollectiveRecorder
from ..compile.compilations import CompilationRecorder
from ..log.device_times import DeviceTimes
from ..log.nesting import Ints
from ..ops.recorder import OpRecorder
from ..scopes.tracker import ScopeTracker
from ..steps.call_rows import (
    NthMemory,
    add_overheads,
    call_columns,
    intervals_of,
    optimizer_columns,
    step_columns,
)
from ..steps.device_columns import add_device_times, device_events
from ..steps.intervals import IntervalRecorder
from ..steps.scalars import Scalars, free_scalars
from ..steps.step import Step
from ..values.measured import are_finite
from ..values.parameter_facts import ParameterFacts
from ..values.recorder import ValueRecorder, free_values
from ..values.sites import SiteIds

#: Batches of rows, each with the name of its table.
Rows = list[tuple[str, dict[str, Any]]]


class StepHolder(Protocol):
    """A sink that checks each step, and may hold steps until a trigger fires."""

    signals: tuple[OnSignal, ...]
    last_fired_step: int | None

    @property
    def held_steps(self) -> int:
        """The number of steps that wait for a trigger."""

    def request_step(self) -> None:
        """Requests that the next step's rows are written, with the held steps before it."""

    def fire(self, kind: str, reason: str, now_ns: int, *, coming: Sequence[int] = ()) -> None:
        """Writes the held steps, and `coming`: steps that belong to them and have not ended."""

    @property
    def finds_origin(self) -> bool:
        """True if a trigger asks what made non-finite values."""

    def may_skip(self, step: int, is_skipping: Callable[[], bool | None]) -> None:
        """Records that an optimizer is called in a step; `is_skipping` is asked when the step is judged.

        `is_skipping` returns None if it is not known whether the optimizer skips its update; see `triggers/watch.py`.
        """

    @property
    def stops_runs(self) -> bool:
        """True if a trigger may stop the run."""

    def take_stops(self) -> Sequence[TriggerFinding]:
        """Returns the findings in ended steps for which the run should stop, each once."""

    def find_in_open(self, batches: Rows) -> NonFiniteFinding | None:
        """Returns what made NaN or infinite values in the open step of a beginning optimizer, from the step's rows."""


class RowWriter:
    """Writes all tables of one recording into its sink. Callers hold the lock of the sink."""

    def __init__(
        self,
        sink: Sink,
        reporter: FailureReporter,
        values: ValueRecorder,
        sites: SiteIds,
        flight_recorder: StepHolder | None,
        *,
        with_backward: bool,
        with_device_times: bool,
    ) -> None:
        """Creates a writer. `with_backward` includes the rows of backward calls."""
        self.compilations = CompilationRecorder(sink, reporter)
        self.collectives = CollectiveRecorder(sink, reporter)
        self.intervals = IntervalRecorder(sink)
        self.scalars = Scalars(reporter.warn_once)
        self.parameters = ParameterFacts(sites, reporter)
        self._with_backward = with_backward
        self._with_device_times = with_device_times
        self._sink = sink
        self._reporter = reporter
        self._values = values
        self._flight_recorder = flight_recorder
        self._memory = NthMemory()
        self._names_revision = 0

    def start(
        self,
        tracker: ScopeTracker,
        ops: OpRecorder | None,
        make_ring: Callable[[], RecentCollectives | None] | None,
    ) -> None:
        """Starts recording what has no hooks; `make_ring` makes what keeps the newest collectives."""
        self.parameters.start(tracker.names)
        self.compilations.start(tracker, None if ops is None else ops.compiled_runs)
        self.collectives.start(tracker, make_ring)
        self.intervals.start(tracker.logs, tracker.subscribers)

    def stop(self) -> None:
        """Stops what `start` started."""
        self.compilations.stop()
        self.collectives.stop()
        self.intervals.stop()

    def forked(self) -> None:
        """Stops in a forked child."""
        self.collectives.forked()
        self.intervals.stop()

    def settle(self, step: Step, *, has_calls: bool, until_ns: float) -> None:
        """Assigns compilations, collectives and intervals to a step that has just ended, and reads its parameters.

        Args:
            step: the step; it still has its segments.
            has_calls: the step is recorded.
            until_ns: when the next step began; infinite if none has.
        """
        self.parameters.settle(step, is_recorded=has_calls)
        self.compilations.settle(step, has_calls=has_calls)
        self.collectives.settle(step, is_recorded=has_calls, until_ns=until_ns)
        self.intervals.settle(step, is_recorded=has_calls, until_ns=until_ns)

    def write(
        self, steps: list[Step], tracker: ScopeTracker, ops: OpRecorder | None, *, force: bool = False
    ) -> None:
        """Writes the rows of some steps, and of all modules seen since the last call.

        Args:
            steps: the ended steps, whose data are then freed.
            force: whether to flush the sink even if there are no steps.
        """
        if self._with_device_times:
            self._read_device_times(steps, tracker.device_times)
        self._reporter.write_late()
        measuring = intervals_of(steps)
        batches, optimizer_ids = self._read_calls(steps, tracker, measuring)
        self._write_modules(tracker)
        self.compilations.write()
        self.collectives.write()
        of_ops = () if ops is None else ops.write(steps, batches, optimizer_ids)
        for columns in batches:
            self._sink.write("calls", columns)
        step_rows = step_columns(steps) if steps else None
        parameters = self.parameters.take_columns()
        if steps or force:
            self.intervals.write(steps, measuring)
        self._values.write(steps, self._memory, of_ops)
        if parameters is not None:
            self._sink.write("parameters", parameters)
        scalars = self.scalars.columns(steps)
        if scalars is not None:
            self._sink.write("scalars", scalars)
        if step_rows is not None:
            self._sink.write("steps", step_rows)
        for step in steps:
            free_step(step)
        self._memory.prune()
        if self._flight_recorder is not None and any(step.asked_for for step in steps):
            self._flight_recorder.request_step()
        if steps or force:
            self._sink.end_step(time.perf_counter_ns(), force=True)

    def open_rows(self, step: Step, number: int, tracker: ScopeTracker, ops: OpRecorder | None) -> Rows:
        """Returns the rows of an open step, and writes the modules and sites that these refer to.

        The result is empty if all measured values are finite, which is checked without reading tensors.
        """
        step = replace(step, number=number, values=self._values.measured_in(step))
        if are_finite(step.measured()):
            return []
        calls, optimizer_ids = self._read_calls([step], tracker, intervals_of([step]))
        self._write_modules(tracker)
        batches, parts = ([], ()) if ops is None else ops.open_rows(step, calls, optimizer_ids)
        batches += self._values.read_rows([step], self._memory, parts)
        return [*(("calls", columns) for columns in calls), *batches]

    def _read_calls(
        self, steps: list[Step], tracker: ScopeTracker, measuring: Ints | None
    ) -> tuple[list[dict[str, Any]], Sequence[int]]:
        """Returns the rows of calls, with optimizer steps last, and the ids of the optimizer steps."""
        batches = call_columns(steps, self._memory, with_backward=self._with_backward)
        optimizer_count = sum(len(step.optimizer_steps) for step in steps)
        first_id = tracker.logs.take_ids(optimizer_count)
        optimizers = optimizer_columns(steps, first_id)
        batches += [optimizers] if optimizers else []
        add_overheads(batches, measuring)
        optimizer_ids = range(first_id, first_id + optimizer_count)
        if self._with_device_times:
            add_device_times(batches, steps, optimizer_ids)
        return batches, optimizer_ids

    def _read_device_times(self, steps: list[Step], device_times: DeviceTimes) -> None:
        """Waits until devices have finished what was issued in these steps, and reads the times."""
        device_times.read(event for step in steps for event in device_events(step))
        if device_times.failure is not None:
            why = describe_error(device_times.failure)
            self._reporter.warn_once(f"a device gives no more times, which are null from then on: {why}")

    def _write_modules(self, tracker: ScopeTracker) -> None:
        self._names_revision, modules = tracker.names.rows_since(self._names_revision)
        if modules:
            self._sink.write("modules", {name: [row[name] for row in modules] for name in modules[0]})


def free_step(step: Step) -> None:
    """Frees the data of a step that was written or is not wanted."""
    free_values([step])
    free_scalars([step])
    step.ops, step.saved = [], []
    for segment in step.segments:
        segment.holders -= 1
