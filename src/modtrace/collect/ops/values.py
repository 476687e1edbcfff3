"""Measures what ops return, and the leaves that they read."""

import time
import weakref
from typing import Any

import numpy as np
import torch

from ...measure.measurers.measurer import Measurement, Measurer, not_asked_for
from ...measure.measurers.want import USUAL
from ...measure.moments.rows import HostRows, Rows
from ...recording.module_path import join
from ...recording.role import LEAF, OP_OUTPUT
from ...recording.statistics.moments import NOTHING_WRITTEN
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.dynamo import keep_out_of_dynamo
from ..log.call_context import CallContext
from ..log.nesting import Ints
from ..log.thread_log import ThreadLog
from ..scopes.tracker import ScopeTracker
from ..tensor_ids.tensor_ids import NO_OP, TensorIds
from ..values.capture_masks import Mask
from ..values.measured import HasSites, Sites
from ..values.recorder import ValueRecorder
from .mode import OpMode, tensors_in
from .schemas import OpSchema

#: Numbers that an output has which the mode has measured, one behind the other.
MEASURED_WIDTH = 7
ROW, OP, MASK, SLOT, GEOMETRY, START_NS, END_NS = range(MEASURED_WIDTH)

#: `OpMode.usual_mask` where the mode is to leave outputs to `OpValues.ended`, which finds the captures for each op.
_NOT_USUAL = -1


class MeasuredOps(HasSites):
    """The measurements of the ops of one batch.

    A site is a measurement, the op, the slot of its output, and the captures that want it. Of a leaf it has the op that
    reads the leaf first, or NO_OP if an outermost call has returned it before any op has read it, and the tensor's
    number. What the mode has measured itself has no site, but numbers.
    """

    width = 4

    __slots__ = ("ids", "numbers", "rows", "sites", "spent", "thread")

    def __init__(self, thread: int, ids: TensorIds, rows: HostRows) -> None:
        self.thread = thread
        self.sites: Sites = []
        self.spent: list[int] = []  # the intervals of what has sites
        self.numbers: Ints = np.zeros((0, MEASURED_WIDTH), np.int64)
        self.ids = ids  # they know the slots and geometries
        self.rows = rows  # those of `numbers`

    @property
    def intervals(self) -> Ints:  # type: ignore[override]  # an array is no sequence
        """The times at which measuring began and ended."""
        return np.append(np.array(self.spent, np.int64), self.numbers[:, START_NS:])

    def row_numbers(self) -> tuple[Rows, list[int]]:
        return self.rows, self.numbers[:, ROW].tolist()

    def forget(self) -> None:
        super().forget()
        self.numbers = self.numbers[:0]

    def add_sites(self, known: dict[int, Measurement]) -> None:
        """Adds sites for what has numbers, where there is a measurement of that row."""
        is_known = np.isin(self.numbers[:, ROW], [*known])
        for row, op, mask, slot, _, *interval in self.numbers[is_known].tolist():
            self.sites += (known[row], op, self.ids.slots[slot], mask)
            self.spent += interval
        self.numbers = self.numbers[~is_known]

    def part_at(self, op: int) -> "MeasuredOps":
        """Removes the measurements of this op and of those after it, and returns them."""
        later = MeasuredOps(self.thread, self.ids, self.rows)
        ops = self.sites[1 :: self.width]
        first = next((at for at, measured_op in enumerate(ops) if measured_op >= op), len(ops))
        self.sites, later.sites = self.sites[: self.width * first], self.sites[self.width * first :]
        self.spent, later.spent = self.spent[: 2 * first], self.spent[2 * first :]
        is_later = self.numbers[:, OP] >= op
        self.numbers, later.numbers = self.numbers[~is_later], self.numbers[is_later]
        return later


class OpValues:
    """Measures ops for one recorder. It runs inside a dispatch mode, where no function mode sees it."""

    def __init__(self, tracker: ScopeTracker, mode: OpMode, values: ValueRecorder) -> None:
        self._tracker = tracker
        self._mode = mode
        self._capture_masks = values.capture_masks
        self._is_stepping = tracker.optimizers.has_begun  # whether an optimizer may be at work
        self._thread = tracker.logs.current.number
        assert values.measurer is not None
        self._measure_more = values.measurer.measure
        values.measurer.find_measured = self.find
        self._failed = values.failed
        self._measurer = Measurer()
        self._measured = self._none_measured()
        #: Of this batch, by `id` of the tensor: a weak reference to it, its version when it was measured, the
        #: measurement, and when that began. If the mode has measured it, there is the number of its row until a module
        #: returns it. As long as it is known, `torch.utils.swap_tensors` refuses the tensor.
        self._latest: dict[int, tuple[weakref.ref[torch.Tensor], int, Measurement | int, int]] = {}
        self._shared: dict[
            int, Measurement
        ] = {}  # what a module returns too, and the mode has measured, by row
        self._is_off = False
        self._ended = self.ended  # one object, by which the mode knows the keeper that it stands in for
        keep_out_of_dynamo(self.measure_output, self.fail, HostRows.take)  # C calls them
        mode.after.append(self._ended)
        host = self._measurer.host_measurer
        mode.measure_with(self, self._ended, None if host is None else host.measure_row, self._latest)
        self.want(values.captures_for())

    def want(self, active: Mask) -> None:
        """Sets the captures that may want what runs now."""
        self.active, masks = active, self._capture_masks
        mask = masks.of_role(OP_OUTPUT) & active
        is_usual = masks.is_open(OP_OUTPUT) and masks.want(mask) is USUAL
        may_measure = is_usual and self._measurer.host_measurer is not None
        self._mode.usual_mask = mask if may_measure or not mask else _NOT_USUAL
        if self._is_off:  # another thread has met an error meanwhile
            self._mode.usual_mask = 0

    def _none_measured(self) -> MeasuredOps:
        return MeasuredOps(self._thread, self._mode.ids, self._measurer.host_rows)

    def take(self) -> MeasuredOps | None:
        """Returns the measurements since the last call."""
        measured, self._measured = self._measured, self._none_measured()
        numbers = np.array(self._mode.take_measurements(), np.int64)
        self._latest.clear()  # not before: another thread may run an op meanwhile
        measured.numbers = numbers.reshape(-1, MEASURED_WIDTH)
        if self._shared:
            shared, self._shared = self._shared, {}
            measured.add_sites(shared)
        return measured if measured.sites or len(numbers) else None

    def find(self, tensor: torch.Tensor) -> Measurement | None:
        """Returns the measurement of a tensor that an op has returned, if the tensor was not written to since."""
        known = self._latest.get(id(tensor))
        if known is None:
            return None
        ref, version, found, start_ns = known
        if ref() is not tensor or version != self._measurer.version_of(tensor):
            return None
        if isinstance(found, int):
            found = self._measurer.of_row(tensor, found)
            found.start_ns = start_ns
            self._latest[id(tensor)] = ref, version, found, start_ns
            self._shared[found.row] = found
        return found

    def ended(self, op: int, schema: OpSchema, output: Any) -> None:
        """Measures the outputs of an op, unless they are views, or are written after it has returned."""
        if schema.hides_writes:
            self._latest.clear()
        if schema.is_view or schema.returns_early or self._is_off:
            return
        mask = self._mask(schema.name, OP_OUTPUT)
        if not mask:
            return
        if isinstance(output, torch.Tensor):
            self._measure(output, op, "", mask, schema.name, not schema.is_uninitialized)
        elif output is not None:
            for tensor, slot in tensors_in(output, ""):
                self._measure(tensor, op, slot, mask, schema.name)

    def met(self, tensor_id: int, tensor: torch.Tensor, log: ThreadLog) -> None:
        """Measures a tensor that no op has made. What an optimizer reads is measured when its step begins."""
        if not self._is_off and not self._is_stepping():
            mask = self._mask("", LEAF)
            if mask:
                op = self._mode.next - 1 if self._mode.is_running else NO_OP
                is_read = id(tensor) not in self._mode.only_written
                self._measure(tensor, op, tensor_id, mask, LEAF, is_read)

    def _mask(self, name: str, role: str) -> Mask:
        """Returns the captures that want an output of an op, or a leaf that is read now; 0 if none does."""
        capture_masks = self._capture_masks
        if not self.active or capture_masks.is_open(role):
            return capture_masks.of_role(role) & self.active
        context = self._context()
        named = None if context is None else context.named
        return capture_masks.of_op(name, None if context is None else context.path, named, role) & self.active

    def _context(self) -> CallContext | None:
        """Returns the context of the running module call, in forward or backward; None if there is none."""
        log = self._tracker.logs.current
        if log.segment is not None and log.task == graph_task_id():
            return log.context if log.context.named is not None else None
        call = self._tracker.where().call
        return None if call is None else call.context

    def _measure(
        self,
        tensor: torch.Tensor,
        op: int,
        where: str | int,
        mask: Mask,
        name: str,
        is_initialized: bool = True,
    ) -> None:
        try:
            start_ns = time.perf_counter_ns()
            if not is_initialized:
                found = not_asked_for(tensor)  # the contents of uninitialised memory mean nothing
                found.note = NOTHING_WRITTEN
            elif (want := self._capture_masks.want(mask)) is USUAL:
                found = self._measurer.measure(tensor)
            else:
                context = self._context()
                slot = where if isinstance(where, str) else ""
                # An op that wrote in place ends before the version of its tensor rises.
                if type(where) is str:
                    self._latest.pop(id(tensor), None)
                found = self._measure_more(
                    tensor, want, join("" if context is None else context.path, name + slot)
                )
            found.start_ns = start_ns
            self._measured.sites += (found, op, where, mask)
            if self._mode.is_inside and type(tensor) is torch.Tensor and type(where) is str:
                version = self._measurer.version_of(tensor)
                if version is not None:
                    self._latest[id(tensor)] = weakref.ref(tensor), version, found, start_ns
            self._measured.spent += (start_ns, time.perf_counter_ns())
        except Exception as error:
            self.fail(error)

    def measure_output(
        self, tensor: torch.Tensor, op: int, slot: str, schema: OpSchema, mask: Mask, is_initialized: int
    ) -> None:
        """Measures an output that the mode does not measure itself."""
        self._measure(tensor, op, slot, mask, schema.name, bool(is_initialized))

    def fail(self, error: Exception) -> None:
        """Reports an internal error, and stops measuring."""
        self._is_off, self._mode.usual_mask = True, 0
        self._failed(error, "measuring what an op returned")
