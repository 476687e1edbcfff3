"""Measures tensors as the captures ask, and writes a row of `values` for each."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn

from ...recording.failure_reporter import FailureReporter
from ...recording.options.capture import Capture
from ...recording.options.path_filter import describe_unmatched, unmatched
from ...recording.protocols import Sink
from ...recording.role import GRAD_INPUT, INPUT
from ...torch_internals.graph_captures import graph_captures
from ..log.segments import Segment
from ..log.thread_log import Backward
from ..scopes.tracker import ScopeTracker
from ..steps.call_rows import NthMemory
from ..steps.step import Step
from .buffers import BufferTaps
from .capture_masks import CaptureMasks, Mask
from .compiled_taps import CompiledTaps
from .losses import LossTaps
from .measured import Measured, free_rows
from .micro_batches import MicroBatchTaps
from .parameter_sites import ParameterSites
from .parameters import ParameterTaps
from .rows import ValuePart, value_columns
from .sites import SiteIds
from .source import Measuring, ValueSource
from .taps import CallTaps, CaptureMeasurer


class ValueRecorder:
    """Drives the value sources of one recording; without captures it does nothing."""

    def __init__(
        self,
        captures: Sequence[Capture],
        sink: Sink,
        sites: SiteIds,
        reporter: FailureReporter,
        *,
        numbers: Callable[[Step | None], Sequence[int]],
        fired: Callable[[], int | None],
        inside: bool = False,
    ) -> None:
        """Creates a recorder, which measures nothing before `start()`.

        Args:
            sites: the site ids of the recording, which the op recorder shares.
            numbers: returns the possible numbers of a step that is recorded; None stands for the running optimizer's
                step.
            fired: returns the last step in which a trigger fired.
            inside: also measures modules inside of compiled code.
        """
        self._inside = inside
        self.measurer: CaptureMeasurer | None = None
        self._sources: tuple[ValueSource, ...] = ()  # empty while not measuring
        #: All sources that the tracker calls, even after measuring has failed.
        self._listeners: tuple[ValueSource, ...] = ()
        self._active: dict[Segment, Mask] = {}  # by open segment, the captures that may want its step
        self._captures = tuple(captures)
        self._sink = sink
        self._sites = sites
        self._reporter = reporter
        self._numbers = numbers
        self._fired = fired
        self._capture_masks: CaptureMasks | None = None  # exists while values are recorded
        self._tracker: ScopeTracker | None = None

    def start(self, tracker: ScopeTracker, roots: Iterable[nn.Module] = ()) -> None:
        """Measures segments that open from now on, if there are captures; `roots` are the models known so far."""
        graph_captures.watch(self)
        if not self._captures:
            return
        self._tracker = tracker
        raised = self._reporter.user_raised
        self._capture_masks = capture_masks = CaptureMasks(
            self._captures, tracker.names, fired=self._fired, raised=raised
        )
        self.measurer = CaptureMeasurer(tracker, capture_masks, put=self._put, raised=raised)
        sites = ParameterSites(tracker.names, capture_masks)
        measure, settle = self.measurer.measure, self.measurer.kept.settle
        together = self.measurer.together
        measuring = Measuring(tracker, sites, capture_masks, measure, settle, self.failed, together)
        self._sources = (
            CallTaps(measuring, self.measurer),
            ParameterTaps(measuring, active=self.captures_for),
            MicroBatchTaps(measuring),
            BufferTaps(measuring),
            LossTaps(measuring),
        )
        if self._inside:
            self._sources += (CompiledTaps(measuring, self.measurer, roots, self._reporter.warn_once),)
        self._listeners = self._sources
        graph_captures.add(self)
        wants_inputs = capture_masks.of_role(INPUT) | capture_masks.of_role(GRAD_INPUT)
        for source in self._listeners:
            tracker.subscribers.add(source, without=() if wants_inputs else ("entering",))

    def _put(self, name: str, array: Any, dtype: str, shape: Sequence[int]) -> str | None:
        return self._sink.put_tensor(name, array, dtype, shape, step=self._reporter.step)

    @property
    def is_measuring(self) -> bool:
        """True if there are captures, and measuring has not failed."""
        return bool(self._sources)

    @property
    def waits_for_devices(self) -> bool:
        """True if rows of values come from a device, so that writing them waits for the device."""
        return self.measurer is not None and self.measurer.has_met_device

    @property
    def wants_ops(self) -> bool:
        """True if a capture wants the outputs of ops."""
        return self.is_measuring and any(capture.wants_ops for capture in self._captures)

    @property
    def capture_masks(self) -> CaptureMasks:
        """The masks of the captures. They exist only while values are recorded."""
        assert self._capture_masks is not None
        return self._capture_masks

    def captures_for(self, step: Step | None = None) -> Mask:
        """Returns the captures that may want a step; None stands for the step of the running optimizer."""
        return 0 if self._capture_masks is None else self._capture_masks.in_steps(self._numbers(step))

    def leave(self) -> None:
        """Unsubscribes from the tracker. Measured values can still be taken; hooks stay on tensors until `stop()`."""
        if self._tracker is not None:
            for source in self._listeners:
                self._tracker.subscribers.remove(source)

    def stop(self) -> None:
        """Removes every hook from every tensor. No tensor on a device may be read after this."""
        self._stop(self._sources)
        graph_captures.unwatch(self)

    def _stop(self, sources: tuple[ValueSource, ...]) -> None:
        for source in sources:
            source.abandon()  # the tracker may be iterating over its listeners just now
        for source in sources:
            source.stop()
        self._active.clear()
        if self.measurer is not None:
            self.measurer.kept.stop()

    def abandon(self) -> None:
        """Stops measuring, because this process is a fork. It takes no lock."""
        for source in self._sources:
            source.abandon()

    def failed(self, error: Exception, where: str) -> None:
        """Reports once that measuring has failed, and stops it. Calls are still recorded."""
        if self._reporter.strict:
            raise error
        sources, self._sources = self._sources, ()
        if not sources:
            return
        self._stop(sources)
        self._reporter.values_failed(error, where)

    # Events of the run. Each method is called with the lock over the tracker's events. `failed` may empty the sources
    # at any time, from a thread without that lock.

    def open(self, segment: Segment, active: Mask) -> None:
        """Starts measuring in a segment, for the captures in `active`."""
        if self._sources and active:
            self._active[segment] = active
            for source in self._sources:
                source.opened(segment, active)

    def close(self, segment: Segment) -> None:
        """Stops measuring in a segment that has ended."""
        active = self._active.pop(segment, None)
        if active is not None:
            for source in self._sources:
                source.closed(segment, active)

    def drop(self, segment: Segment) -> None:
        """Forgets a segment whose outermost call did not begin after all."""
        self._active.pop(segment, None)
        for source in self._sources:
            source.dropped(segment)

    def open_backward(self, backward: Backward, step: Step | None) -> None:
        """Measures the losses of a backward that begins; it is called without the lock.

        `step` is None if the backward begins a new step.
        """
        if self._sources:
            active = self.captures_for(step)
            for source in self._sources:
                source.backward_opened(backward, active)

    def take_backward(self, step: Step, backward: Backward | None) -> None:
        """Assigns the measurements of an ended backward to its step.

        `backward` is None for backwards that did not pass the wrapped engine entry.
        """
        _add(step, (source.take_backward(backward) for source in self._sources))

    def take_optimizer(self, step: Step, thread: int) -> None:
        """Assigns the measurements around a thread's optimizer step to the step."""
        _add(step, (source.take_optimizer(thread) for source in self._sources))

    def take_segments(self, step: Step) -> None:
        """Assigns the measurements in the segments of an ended step to it, and releases the hooks on their tensors."""
        for segment in step.segments:
            self.close(segment)  # another thread may be closing it
        sources = self._sources
        _add(step, (source.take_segment(segment) for source in sources for segment in step.segments))
        for source in sources:
            source.step_ended()

    def fetch(self) -> None:
        """Performs deferred copies of tensors, because a CUDA graph is about to be captured."""
        self.settle_kept()

    def settle_kept(self) -> None:
        """Performs deferred copies of tensors, because a step has ended."""
        try:
            if self.measurer is not None and self._sources:
                self.measurer.kept.settle()
        except Exception as error:
            self.failed(error, "while copying whole tensors")

    # Measurements of a step that has not ended.

    def measured_in(self, step: Step) -> list[Measured]:
        """Returns the measurements in an open step, including those around this thread's optimizer step."""
        thread = -1 if self._tracker is None else self._tracker.logs.current.number
        coming = (source.taken_later(step.segments, thread) for source in self._sources)
        return [*step.values, *chain.from_iterable(coming)]

    # Writing rows.

    def read_rows(
        self, steps: list[Step], memory: NthMemory, of_ops: Iterable[ValuePart]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Returns the rows of steps, even of open ones, and writes the rows of new sites."""
        masks = self._capture_masks
        columns = None if masks is None else value_columns(steps, self._sites, memory, masks, of_ops)
        new_sites = self._sites.take_new()
        if new_sites is not None:
            self._sink.write("sites", new_sites)
        return [] if columns is None else [("values", columns)]

    def write(self, steps: list[Step], memory: NthMemory, of_ops: Iterable[ValuePart]) -> None:
        """Writes the measurements of ended steps, and new sites. The calls of the steps must have their ids."""
        try:
            for name, columns in self.read_rows(steps, memory, of_ops):
                self._sink.write(name, columns)
        except Exception as error:
            self.failed(error, "while writing values")
        finally:
            free_values(steps)

    def mark_unmatched(self) -> str | None:
        """Adds a mark for patterns that have matched nothing, and returns the mark.

        Call it when all modules have been seen.
        """
        filters = [capture.paths for capture in self._captures if not capture.paths.is_all]
        if not filters or self._tracker is None or self._capture_masks is None or not self._sources:
            return None
        paths = [*self._tracker.names.paths(), *self._capture_masks.parameter_paths]
        found = [pattern for path_filter in filters for pattern in unmatched(path_filter, paths)]
        if not found:
            return None
        text = describe_unmatched(found, paths, what="module or parameter that was met")
        self._sink.mark(text)
        return text


def _add(step: Step, measured: "Iterable[Measured | None]") -> None:
    step.values += [part for part in measured if part is not None]


def free_values(steps: Sequence[Step]) -> None:
    """Frees the rows of all measurements of these steps."""
    free_rows(measured for step in steps for measured in step.measured())
    for step in steps:
        step.values = []
