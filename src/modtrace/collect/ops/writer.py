"""Hands ops to the steps that they ran in, and their rows to the sink when those have ended."""

from collections.abc import Sequence
from typing import Any

from ...recording.failure_reporter import FailureReporter
from ...recording.options.op_options import Ops
from ...recording.protocols import Sink
from ..log.thread_log import Backward
from ..scopes.tracker import ScopeTracker
from ..steps.finder import Step
from ..values.capture_masks import Mask
from ..values.recorder import ValueRecorder
from ..values.rows import OpSites, SiteIds
from .batches import OpBatch
from .call_costs import CallTable, add_costs, op_sites
from .mode import OpKeeper
from .recorder import OpRecorder


class OpWriter:
    """The ops of one recording, from their recorder to their rows; does nothing where none are wanted."""

    def __init__(self, options: Ops | None, sink: Sink, sites: SiteIds, reporter: FailureReporter) -> None:
        self.recorder: OpRecorder | None = None
        self.early: list[OpBatch] = []  # that ran while no step was open
        self._options = options
        self._sink = sink
        self._sites = sites
        self._reporter = reporter
        self._cannot_write = False

    def start(self, tracker: ScopeTracker, values: ValueRecorder, *, is_wanted: bool) -> None:
        """Sees ops from now on, on this thread, and has them measured where that is wanted."""
        if self._options is None:
            return
        reporter = self._reporter
        self.recorder = OpRecorder(
            tracker, self._options, failed=reporter.ops_failed, missed=reporter.ops_missed
        )
        values.add_to(self.recorder)
        self.recorder.start(is_wanted=is_wanted)

    def add_keeper(self, keeper: OpKeeper) -> None:
        """Has somebody see every op with its tensors from now on; only where ops are recorded."""
        assert self.recorder is not None
        self.recorder.mode.add_keeper(keeper)

    def stop(self) -> str | None:
        """Sees no more; what was seen can still be taken. See `OpRecorder.stop` for what it returns."""
        return None if self.recorder is None else self.recorder.stop()

    def abandon(self) -> None:
        """Sees no more: this process is a fork. Takes no lock."""
        if self.recorder is not None:
            self.recorder.abandon()

    # What runs. Each is called with the lock over what the tracker tells.

    def want(self, is_wanted: bool, active: Mask) -> None:
        """Has what runs from now on seen or not, and what it returns measured for some captures."""
        if self.recorder is None:
            return
        if self.recorder.values is not None:
            self.recorder.values.active = active
        self.recorder.want(is_wanted)

    def take(self, step: Step | None) -> None:
        """What has run since the last time belongs to a step; None: to the one that begins next."""
        batch = None if self.recorder is None else self.recorder.take()
        if batch is None or self.recorder is None:
            return
        if step is None:
            self.early.append(batch)
        else:
            step.ops += [*self.early, batch]
            self.early = []
        measured = None if self.recorder.values is None else self.recorder.values.take()
        if measured is not None:
            batch.measured = measured

    def join_early(self, step: Step) -> None:
        """What has run while no step was open belongs to the one that has begun."""
        step.ops += self.early
        self.early = []

    def take_savings(self, step: Step, backward: Backward) -> None:
        """What a backward that has ended had found kept for it belongs to a step."""
        savings = None if self.recorder is None else self.recorder.take_savings(backward)
        if savings is not None:
            step.savings.append(savings)

    # Writing.

    def write(
        self, steps: list[Step], calls: list[dict[str, Any]], optimizer_ids: Sequence[int]
    ) -> OpSites | None:
        """Writes what ops have left in ended steps, and adds what they cost to the columns of calls.

        Returns:
            What the values of ops refer to; None: no ops were recorded, or they cannot be written.
        """
        if self.recorder is None or self._cannot_write:
            return None
        try:
            return self._write(self.recorder, steps, calls, optimizer_ids)
        except Exception as error:
            self._cannot_write = True
            self.recorder.abandon()
            self._reporter.ops_failed(error, "while writing ops")
            return None

    def _write(
        self, ops: OpRecorder, steps: list[Step], calls: list[dict[str, Any]], optimizer_ids: Sequence[int]
    ) -> OpSites | None:
        rows = ops.tables.of(steps, optimizer_ids, self._sites)
        if rows is None:
            return None
        for name, columns in rows.tables.items():
            if len(next(iter(columns.values()))):
                self._sink.write(name, columns)
        table = CallTable(calls) if calls else None
        if table is not None:
            add_costs(table, rows)
        return op_sites(table, rows)
