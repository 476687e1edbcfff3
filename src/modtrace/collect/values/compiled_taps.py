"""Measures outputs and gradients inside of compiled code, which the taps of `collect/compile/taps.py` pass on."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...measure.measurers.measurer import Measurement
from ...measure.measurers.want import USUAL, Want
from ...recording.phase import BACKWARD
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.dynamo import is_backend_failure, rounds_less_than_eager
from ...torch_internals.graph_captures import graph_captures
from ..compile.awaited_calls import AwaitedCalls
from ..compile.taps import TappedOutput, Taps
from ..log.segments import Segment
from ..log.thread_log import Backward
from ..names.module_names import NamedModule
from ..names.walk import descendants
from .capture_masks import ROLE_BITS, Asked, Mask
from .measured import Measured, MeasuredInside, name_of_tensor
from .source import Measuring, ValueSource
from .taps import CaptureMeasurer

_ROUNDING = (
    "measuring inside of compiled code changes how bfloat16 and float16 are rounded; to compare runs, set "
    "torch._inductor.config.emulate_precision_casts = True in each of them"
)
_OUTSIDE = "nothing is measured inside of a compiled function that calls a model; compile the model, not the function"

_IN_BODIES = (
    "in compiled code, nothing is measured in functions that are given to torch.cond, torch.vmap and so on"
)


class CompiledTaps(ValueSource):
    """Measures the outputs of modules inside of compiled code, and their gradients.

    The output of a region as a whole is measured outside of it, like that of any module.
    """

    def __init__(
        self,
        measuring: Measuring,
        measurer: CaptureMeasurer,
        roots: Iterable[nn.Module],
        warn: Callable[[str], None],
    ) -> None:
        """Taps the modules of the roots. Modules of other models are tapped when the model is first called.

        Args:
            warn: warns the user, once for each text.
        """
        super().__init__(measuring)
        self._measurer = measurer
        self._warn, self._has_warned = warn, False  # of how 16-bit floats are rounded
        self._taps = Taps(self)
        self._modules: list[nn.Module] = []
        self._known: set[int] = set()  # ids of the tapped modules
        #: What is wanted of the module with this number, by the active captures; see `_ask`.
        self._asked: dict[tuple[int, Mask | None], tuple[NamedModule, Asked]] = {}
        self._asked_at = -1
        self._awaited = AwaitedCalls()  # calls that await gradients, each with captures
        #: The last measurement with its module and call, and that of a gradient, as a part often returns the same
        #: tensor.
        self._samples: Sequence[Measurement | None] = ()
        self._samples_of: tuple[int, int] | None = None
        self._gradient: Measurement | None = None
        self._running: dict[Segment, MeasuredInside] = {}
        self._of_backward: dict[Backward | None, MeasuredInside] = {}
        for root in roots:
            self._tap(root)

    def _tap(self, top: nn.Module) -> None:
        if id(top) in self._known:
            return
        for module in (top, *descendants(top)):
            if id(module) not in self._known:
                self._known.add(id(module))
                self._modules.append(module)
                self._taps.tap(module)

    def opened(self, segment: Segment, active: Mask) -> None:
        self._running[segment] = MeasuredInside(segment.log.number, segment.phase, active)
        module = segment.context.module
        if module is not None:
            self._tap(module)

    def dropped(self, segment: Segment) -> None:
        self._running.pop(segment, None)

    def take_segment(self, segment: Segment) -> MeasuredInside | None:
        return self._running.pop(segment, None)

    def take_backward(self, backward: Backward | None) -> MeasuredInside | None:
        return self._of_backward.pop(backward, None)

    def taken_later(self, segments: Sequence[Segment], thread: int) -> list[Measured]:
        found = [self._running.get(segment) for segment in segments]
        return [measured for measured in (*found, self._of_backward.get(None)) if measured is not None]

    def stop(self) -> None:
        _explain(sys.exc_info()[1])
        self._taps.remove()
        self._running, self._of_backward, self._modules = {}, {}, []
        self._awaited = AwaitedCalls()

    # These methods are called while compiled code runs.

    def tapped(self, index: int, found: TappedOutput) -> int:
        """Measures the output of a module. Returns a number for the call, or -1 if no capture wants its tensors."""
        path = ""
        try:
            log = self._tracker.logs.current
            segment = log.segment
            if segment is None and not self._is_abandoned:
                self._warn(_OUTSIDE)
            measured = None if segment is None else self._running.get(segment)
            known = None if measured is None else self._ask(index, measured.active)
            if segment is None or measured is None or known is None:
                return -1
            named, asked = known
            if _is_wrapped(named, log.context.named):
                return -1
            start_ns, path = time.perf_counter_ns(), named.path
            call = segment.call_inside(self._taps.number, named.module_id)
            number = self._awaited.add(call, measured.active)
            if not self._has_warned and any(map(rounds_less_than_eager, found.tensors)):
                self._has_warned = True
                self._warn(_ROUNDING)
            same = self._samples if found.same_as is not None and found.same_as == self._samples_of else ()
            self._samples, self._samples_of = (), (index, number)
            if asked.mark:
                self._samples = samples = []
                for at, (slot, tensor) in enumerate(zip(found.slots, found.tensors, strict=False)):
                    sample = same[at] if same and asked.want is USUAL else None
                    if sample is None:
                        sample = self._measure_at(named, slot, tensor, asked.mark, asked.want)
                    measured.sites += (sample, named, call, slot, asked.mark)
                    samples.append(sample if asked.want is USUAL else None)
            measured.intervals += (start_ns, time.perf_counter_ns())
        except Exception as error:
            self._failed(error, path)
            return -1
        return number

    def tapped_gradient(
        self, index: int, call: int, slot: str, gradient: torch.Tensor, is_same: bool
    ) -> None:
        """Measures the gradient of a module's output."""
        path, sample, self._gradient = "", self._gradient if is_same else None, None
        try:
            of_call, active = self._awaited.get(call)
            known = self._ask(index, active)
            if known is None or not known[1].grad_mark:
                return
            named, asked = known
            start_ns, log, path = time.perf_counter_ns(), self._tracker.logs.current, named.path
            backward = self._tracker.backwards.running(log, graph_task_id())
            measured = self._of_backward.get(backward)
            if measured is None:
                mask = asked.grad_mark >> ROLE_BITS
                measured = self._of_backward[backward] = MeasuredInside(log.number, BACKWARD, mask)
            if sample is None or asked.grad_want is not USUAL:
                sample = self._measure_at(named, slot, gradient, asked.grad_mark, asked.grad_want)
            measured.sites += (sample, named, of_call, slot, asked.grad_mark)
            self._gradient = sample if asked.grad_want is USUAL else None
            measured.intervals += (start_ns, time.perf_counter_ns())
        except Exception as error:
            self._failed(error, path)

    def left_out(self) -> None:
        self._warn(_IN_BODIES)

    def _ask(self, index: int, active: Mask | None) -> tuple[NamedModule, Asked] | None:
        """Returns the names of a module and what captures want of what it returns; None if measuring has stopped.

        Args:
            active: those that want the step; None for all.
        """
        names = self._tracker.names
        if self._is_abandoned or index >= len(self._modules):
            return None
        if self._asked_at != names.revision:  # a name learnt late may match a pattern
            self._asked, self._asked_at = {}, names.revision
        known = self._asked.get((index, active))
        if known is None and (named := names.get(self._modules[index])) is not None:
            known = self._asked[index, active] = named, self._capture_masks.asked_inside(named, active)
        return known

    def _measure_at(
        self, named: NamedModule, slot: str, tensor: torch.Tensor, mark: int, want: Want
    ) -> Measurement:
        name = name_of_tensor(named.path, mark, slot) if want.keeps else ""
        # Compiled code reuses this memory as soon as it no longer needs the tensor.
        return self._measurer.measure(graph_captures.clone(tensor) if want.lazy else tensor, want, name)


def _explain(error: BaseException | None) -> None:
    """Adds a note to a backend's error, which our op may have caused. Python supports notes since 3.11."""
    add_note: Any = getattr(error, "add_note", None)
    if add_note is not None and is_backend_failure(error):
        add_note(
            "modtrace has put ops of its own into what this backend compiles; where it takes none, record with "
            "compiled='boundary' (--compiled boundary)"
        )


def _is_wrapped(named: NamedModule, region: NamedModule | None) -> bool:
    """Returns whether a module is the compiled one or one of its wrappers, which are measured outside."""
    return region is not None and named.root is region.root and named.path == region.path
