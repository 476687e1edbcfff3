"""Measures the arguments and outputs of modules, and their gradients, while the modules run."""

import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ...measure.cuda.together import Together
from ...measure.measurers.extras import Extras
from ...measure.measurers.measurer import NOT_ASKED_FOR, Measurement, Measurer, not_asked_for
from ...measure.measurers.user_functions import UserFunctions
from ...measure.measurers.want import USUAL, Extra, Want
from ...recording.role import INPUT, OUTPUT
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.deep_graphs import cut_below
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.graph_captures import graph_captures
from ...torch_internals.modes import DisableTorchFunction, tracing_state, unseen
from ...torch_internals.tensors import GradientHook, requires_grad_of
from ...torch_internals.transforms import is_batched_tensor, is_functorch_tensor
from ..log.call_context import CallContext
from ..log.segments import Segment
from ..log.thread_log import Backward, ThreadLog
from ..scopes.tracker import ScopeTracker
from ..structures.find import find_slots
from .capture_masks import Asked, CaptureMasks, Mask
from .gradient_taps import BaseTap, GradientTap, SuspendedTaps, tap_gradient, tap_tensor, written_bases
from .measured import Measured, MeasuredGradients, MeasuredOutputs, SeenCall, name_of_tensor, not_measured
from .source import Measuring, ValueSource
from .whole_tensors import KeptTensors


class CallTaps(ValueSource):
    """Measures the arguments and outputs of modules, and their gradients."""

    def __init__(self, measuring: Measuring, measurer: "CaptureMeasurer") -> None:
        super().__init__(measuring)
        self._measurer = measurer
        self._on_gradient = self._measure_gradient  # bound once, because the hook of each tensor refers to it
        self._held = (  # what C code needs
            GradientTap, BaseTap, self._on_gradient, measurer.measure, is_functorch_tensor, OrderedDict,
            cut_below,
        )  # fmt: skip
        self._running: dict[Segment, MeasuredOutputs] = {}
        self._closed: dict[Segment, MeasuredOutputs] = {}
        self._of_backward: dict[Backward | None, MeasuredGradients] = {}
        self._leaving: list[tuple[Segment, list[GradientTap]]] = []  # ended steps, still with hooks
        self._suspended = SuspendedTaps()
        #: The last backward, by its task, that brought a gradient: (task, backward, measured).
        self._latest: tuple[int, Backward, MeasuredGradients] | None = None
        keep_out_of_dynamo(CallTaps.returned, CallTaps.entering, CallTaps._measure_gradient, BaseTap.__call__)
        # Captures of `track()` call functions of the user.
        keep_out_of_dynamo(GradientHook.__call__, with_callees=False)

    def opened(self, segment: Segment, active: Mask) -> None:
        self._running[segment] = MeasuredOutputs(segment, active)

    def closed(self, segment: Segment, active: Mask) -> None:
        measured = self._running.pop(segment, None)
        if measured is not None:
            measured.close()
            self._closed[segment] = measured

    def dropped(self, segment: Segment) -> None:
        self._running.pop(segment, None)

    def take_segment(self, segment: Segment) -> MeasuredOutputs | None:
        measured = self._closed.pop(segment, None)
        if measured is not None and measured.taps:
            self._leaving.append((segment, measured.taps))
        return measured

    def taken_later(self, segments: Sequence[Segment], thread: int) -> list[Measured]:
        closed = [self._closed[segment] for segment in segments if segment in self._closed]
        unseen_backward = self._of_backward.get(None)
        return [*closed, *([] if unseen_backward is None else [unseen_backward])]

    def take_backward(self, backward: Backward | None) -> MeasuredGradients | None:
        measured, self._latest = self._of_backward.pop(backward, None), None
        if measured is not None:
            measured.close()
        self._suspend()
        return measured

    def step_ended(self) -> None:
        self._suspend()

    def stop(self) -> None:
        self._tracker.subscribers.remove(self, "entering")
        measured = (*self._running.values(), *self._closed.values())
        for taps in (*(outputs.taps for outputs in measured), *(taps for _, taps in self._leaving)):
            for tap in taps:
                tap.unhook()
        for gradients in self._of_backward.values():
            gradients.close()
        self._running, self._closed, self._of_backward = {}, {}, {}
        self._leaving, self._suspended, self._latest = [], SuspendedTaps(), None

    def _suspend(self) -> None:
        """Removes the hooks of steps that have ended, unless a backward runs on any thread."""
        if self._leaving and not self._tracker.backwards.is_running():
            for segment, taps in self._leaving:
                self._suspended.add(segment, taps)
            self._leaving = []

    def backward_began(self, backward: Backward) -> None:
        """Registers again the hooks that this backward may reach in graphs of ended steps."""
        if self._is_abandoned:
            return
        try:
            with DisableTorchFunction():
                rehooked = self._suspended.rehook(backward.outputs)
        except Exception as error:
            self._failed(error, "the graph of a backward")
            return
        if rehooked:
            measured = self._of_backward[backward] = MeasuredGradients(backward.log.number)
            measured.release = partial(self._suspended.release, rehooked)

    # An input that a module returned, and nothing wrote to since, is not measured again.

    def returned(self, log: ThreadLog, context: CallContext, output: Any) -> None:
        segment = log.segment
        measured = None if segment is None else self._running.get(segment)
        asked = None if measured is None else self._asked(measured, context, OUTPUT)
        if measured is None or asked is None:
            return
        start_ns = log.times[-1]
        before = len(log.contexts) - 2  # a call may have ended right before, inside of this one
        first_seq = log.seqs[before] if log.contexts[before] >= 0 else -1
        self._measure_values(SeenCall(measured, before + 1, context, asked, first_seq), output)
        measured.intervals += (start_ns, time.perf_counter_ns())

    def entering(self, log: ThreadLog, module: nn.Module, args: Any) -> None:
        """Measures the arguments of a call."""
        segment, context = log.segment, log.context
        measured = None if segment is None else self._running.get(segment)
        if measured is None or context.outermost != id(module):  # a compiler's own module
            return
        asked = self._asked(measured, context, INPUT)
        if asked is None:
            return
        start_ns = time.perf_counter_ns()
        kwargs = log.kwargs_of(sys._getframe(2))
        self._measure_values(SeenCall(measured, len(log.contexts) - 1, context, asked, None), args, kwargs)
        measured.intervals += (start_ns, time.perf_counter_ns())

    def _asked(self, measured: MeasuredOutputs, context: CallContext, role: str) -> Asked | None:
        try:
            return self._capture_masks.asked(context, role, measured.active)
        except Exception as error:
            self._failed(error, context.path)
            return None

    def _measure_values(self, seen: SeenCall, *values: Any) -> None:
        """Measures all tensors in the arguments or outputs of a call, and registers hooks for the wanted gradients."""
        try:
            # `torch.jit.trace` would record the reading of a shape.
            with DisableTorchFunction() if tracing_state() is None else unseen():
                for value in values:
                    if type(value) is torch.Tensor:  # most modules return a single tensor
                        self._measure_tensor(seen, "", value)
                    else:
                        for slot, tensor, note in find_slots(value):
                            if tensor is not None:
                                self._measure_tensor(seen, slot, tensor)
                            elif seen.asked.mark:
                                seen.measured.sites += (not_measured(note), seen.event, slot, seen.asked.mark)
        except Exception as error:
            self._failed(error, seen.context.path)

    def _measure_tensor(self, seen: SeenCall, slot: str, tensor: torch.Tensor) -> None:
        measured, asked = seen.measured, seen.asked
        if tap_tensor is not None and type(tensor) is torch.Tensor and not asked.keeps:
            found = tap_tensor(
                self._held, tensor, measured.known, measured.sites, measured.taps, measured.segment,
                seen.event, slot, asked, seen.first_seq,
            )  # fmt: skip
            if found is not NotImplemented:
                if found is not None:
                    with suppress(Exception):
                        self._watch_base(seen, found, tensor)
                return
        tap = self._tap_of(tensor, measured)
        if asked.mark:
            name = seen.name(slot) if asked.keeps else ""
            tap.output = self._measurer.measure(tensor, asked.want, name, tap.output)
            tap.output.requires_grad = requires_grad_of(tensor)
            measured.sites += (tap.output, seen.event, slot, asked.mark)
        if asked.grad_mark:
            self._watch_gradient(seen, tap, slot, tensor)

    def _tap_of(self, tensor: torch.Tensor, measured: MeasuredOutputs) -> GradientTap:
        """Returns the tap of a tensor.

        A new tap is made unless this segment has one and the tensor was not written to since.
        """
        version = self._measurer.version_of(tensor)
        tap = measured.known.get(id(tensor))
        if tap is None or not tap.is_of(tensor, version):
            tap = measured.known[id(tensor)] = GradientTap(measured.segment, self._on_gradient)
            tap.version = version
            if type(tensor) is not nn.Parameter:  # `torch.utils.swap_tensors` refuses weak references
                tap.ref = weakref.ref(tensor)
        return tap

    def _watch_gradient(self, seen: SeenCall, tap: GradientTap, slot: str, tensor: torch.Tensor) -> None:
        if tap.hooks_ref is not None:
            tap.add_site(seen.event, slot, seen.asked.grad_mark)
            return
        try:
            if requires_grad_of(tensor) and not is_batched_tensor(tensor):
                tap.event, tap.slot = seen.event, slot
                tap.mark, tap.want = seen.asked.grad_mark, seen.asked.grad_want
                if seen.asked.keeps:
                    tap.path = seen.context.path
                tap.hook(tensor)
                seen.measured.taps.append(tap)
                self._watch_base(seen, tap, tensor)
        # A view whose base was written to has no gradient (RuntimeError), and a subclass may raise.
        except Exception:
            return

    def _watch_base(self, seen: SeenCall, tap: GradientTap, tensor: torch.Tensor) -> None:
        base = seen.base_of(tensor)
        if base is not None:
            base_tap = BaseTap(tap.segment, self._on_gradient)
            base_tap.watch(tap, tensor.shape, base)
            seen.measured.taps.append(base_tap)

    # Measuring gradients.

    def _measure_gradient(self, tap: GradientTap, gradient: Any) -> None:
        if self._is_abandoned:
            return
        start_ns, task = time.perf_counter_ns(), graph_task_id()
        try:
            latest = self._latest
            backward, measured = latest[1:] if latest is not None and latest[0] == task else self._find(task)
            if isinstance(gradient, torch.Tensor):
                with DisableTorchFunction():
                    if isinstance(tap, BaseTap):
                        if not self._is_of_view(measured, backward, tap):
                            return
                        gradient, tap = _seen_through(gradient, tap), tap.view
                    tap.task = task
                    self._measure_at(tap, gradient, measured)
            measured.intervals += (start_ns, time.perf_counter_ns())
        except Exception as error:
            self._failed(error, tap.segment.context.path)

    def _find(self, task: int) -> tuple[Backward | None, MeasuredGradients]:
        """Returns the backward of a graph task, and its measurements."""
        log = self._tracker.logs.current
        backward = self._tracker.backwards.running(log, task)
        measured = self._of_backward.get(backward)
        if measured is None:  # two devices use two threads
            measured = self._of_backward.setdefault(backward, MeasuredGradients(log.number))
        # A backward that creates a graph has to be followed on each thread, and a hook outside of all has no task.
        if backward is not None and not backward.create_graph and task >= 0:
            self._latest = task, backward, measured
        return backward, measured

    def _is_of_view(self, measured: MeasuredGradients, backward: Backward | None, tap: BaseTap) -> bool:
        """Returns whether a base's gradient is that of its view, because the view was written to.

        The graph is walked once a backward, at 1 us for each node.
        """
        if measured.written is None:
            outputs = None if backward is None else backward.outputs
            measured.written = set() if outputs is None else written_bases(outputs)
        return (tap.number, tap.output_nr) in measured.written

    def _measure_at(self, tap: GradientTap, gradient: torch.Tensor, measured: MeasuredGradients) -> None:
        """Measures a gradient, unless it is the same tensor as the last one.

        An addition passes its own gradient to both summands.
        """
        want = tap.want or self._capture_masks.want(tap.mask)
        if tap_gradient is not None and not want.keeps:
            measured.last = tap_gradient(self._held, tap, gradient, want, measured.sites, measured.last)
            return
        version = self._measurer.version_of(gradient)
        known = measured.find(gradient, version)
        name = name_of_tensor(tap.path, tap.mark, tap.slot) if want.keeps else ""
        found = self._measurer.measure(gradient, want, name, known)
        measured.last = weakref.ref(gradient), version, found
        measured.sites += (found, tap)


def _seen_through(gradient: torch.Tensor, tap: BaseTap) -> torch.Tensor:
    """Returns the gradient of a base in the shape of its view, or as it is while a CUDA graph is captured."""
    with unseen(), graph_captures.device_work(gradient) as is_allowed:  # reshaping may copy
        return gradient.reshape(tap.shape) if is_allowed else gradient


class CaptureMeasurer:
    """Measures tensors as the captures of one recording ask."""

    def __init__(
        self,
        tracker: ScopeTracker,
        capture_masks: CaptureMasks,
        *,
        put: Callable[..., str | None],
        raised: Callable[[str, Exception], None],
    ) -> None:
        """Creates a measurer.

        Args:
            put: `Sink.put_tensor`.
            raised: receives the name and the error of a user's function that has raised.
        """
        self.find_measured: Callable[[torch.Tensor], Measurement | None] | None = None
        together = Together()
        self._measurer = Measurer(together)
        self.version_of = self._measurer.version_of
        self.together = together.block
        self._capture_masks = capture_masks
        self._extras = Extras(UserFunctions(raised, lambda: tracker.logs.current.aside()), together)
        self.kept = KeptTensors(put)

    @property
    def has_met_device(self) -> bool:
        """True if tensors on a device were measured."""
        return self._measurer.has_met_device or self._extras.has_launched

    def measure(
        self, tensor: torch.Tensor, want: Want, name: str, known: Measurement | None = None
    ) -> Measurement:
        """Measures what is wanted of a tensor, unless `known`, a measurement by the op that made it, has it."""
        if known is not None and want is USUAL and known.note is not NOT_ASKED_FOR:
            return known
        start_ns = time.perf_counter_ns()
        found = known
        if found is None and self.find_measured is not None:
            found = self.find_measured(tensor)
        if found is None:
            found = self._measurer.measure(tensor) if want.stats else not_asked_for(tensor)
            found.start_ns = start_ns
        elif want.stats and found.note is NOT_ASKED_FOR:
            again = self._measurer.measure(tensor)
            found.rows, found.row, found.note = again.rows, again.row, again.note
        if want is not USUAL:
            extra = found.extra = found.extra or Extra()
            self._extras.measure(tensor, want, extra)
            if want.keeps:
                self.kept.keep(extra, tensor, name, lazy=not want.tensors)
        return found
