"""Records values: has them measured as the captures wish, and writes their rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...measure.measurer import Measurement
from ...recording.failure_reporter import FailureReporter
from ...recording.options.capture import Capture
from ...recording.options.path_filter import describe_unmatched, unmatched
from ...recording.protocols import Sink
from ..log.segments import Segment
from ..log.thread_log import Backward
from ..scopes.tracker import ScopeTracker
from ..steps.call_rows import NthMemory
from ..steps.finder import Step
from .capture_masks import Mask, Wishes
from .measured import Measured, free_rows
from .parameter_sites import Measure
from .rows import ValuePart, value_columns
from .sites import SiteIds
from .taps import ValueTaps


class ValueRecorder:
    """The values of one recording; of none, without captures."""

    def __init__(
        self,
        captures: Sequence[Capture],
        sink: Sink,
        sites: SiteIds,
        reporter: FailureReporter,
        *,
        numbers: Callable[[Step | None], Sequence[int]],
        fired: Callable[[], int | None],
    ) -> None:
        """Measures nothing before `start()`.

        Args:
            captures: what is wanted.
            sink: where rows and whole tensors go.
            sites: of the recording; ops have some, too.
            reporter: is told what fails.
            numbers: those that a step may come to have and that are recorded; of None: of the step that an
                optimizer belongs to.
            fired: the last step that a trigger fired in.
        """
        self.taps: ValueTaps | None = None  # while they work
        self._tap: ValueTaps | None = None  # what listens to the tracker
        self._captures = tuple(captures)
        self._sink = sink
        self._sites = sites
        self._reporter = reporter
        self._numbers = numbers
        self._fired = fired
        self._wishes: Wishes | None = None  # what they want, while it is recorded
        self._tracker: ScopeTracker | None = None

    def start(self, tracker: ScopeTracker) -> None:
        """Measures from now on what runs in the segments that are opened, if anything is wanted."""
        if not self._captures:
            return
        self._tracker = tracker
        raised = self._reporter.user_raised
        self._wishes = Wishes(self._captures, tracker.names, fired=self._fired, raised=raised)
        self.taps = self._tap = ValueTaps(
            tracker,
            self._wishes,
            active=self.captures_for,
            put=self._put,
            failed=self.failed,
            raised=raised,
        )
        self.taps.start()

    def _put(self, name: str, array: Any, dtype: str, shape: Sequence[int]) -> str | None:
        return self._sink.put_tensor(name, array, dtype, shape, step=self._reporter.step)

    @property
    def wants_ops(self) -> bool:
        """Whether a capture looks at what ops return."""
        return self.taps is not None and any(each.wants_ops for each in self._captures)

    @property
    def wishes(self) -> Wishes:
        """What the captures want; only while values are recorded."""
        assert self._wishes is not None
        return self._wishes

    def measure_ops(self, find: "Callable[[torch.Tensor], Measurement | None]") -> Measure:
        """Returns what measures a tensor of an op; `find` tells what was measured of one when its op returned it."""
        assert self.taps is not None
        self.taps.measured_by_ops = find
        return self.taps.measure

    def captures_for(self, step: Step | None = None) -> Mask:
        """The captures that may look at what runs in a step; None: in the one that an optimizer belongs to."""
        return 0 if self._wishes is None else self._wishes.in_steps(self._numbers(step))

    def leave(self) -> None:
        """Hears nothing any more. What was measured can still be taken, and hooks stay on tensors until `stop()`."""
        if self._tracker is not None and self._tap is not None:
            self._tracker.subscribers.remove(self._tap)

    def stop(self) -> str | None:
        """Takes the taps off; what is to be said of patterns that selected nothing, for modules are met until now."""
        if self.taps is None:
            return None
        self.taps.stop()
        text = self._describe_unmatched()
        if text is not None:
            self._sink.mark(text)
        return text

    def abandon(self) -> None:
        """Measures nothing any more: this process is a fork. Takes no lock."""
        if self.taps is not None:
            self.taps.abandon()

    def failed(self, error: Exception, where: str) -> None:
        """Notes once that measuring has failed, and measures no more; calls are recorded on."""
        if self._reporter.strict:
            raise error
        taps, self.taps = self.taps, None
        if taps is None:
            return
        taps.abandon()  # it stays in the tracker's list, which a hook may just be going through
        taps.stop()
        self._reporter.values_failed(error, where)

    # What runs. Each is called with the lock over what the tracker tells. The taps are looked up once in each:
    # `failed` may take them away at any moment, on a thread that does not have the lock.

    def open(self, segment: Segment, active: Mask) -> None:
        """What runs in this segment is to be looked at by these captures."""
        taps = self.taps
        if taps is not None and active:
            taps.open(segment, active)

    def close(self, segment: Segment) -> None:
        """It has ended."""
        taps = self.taps
        if taps is not None:
            taps.close(segment)

    def drop(self, segment: Segment) -> None:
        """It has not begun after all."""
        taps = self.taps
        if taps is not None:
            taps.drop(segment)

    def take_backward(self, backward: Backward | None) -> list[Measured]:
        """What was measured in a backward that has ended; None: in those that did not pass the wrapped entry."""
        taps = self.taps
        return [] if taps is None else taps.take_backward(backward)

    def take_optimizer(self, thread: int) -> list[Measured]:
        """What was measured around the optimizer step of a thread."""
        taps = self.taps
        return [] if taps is None else taps.take_optimizer(thread)

    def take_segments(self, segments: Sequence[Segment]) -> list[Measured]:
        """What was measured in segments whose step has ended; no hook stays on their tensors."""
        taps = self.taps
        return [] if taps is None else taps.take_segments(segments)

    def settle_kept(self) -> None:
        """Copies the tensors that were to be copied later: a step has ended."""
        taps = self.taps
        try:
            if taps is not None:
                taps.settle_kept()
        except Exception as error:
            self.failed(error, "while copying whole tensors")

    # Writing.

    def write(self, steps: list[Step], memory: NthMemory, of_ops: Iterable[ValuePart]) -> None:
        """Writes what was measured in ended steps, and the sites that are new; to be called when calls are numbered."""
        try:
            wishes = self._wishes
            columns = None if wishes is None else value_columns(steps, self._sites, memory, wishes, of_ops)
            new_sites = self._sites.take_new()
            if new_sites is not None:
                self._sink.write("sites", new_sites)
            if columns is not None:
                self._sink.write("values", columns)
            free_values(steps)
        except Exception as error:
            free_values(steps)
            self.failed(error, "while writing values")

    def _describe_unmatched(self) -> str | None:
        filters = [each.paths for each in self._captures if not each.paths.is_all]
        if not filters or self._tracker is None or self._wishes is None:
            return None
        paths = [*self._tracker.names.paths(), *self._wishes.parameter_paths]
        found = [each for each_filter in filters for each in unmatched(each_filter, paths)]
        return describe_unmatched(found, paths, what="module or parameter that was met") if found else None


def free_values(steps: Sequence[Step]) -> None:
    """Gives back the rows in which what ran in these steps was measured."""
    of_ops = (batch.measured for step in steps for batch in step.ops)
    free_rows(
        [*(each for step in steps for each in step.values), *(each for each in of_ops if each is not None)]
    )
    for step in steps:
        step.values = []
