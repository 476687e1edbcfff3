"""Collects ended steps until they are written."""

import threading
from collections.abc import Sequence
from math import inf

from ...recording.failure_reporter import FailureReporter
from ...recording.options.schedule import ALL_STEPS, StepRange
from ..steps.device_columns import count_device_events
from ..steps.step import Step
from ..steps.step_rules import StepFinder
from ..values.recorder import ValueRecorder
from .row_writer import RowWriter, free_step
from .step_memory import StepMemory

#: This many device events, or ops that nothing measures (208 bytes each), take as much memory as one measurement.
_EVENTS_OF_SAMPLE, _OPS_OF_SAMPLE = 8, 3


class ReadySteps:
    """The ended steps that are to be recorded and are not written yet.

    Callers of `settle` and `take` hold the lock over the events of the tracker.
    """

    def __init__(
        self,
        finder: StepFinder,
        reporter: FailureReporter,
        selected: StepRange,
        lock: threading.RLock,
        memory: StepMemory,
    ) -> None:
        self.steps: list[Step] = []
        self.samples = 0  # the number of their measurements and ops
        self.ended = 0  # the number of all ended steps, selected or not
        self._finder = finder
        self._reporter = reporter
        self._selected = selected
        self._lock = lock
        self._memory = memory

    def numbers_of(self, step: Step | None) -> Sequence[int]:
        """Returns the possible numbers of a step that are selected; None stands for the running optimizer's step."""
        with self._lock:
            numbers = self._finder.possible_numbers(step or self._finder.training)
        if self._selected == ALL_STEPS:
            return numbers
        return [number for number in numbers if number in self._selected]

    def is_wanted(self, step: Step | None = None) -> bool:
        """Returns whether a step may be one to record; None stands for the step of the running optimizer."""
        return self._selected == ALL_STEPS or bool(self.numbers_of(step))

    def settle(self, values: ValueRecorder, writer: RowWriter) -> None:
        """Takes the steps that have ended since the last call, with all that belongs to them."""
        ended = self._finder.take_ended()
        if not ended:
            return
        first = self.ended
        try:
            values.take_backward(ended[-1], None)
            values.settle_kept()
            for step, until_ns in zip(ended, self._finder.next_starts(ended), strict=True):
                self.ended += 1
                values.take_segments(step)
                step.next_start_ns = None if until_ns == inf else int(until_ns)
                writer.settle(step, has_calls=step.number in self._selected, until_ns=until_ns)
            if ended[-1].number in self._selected:  # steps before it may have ended long ago
                ended[-1].resident_bytes, ended[-1].device_bytes = self._memory.read()
            for step in ended:
                self._add(step)
        except BaseException as error:
            if not isinstance(error, Exception):  # a signal handler raised it
                self._reporter.interrupted(error, first)
            raise

    def _add(self, step: Step) -> None:
        if step.number in self._selected:
            self.steps.append(step)
            self.samples += sum(len(measured.sites) // measured.width for measured in step.values)
            self.samples += sum(
                len(batch) // (_OPS_OF_SAMPLE if batch.measured is None else 1) for batch in step.ops
            )
            self.samples += count_device_events(step) // _EVENTS_OF_SAMPLE
        else:
            free_step(step)

    def take(self) -> list[Step]:
        """Removes and returns all collected steps."""
        steps, self.steps, self.samples = self.steps, [], 0
        return steps
