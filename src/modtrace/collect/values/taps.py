"""Measures the arguments and outputs of modules, and their gradients, while the modules run."""

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...measure.cuda.together import Together
from ...measure.measurers.extras import Extras
from ...measure.measurers.measurer import NOT_ASKED_FOR, Measurement, Measurer, not_asked_for
from ...measure.measurers.user_functions import UserFunctions
from ...measure.measurers.want import USUAL, Extra, Want
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.graph_captures import graph_captures
from ...torch_internals.modes import DisableTorchFunction, tracing_state, unseen
from ...torch_internals.tensors import GradientHook, requires_grad_of
from ...torch_internals.transforms import is_batched_tensor
from ..log.call_context import CallContext
from ..log.segments import Segment
from ..log.thread_log import Backward, ThreadLog
from ..scopes.tracker import ScopeTracker
from ..structures.find import find_slots
from .capture_masks import ROLE_BITS, ROLE_CODE, CaptureMasks, Mask, mark_of
from .gradient_taps import BaseTap, GradientTap, rehook_taps, written_bases
from .measured import Measured, MeasuredGradients, MeasuredOutputs, SeenCall, name_of_tensor, not_measured
from .source import Measuring, ValueSource
from .whole_tensors import KeptTensors

#: The number of segments of ended steps that are kept without checking whether their graphs live.
_KEPT_SUSPENDED = 16

_INPUT, _OUTPUT = ROLE_CODE[INPUT], ROLE_CODE[OUTPUT]
_GRAD_INPUT, _GRAD_OUTPUT = ROLE_CODE[GRAD_INPUT], ROLE_CODE[GRAD_OUTPUT]


class CallTaps(ValueSource):
    """Measures the arguments and outputs of modules, and their gradients."""

    def __init__(self, measuring: Measuring, measurer: "CaptureMeasurer") -> None:
        super().__init__(measuring)
        self._measurer = measurer
        self._on_gradient = self._measure_gradient  # bound once, because the hook of each tensor refers to it
        self._running: dict[Segment, MeasuredOutputs] = {}
        self._closed: dict[Segment, MeasuredOutputs] = {}
        self._of_backward: dict[Backward | None, MeasuredGradients] = {}
        self._leaving: list[tuple[Segment, list[GradientTap]]] = []  # ended steps, still with hooks
        #: Segments without hooks, whose graphs may live.
        self._suspended: list[tuple[Segment, list[GradientTap]]] = []
        self._prune_at = _KEPT_SUSPENDED
        self._open_marks: dict[Mask, dict[int, tuple[int, int]]] = {}  # keyed by the captures' mask
        keep_out_of_dynamo(CallTaps.returned, CallTaps.entering, CallTaps._measure_gradient, BaseTap.__call__)
        # Captures of `track()` call functions of the user.
        keep_out_of_dynamo(GradientHook.__call__, with_callees=False)

    def opened(self, segment: Segment, active: Mask) -> None:
        marks = self._open_marks.get(active)
        if marks is None:
            marks = self._open_marks[active] = self._marks_of_every_call(active)
        self._running[segment] = MeasuredOutputs(segment, active, marks)

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
        measured = self._of_backward.pop(backward, None)
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
        self._leaving, self._suspended = [], []

    def _suspend(self) -> None:
        """Removes the hooks of steps that have ended, unless a backward runs on any thread."""
        if self._leaving and not self._tracker.backwards.is_running():
            for _, taps in self._leaving:
                for tap in taps:
                    tap.unhook()
            self._suspended += self._leaving
            self._leaving = []
            if len(self._suspended) > self._prune_at:
                self._prune()

    def _prune(self) -> None:
        self._suspended = [(segment, taps) for segment, taps in self._suspended if segment.has_graph()]
        self._prune_at = 2 * len(self._suspended) + _KEPT_SUSPENDED

    def backward_began(self, backward: Backward) -> None:
        """Registers again the hooks that this backward may reach in graphs of ended steps."""
        self._prune()
        if self._is_abandoned or not self._suspended:
            return
        try:
            with DisableTorchFunction():
                handles = rehook_taps(backward.outputs, self._on_gradient)
        except Exception as error:
            self._failed(error, "the graph of a backward")
            return
        if handles:
            measured = self._of_backward[backward] = MeasuredGradients(backward.log.number)
            measured.handles = handles

    # Measuring a small output takes 9 us a call, of which the kernel takes 2 and the gradient's hook 3, and the
    # gradient as much again. An input that a module returned and nothing wrote to since is not measured again.

    def returned(self, log: ThreadLog, context: CallContext, output: Any) -> None:
        segment = log.segment
        measured = None if segment is None else self._running.get(segment)
        if measured is None:
            return
        mark, grad_mark = self._marks(measured, context, _OUTPUT, _GRAD_OUTPUT)
        if not (mark or grad_mark):
            return
        start_ns = log.times[-1]
        event = len(log.contexts) - 1
        self._measure_values(SeenCall(measured, event, context, mark, grad_mark), output)
        measured.intervals += (start_ns, time.perf_counter_ns())

    def entering(self, log: ThreadLog, module: nn.Module, args: Any) -> None:
        """Measures the arguments of a call."""
        segment, context = log.segment, log.context
        measured = None if segment is None else self._running.get(segment)
        if measured is None or context.outermost != id(module):  # a compiler's own module
            return
        mark, grad_mark = self._marks(measured, context, _INPUT, _GRAD_INPUT)
        if not (mark or grad_mark):
            return
        start_ns = time.perf_counter_ns()
        kwargs = log.kwargs_of(sys._getframe(2))
        event = len(log.contexts) - 1
        self._measure_values(SeenCall(measured, event, context, mark, grad_mark), args, kwargs)
        measured.intervals += (start_ns, time.perf_counter_ns())

    def _marks(
        self, measured: MeasuredOutputs, context: CallContext, code: int, grad_code: int
    ) -> tuple[int, int]:
        """Returns the marks of a call's tensors and of their gradients; 0 if no capture wants them."""
        if code in measured.marks:  # the marks are the same for every call
            return measured.marks[code]
        of_context, active = self._capture_masks.of_context, measured.active
        return _marks_of(
            of_context(context, code) & active, code, of_context(context, grad_code) & active, grad_code
        )

    def _marks_of_every_call(self, active: Mask) -> dict[int, tuple[int, int]]:
        """Returns both marks by the first role's code, if the captures want tensors of all modules."""
        masks = self._capture_masks
        return {
            ROLE_CODE[role]: _marks_of(
                masks.of_role(role) & active,
                ROLE_CODE[role],
                masks.of_role(grad_role) & active,
                ROLE_CODE[grad_role],
            )
            for role, grad_role in ((INPUT, GRAD_INPUT), (OUTPUT, GRAD_OUTPUT))
            if masks.is_open(role) and masks.is_open(grad_role)
        }

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
                            elif seen.mark:
                                seen.measured.sites += (not_measured(note), seen.event, slot, seen.mark)
        except Exception as error:
            self._failed(error, seen.context.path)

    def _measure_tensor(self, seen: SeenCall, slot: str, tensor: torch.Tensor) -> None:
        tap = self._tap_of(tensor, seen.measured)
        if seen.mark:
            want = self._capture_masks.want(seen.mark >> ROLE_BITS)
            name = seen.name(slot) if want.tensors or want.lazy else ""
            tap.output = self._measurer.measure_wanted(tensor, want, name, tap.output)
            tap.output.requires_grad = requires_grad_of(tensor)
            seen.measured.sites += (tap.output, seen.event, slot, seen.mark)
        if seen.grad_mark:
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
        if tap.handle is not None:
            tap.add_site(seen.event, slot, seen.grad_mark)
            return
        try:
            if requires_grad_of(tensor) and not is_batched_tensor(tensor):
                tap.event, tap.slot, tap.mark = seen.event, slot, seen.grad_mark
                want = self._capture_masks.want(seen.grad_mark >> ROLE_BITS)
                if want.tensors or want.lazy:
                    tap.path = seen.context.path
                tap.hook(tensor)
                seen.measured.taps.append(tap)
                base = seen.base_of(tensor)
                if base is not None:
                    base_tap = BaseTap(tap, tensor.shape, self._on_gradient)
                    base_tap.hook(base)
                    seen.measured.taps.append(base_tap)
        # A view whose base was written to has no gradient (RuntimeError), and a subclass may raise.
        except Exception:
            return

    # Measuring gradients.

    def _measure_gradient(self, tap: GradientTap, gradient: Any) -> None:
        if self._is_abandoned:
            return
        start_ns, log, task = time.perf_counter_ns(), self._tracker.logs.current, graph_task_id()
        try:
            backward = self._tracker.backwards.running(log, task)
            measured = self._of_backward.get(backward)
            if measured is None:  # two devices use two threads
                measured = self._of_backward.setdefault(backward, MeasuredGradients(log.number))
            if isinstance(gradient, torch.Tensor):
                with DisableTorchFunction():
                    if isinstance(tap, BaseTap):
                        if not self._is_of_view(measured, backward, tap):
                            return
                        gradient, tap = _seen_through(gradient, tap), tap.view
                    tap.task = task
                    measured.sites += (self._gradient_of(measured, gradient, tap), tap)
            measured.intervals += (start_ns, time.perf_counter_ns())
        except Exception as error:
            self._failed(error, tap.segment.context.path)

    def _is_of_view(self, measured: MeasuredGradients, backward: Backward | None, tap: BaseTap) -> bool:
        """Returns whether a base's gradient is that of its view, because the view was written to.

        The graph is walked once a backward, at 1 us for each node.
        """
        if measured.written is None:
            outputs = None if backward is None else backward.outputs
            measured.written = set() if outputs is None else written_bases(outputs)
        return tap in measured.written

    def _gradient_of(
        self, measured: MeasuredGradients, gradient: torch.Tensor, tap: GradientTap
    ) -> Measurement:
        """Measures a gradient, unless it is the same tensor as the last one.

        An addition passes its own gradient to both summands.
        """
        version = self._measurer.version_of(gradient)
        known = measured.find(gradient, version)
        want = self._capture_masks.want(tap.mask)
        name = name_of_tensor(tap.path, tap.mark, tap.slot) if want.tensors or want.lazy else ""
        found = self._measurer.measure_wanted(gradient, want, name, known)
        measured.last = weakref.ref(gradient), version, found
        return found


def _seen_through(gradient: torch.Tensor, tap: BaseTap) -> torch.Tensor:
    """Returns the gradient of a base in the shape of its view, or as it is while a CUDA graph is captured."""
    with unseen(), graph_captures.device_work(gradient) as is_allowed:  # reshaping may copy
        return gradient.reshape(tap.shape) if is_allowed else gradient


def _marks_of(mask: Mask, code: int, grad_mask: Mask, grad_code: int) -> tuple[int, int]:
    return mask and mark_of(mask, code), grad_mask and mark_of(grad_mask, grad_code)


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

    def measure(self, tensor: torch.Tensor, mask: Mask, name: str) -> Measurement:
        """Measures what captures want of a tensor; `name` is the name of the whole tensor."""
        return self.measure_wanted(tensor, self._capture_masks.want(mask), name)

    def measure_wanted(
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
            if want.tensors or want.lazy:
                self.kept.keep(extra, tensor, name, lazy=not want.tensors)
        return found
