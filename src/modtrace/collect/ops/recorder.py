"""Records every operator of one recording: enters the mode, assigns ops to steps, and writes their rows."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ...recording.failure_reporter import FailureReporter
from ...recording.options.op_options import Ops
from ...recording.protocols import Sink
from ...torch_internals.autograd import sequence_nr
from ...torch_internals.modes import (
    count_dispatch_modes,
    is_dispatch_mode_on,
    leave_dispatch_mode,
    leave_function_mode,
)
from ..log.segments import Segment
from ..log.thread_log import Backward
from ..scopes.tracker import ScopeTracker
from ..steps.step import Step
from ..tensor_ids.storage_resizes import unwatch_resizes, watch_resizes
from ..values.capture_masks import Mask
from ..values.recorder import ValueRecorder
from ..values.rows import ValuePart
from ..values.sites import SiteIds
from .alive import AliveStorages
from .batches import OpBatch
from .boundary import OpBoundary
from .call_costs import CallTable, add_costs
from .compiled_runs import CompiledRuns
from .device_times import OpDeviceTimes
from .leaves import OpLeaves
from .mode import OpMode
from .nodes import OpNodes
from .preparation import move_prepared
from .python_source import PythonNames, SourceLines
from .rows import OpTables, part_runs
from .saved_memory import SavedMemoryFinder
from .value_rows import read_values
from .values import OpValues


class OpRecorder:
    """Records the ops of one recording, from the mode that sees them to their rows."""

    def __init__(
        self,
        tracker: ScopeTracker,
        options: Ops,
        sink: Sink,
        sites: SiteIds,
        reporter: FailureReporter,
        *,
        device_times: bool = False,
    ) -> None:
        """Creates a recorder, which sees nothing before `start()`."""
        self.mode = OpMode(tracker, reporter.ops_failed)
        self.early: list[OpBatch] = []  # that ran while no step was open
        self._tracker = tracker
        self._sink = sink
        self._sites = sites
        self._reporter = reporter
        self._tables = OpTables(self.mode, OpNodes(tracker.logs.current.number, sequence_nr()))
        self._values: OpValues | None = None
        self._sources = SourceLines() if options.source else None
        self._python_names = PythonNames() if options.python_names else None
        self._device_times = OpDeviceTimes(tracker.device_times) if device_times else None
        self.compiled_runs = CompiledRuns(tracker, self.mode)
        self._leaves = OpLeaves(tracker)
        self.alive = AliveStorages(tracker, self.mode.ids)
        self._boundary = OpBoundary(tracker, self.mode, self._leaves)
        self._saved_memory: SavedMemoryFinder | None = None
        if options.saved:
            self._saved_memory = SavedMemoryFinder(
                tracker, self._leaves, is_wanted=lambda: not self.mode.is_off, failed=reporter.ops_failed
            )
        self._thread = -1
        self._is_entered = False
        self._modes_below = 0
        self._has_missed = False
        self._cannot_write = False

    def start(self, values: ValueRecorder, *, is_wanted: bool) -> None:
        """Starts recording the ops of this thread, and measures them if a capture asks for it."""
        self._modes_below = count_dispatch_modes()
        self._thread = threading.get_ident()
        self.mode.is_off = True
        self.mode.met.append(self._leaves.name)
        self.mode.raised = self.alive.op_raised
        if values.wants_ops:
            self._values = OpValues(self._tracker, self.mode, values)
            self.mode.met.append(self._values.met)
        if self._sources is not None:
            self.mode.before.append(self._sources.begins)
        if self._python_names is not None:
            self.mode.before.append(self._python_names.begins)
        if self._device_times is not None:  # next to the op: what others do is not the op's
            self.mode.before.append(self._device_times.begins)
            self.mode.after.insert(0, self._device_times.ended)
        self.mode.keep_out_of_dynamo()
        self._boundary.start()
        if self._saved_memory is not None:
            self._tracker.subscribers.add(self._saved_memory)
        watch_resizes(self.mode.resized)
        self._want(is_wanted)

    def stop(self) -> str | None:
        """Stops recording, and removes our attributes from storages.

        Returns:
            a warning if our mode stays on the stack of another thread, else None.
        """
        self.mode.is_off = True
        elsewhere = None
        unwatch_resizes(self.mode.resized)
        try:
            self._boundary.stop()
            self._leaves.forget_inputs()
            if self._saved_memory is not None:
                self._tracker.subscribers.remove(self._saved_memory)
                self._saved_memory.forget()
            if self._is_entered:
                self._is_entered = False
                if threading.get_ident() == self._thread:
                    self._leave()
                else:
                    elsewhere = _describe_elsewhere(self._thread)
        finally:
            self.mode.ids.forget()
        return elsewhere

    def _leave(self) -> None:
        leave_dispatch_mode(self.mode)
        if self._python_names is not None:
            leave_function_mode(self._python_names)

    def abandon(self) -> None:
        """Stops recording, because this process is a fork or writing has failed on another thread.

        The mode stays entered.
        """
        self.mode.is_off = self.mode.has_failed = True

    # What runs. Each is called with the lock over the events of the tracker.

    def want(self, is_wanted: bool, active: Mask) -> None:
        """Sets whether ops are recorded from now on, and the captures for which their outputs are measured."""
        if self._values is not None:
            self._values.want(active)
        self._want(is_wanted)

    def take(self, step: Step | None) -> None:
        """Assigns the ops that have run since this was last called: to `step`, or to the next step if it is None."""
        batch = self._take_batch()
        if batch is None:
            return
        if step is None:
            self.early.append(batch)
        else:
            step.ops += [*self.early, batch]
            self.early = []

    def enter_step(self, last: Step | None, step: Step, segment: Segment) -> None:
        """Assigns ops that ran earlier to a step in which an outermost call begins; it must run while it does.

        They are those that ran while no step was open, and those of the step before that have prepared what the call
        is given.
        """
        is_outermost = segment.outer is None and segment.task < 0
        if is_outermost and last is not None and last is not step and last.ops and last.ops[-1].is_outside():
            move_prepared(last, step, self._boundary.find_given(segment))
        step.ops += self.early
        self.early = []

    def take_saved(self, step: Step, backward: Backward) -> None:
        """Assigns the saved memory that a backward has found to a step."""
        saved = None if self._saved_memory is None else self._saved_memory.take(backward)
        if saved is not None:
            step.saved.append(saved)

    def _take_batch(self) -> OpBatch | None:
        """Returns the ops since the last call, with the tensors seen.

        Returns None if there are no ops and no outermost call was recorded.
        """
        if not (self.mode.event_count or self._boundary.found) or (self.mode.is_running and self._is_entered):
            return None  # the op that runs is not to be parted from what it was given
        batch = OpBatch(self.mode, self._boundary.take())
        batch.leaves = self._leaves.take()
        batch.compiled_runs = self.compiled_runs.take()
        batch.alive = self.alive.take()
        if self._sources is not None:
            batch.sources = self._sources.take()
        if self._python_names is not None:
            batch.python_names = self._python_names.take()
        if self._device_times is not None:
            batch.device_events = self._device_times.take()
        if self._values is not None:
            batch.measured = self._values.take()
        return batch

    def _want(self, is_wanted: bool) -> None:
        """Enters or leaves the mode.

        A mode costs 3 us an op even if it only passes ops on, so it is left when it is not needed. It stays if it is
        below a mode of the user's, because torch leaves modes from the top.
        """
        if self.mode.has_failed or self.mode.is_running or threading.get_ident() != self._thread:
            return
        depth = count_dispatch_modes() - self._is_entered
        if depth == self._modes_below and is_wanted is not self._is_entered:
            if is_wanted:
                self.mode.__enter__()  # type: ignore[no-untyped-call]
                if self._python_names is not None:
                    self._python_names.__enter__()  # type: ignore[no-untyped-call]
            else:
                self._leave()
            self._is_entered = is_wanted
        elif is_wanted and not (self._is_entered and is_dispatch_mode_on(self.mode)) and not self._has_missed:
            self._has_missed = True
            self._reporter.ops_missed()
        if is_wanted and self.mode.is_off:
            self.mode.ids.forget()
        self.mode.is_off = not is_wanted

    # Writing.

    def write(
        self, steps: list[Step], calls: list[dict[str, Any]], optimizer_ids: Sequence[int]
    ) -> Iterable[ValuePart]:
        """Writes the rows of the ops in ended steps, and adds their costs to the columns of calls.

        Returns:
            the rows of the ops' measurements; none if they cannot be written.
        """
        if self._cannot_write:
            return ()
        try:
            tables, measured = self._read(self._tables, steps, calls, optimizer_ids)
            for name, columns in tables:
                self._sink.write(name, columns)
            return measured
        except Exception as error:
            self._cannot_write = True
            self.abandon()
            self._reporter.ops_failed(error, "while writing ops")
            return ()

    def open_rows(
        self, step: Step, calls: list[dict[str, Any]], optimizer_ids: Sequence[int]
    ) -> tuple[list[tuple[str, dict[str, Any]]], Iterable[ValuePart]]:
        """Returns the rows of the ops in a step that has not ended, and those of their measurements."""
        if self._cannot_write:
            return [], ()
        return self._read(self._tables.copy(), [step], calls, optimizer_ids)

    def _read(
        self,
        tables: OpTables,
        steps: list[Step],
        calls: list[dict[str, Any]],
        optimizer_ids: Sequence[int],
    ) -> tuple[list[tuple[str, dict[str, Any]]], Iterable[ValuePart]]:
        rows = tables.of(steps, optimizer_ids, self._sites)
        if rows is None:
            return [], ()
        if self._device_times is not None:
            self._device_times.add_times(rows.tables["ops"], steps)
        table = CallTable(calls) if calls else None
        if table is not None:
            add_costs(table, rows)
        parted = part_runs(rows, [batch for step in steps for batch in step.ops])
        filled = [(name, columns) for name, columns in parted.items() if len(next(iter(columns.values())))]
        return filled, read_values(steps, table, rows, self._sites)


def _describe_elsewhere(thread: int) -> str | None:
    """Returns a warning that the mode stays on the stack of a thread, if that thread still runs."""
    entered = next((other.name for other in threading.enumerate() if other.ident == thread), None)
    if entered is None:
        return None
    return (
        f"the recording was entered on the thread {entered!r} and left on {threading.current_thread().name!r}: its "
        "dispatch mode stays on the stack of the first one, where it records nothing and costs 3 us an op. "
        "Leave the recording on the thread that entered it."
    )
