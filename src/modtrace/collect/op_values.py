"""Measures what ops return, and what they read that no op has made."""

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..measure.measurer import Measurement, Measurer
from .op_mode import OpMode, tensors_in
from .op_plans import OpPlan
from .tensor_ids import NO_OP

if TYPE_CHECKING:
    from .thread_log import ThreadLog


class MeasuredOps:
    """What was measured of the ops of one batch."""

    __slots__ = ("intervals", "sites", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        #: With the op, and the slot of its output; of a leaf with the op that reads it first, and the tensor's number.
        #: NO_OP: an outermost call has returned the leaf before any op has read it.
        self.sites: list[tuple[Measurement, int, str | int]] = []
        self.intervals: list[int] = []  # start_ns, end_ns, start_ns, ... of measuring


class _Known(NamedTuple):
    """A tensor that was measured when an op returned it. While it is known `torch.utils.swap_tensors` refuses it."""

    ref: "weakref.ref[torch.Tensor]"
    version: int
    found: Measurement


class OpValues:
    """Measures for one recorder. Inside a dispatch mode no function mode hears of it."""

    def __init__(
        self,
        mode: OpMode,
        thread: int,
        *,
        is_stepping: Callable[[], bool],
        failed: Callable[[Exception, str], None],
    ) -> None:
        self._mode = mode
        self._is_stepping = is_stepping  # whether an optimizer may be at work
        self._thread = thread
        self._failed = failed
        self._measurer = Measurer()
        self._measured = MeasuredOps(thread)
        self._latest: dict[int, _Known] = {}  # of this batch, by `id` of the tensor
        self._is_off = False

    def take(self) -> MeasuredOps | None:
        """What has been measured since this was last called."""
        self._latest = {}
        if not self._measured.sites:
            return None
        measured, self._measured = self._measured, MeasuredOps(self._thread)
        return measured

    def find(self, tensor: torch.Tensor) -> Measurement | None:
        """What was measured of a tensor when an op has returned it, if nobody has written to it since."""
        known = self._latest.get(id(tensor))
        if known is None or known.ref() is not tensor or known.version != self._measurer.version_of(tensor):
            return None
        return known.found

    def ended(self, op: int, plan: OpPlan, output: Any) -> None:
        """An op has returned: measures that, unless it is a view."""
        if plan.is_view or self._is_off:
            return
        if isinstance(output, torch.Tensor):
            self._measure(output, op, "", not plan.is_uninitialized)
        elif output is not None:
            for tensor, slot in tensors_in(output, ""):
                self._measure(tensor, op, slot)

    def met(self, tensor_id: int, tensor: torch.Tensor, log: "ThreadLog") -> None:
        """A tensor comes by that no op has made. What an optimizer reads is measured when it begins."""
        if not self._is_off and not self._is_stepping():
            self._measure(tensor, self._mode.next - 1 if self._mode.is_running else NO_OP, tensor_id)

    def _measure(self, tensor: torch.Tensor, op: int, where: str | int, is_initialized: bool = True) -> None:
        try:
            start_ns = time.perf_counter_ns()
            found = self._measurer.measure(tensor) if is_initialized else _uninitialized(tensor)
            found.start_ns = start_ns
            self._measured.sites.append((found, op, where))
            if self._mode.is_inside and type(tensor) is torch.Tensor and type(where) is str:
                version = self._measurer.version_of(tensor)
                if version is not None:
                    self._latest[id(tensor)] = _Known(weakref.ref(tensor), version, found)
            self._measured.intervals += (start_ns, time.perf_counter_ns())
        except Exception as error:
            self._is_off = True
            self._failed(error, "measuring what an op returned")


def _uninitialized(tensor: torch.Tensor) -> Measurement:
    """Of memory that holds whatever it held before: a NaN in it means nothing."""
    return Measurement(
        None, -1, tensor.shape, tensor.dtype, "not measured: nothing has been written to it yet"
    )
