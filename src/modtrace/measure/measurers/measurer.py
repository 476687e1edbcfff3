"""Measures any tensor into a row, or notes why it cannot; never raises, and changes nothing."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from ...torch_internals import tensors
from ...torch_internals.graph_captures import graph_captures
from ...torch_internals.modes import tracing_state
from ...torch_internals.subclasses import DTensorShard
from ...torch_internals.tensors import dispatch_keys, is_on_device, kind_of, plain_kinds
from ...torch_internals.transforms import plain_ops
from ..cuda.cuda_kernels import CudaKernels, Task, find_kernels, launcher
from ..cuda.together import Together
from ..dtypes import KINDS, Format, format_of
from ..memory import Extent, array_over, extent_of, is_held, logical_array, once_each, too_many, why_unread
from ..moments.cpu_kernel import HostMeasurer, first_nonfinite, measure_array, measure_into, repeat
from ..moments.device_kernel import measure_on_device
from ..moments.rows import ArrivingRows, DeviceRows, HostRows, Rows, arriving_rows
from ..special import NOT_MEASURED_IN_GRAPH, find_plain, find_shard, is_uninitialized, shape_of, shortened
from .want import Extra

#: The note if no capture wants statistics.
NOT_ASKED_FOR = "statistics not asked for"

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class Measurement:
    """The result of measuring one tensor."""

    rows: Rows | None  # where its statistics are, or will be; None: it could not be measured
    row: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: there was no tensor, or it did not tell
    note: str | None  # why it was not measured, or which part of it was
    start_ns: int = 0  # when it began, if that is needed
    extra: Extra | None = None  # what else was kept of it
    requires_grad: bool | None = None  # of what a module is given or returns

    #: Where the tensor lies in a DTensor, of which it is the part on this rank. No property: reading one takes 50 ns.
    shard: ClassVar[DTensorShard | None] = None

    def discard(self, note: str) -> None:
        """Forgets the row, which nothing has written or will write; the note says why. The row is not used again."""
        self.rows, self.note = None, note


class ShardMeasurement(Measurement):
    """The result of measuring the part of a DTensor that is on this rank."""

    __slots__ = ("shard",)

    def __init__(self, measured: Measurement, shard: DTensorShard) -> None:
        super().__init__(measured.rows, measured.row, measured.shape, measured.dtype, measured.note)
        self.shard = shard  # type: ignore[misc]  # here it is one of the object's


class Measurer:
    """Measures tensors into rows, each on its own device."""

    def __init__(self, together: Together | None = None) -> None:
        #: What measures a tensor by its `kind_of`, if it may be read as it is.
        self._plain = dict.fromkeys(plain_kinds(), self._measure_memory)
        self.host_rows = HostRows()
        #: Measures plain tensors in main memory in C; None: it is not there.
        self.host_measurer = _new_host_measurer(self.host_rows)
        self._arriving: dict[torch.device, tuple[CudaKernels, ArrivingRows]] = {}
        self._devices: dict[torch.device, DeviceRows] = {}
        self._together = together or Together()
        self.together = self._together.block
        self._paths: dict[torch.device, tuple[Any, ...]] = {}
        self._launcher: Any = None  # of _cuda_launch.c

    def measure(self, tensor: torch.Tensor) -> Measurement:
        """Measures a tensor. Call it inside `DisableTorchFunction()`."""
        try:
            if self._launcher is not None and not graph_captures.may_be_open:
                by_thread = self._together.by_thread
                launches = by_thread.get(threading.get_ident()) if by_thread else None
                batches = None if launches is None else launches.moment_batches
                # None: not contiguous, say.
                launched: Measurement | None = self._launcher.measure(tensor, batches)
                if launched is not None:
                    return launched
            if self.host_measurer is not None and measure_into is not None:
                measured: Measurement | None = self.host_measurer.measure(tensor)
                if measured is not None:  # None: a subclass, integers ...
                    return measured
            measure = self._plain.get(kind_of(tensor))
            # While `torch.jit.trace` runs, reading a shape would become part of the trace.
            if measure is not None and not is_uninitialized(tensor) and tracing_state() is None:
                shape = tensor.shape
                if type(shape) is not torch.Size:  # 40 ns
                    raise TypeError(f"shape of the tensor is a {type(shape).__name__}")
                measured = measure(tensor, shape, None)
                if measured is not None:
                    return measured
            return self._measure_special(tensor)
        except Exception as error:  # a subclass of the user's, a device that lacks an op
            return _unmeasured(tensor, error)

    def of_row(self, tensor: torch.Tensor, row: int) -> Measurement:
        """Returns the measurement of a plain tensor that C has measured into a row."""
        return _measured(self.host_rows, row, tensor.shape, tensor.dtype, None)

    @property
    def has_met_device(self) -> bool:
        """True if tensors on a device were measured: reading their rows waits until they have come."""
        return bool(self._arriving or self._devices)

    @staticmethod
    def has_kernels(device: torch.device) -> bool:
        """Returns whether tensors on a device are measured by kernels, whose rows arrive without a wait."""
        return find_kernels(device) is not None

    #: Returns the number of writes to a tensor that torch has counted; None if it does not count them.
    version_of = staticmethod(tensors.version_of)

    def _measure_memory(
        self, tensor: torch.Tensor, shape: tuple[int, ...], note: str | None
    ) -> Measurement | None:
        """Returns the measurement of a strided tensor in CPU memory; None if its memory cannot be read."""
        dtype = tensor.dtype
        form = format_of(dtype)
        extent = None if form is None else extent_of(tensor)
        if form is None or extent is None:
            return None
        host = self.host_rows
        kind = None
        if measure_into is not None and extent.shape is None and not extent.address % tensor.element_size():
            kind = KINDS.get(dtype)  # numpy knows how to read what is not aligned
        if measure_into is not None and kind is not None:
            row = host.take()
            address = host.address(row)
            is_known = not measure_into(
                extent.address, extent.numel * form.parts, extent.repeats, kind, address
            ) or (extent.is_row_major and form.parts == 1 and tensor.shape == shape)
        else:
            with np.errstate(all="ignore"):  # the user's error handler does not receive ours; 0.8 us
                statistics = measure_array(array_over(extent, form), form)
            row = host.put(repeat(statistics, extent.repeats))
            is_known = not (statistics.nan_count or statistics.inf_count)
        if not is_known:  # where the first non-finite element is
            host.put_first_index(row, _first_nonfinite(tensor, shape, form))
        return Measurement(host, row, shape, dtype, _both(note, form.note))

    def _measure_special(self, tensor: torch.Tensor) -> Measurement:
        with plain_ops(), graph_captures.device_work(tensor) as is_allowed:
            if not is_allowed:
                return Measurement(None, -1, shape_of(tensor), tensor.dtype, NOT_MEASURED_IN_GRAPH)
            plain = find_plain(tensor)
            shape = tuple(plain.shape)
            if plain.tensor is None:
                measured = Measurement(None, -1, shape, tensor.dtype, shortened(plain.note))
            else:
                measure = self._measure_on_device if is_on_device(plain.tensor) else self._measure_memory
                measured = measure(plain.tensor, shape, plain.note) or Measurement(
                    None, -1, shape, tensor.dtype, shortened(why_not(plain.tensor))
                )
        return measured if plain.shard is None else ShardMeasurement(measured, plain.shard)

    def _measure_on_device(
        self, tensor: torch.Tensor, shape: tuple[int, ...], note: str | None
    ) -> Measurement | None:
        form, device = format_of(tensor.dtype), tensor.device
        if form is None or not is_held(tensor) or too_many(tensor, once=True) is not None:
            return None
        kernels = find_kernels(device)
        if kernels is not None and kernels.may_measure(tensor.dtype):
            if device not in self._arriving:
                self._meet(device, kernels)
            measured = self._measure_by_kernel(tensor, shape, note) or self._measure_copy(tensor, shape, note)
            if measured is not None:
                return measured
        rows = self._devices.get(device)
        if rows is None:
            rows = self._devices[device] = DeviceRows(device)
        row = measure_on_device(tensor, rows)
        return Measurement(rows, row, shape, tensor.dtype, _both(note, form.note))

    def _meet(self, device: torch.device, kernels: CudaKernels) -> None:
        """Measures tensors on a device by its kernels from now on."""
        rows = arriving_rows(device)
        self._arriving[device], self._paths[device] = (kernels, rows), kernels.path(rows)
        kinds = plain_kinds(device.type)
        self._plain.update(dict.fromkeys(kinds, self._measure_by_kernel))
        if kinds and self._launcher is None:
            self._launcher = launcher(kinds, Measurement, self._paths)

    def _measure_by_kernel(
        self, tensor: torch.Tensor, shape: tuple[int, ...], note: str | None
    ) -> Measurement | None:
        """Returns the measurement of a tensor by a kernel of our own; None if its memory is not dense, or captured."""
        arriving = None if graph_captures.may_be_open else self._arriving.get(tensor.device)
        if arriving is None or not arriving[0].may_measure(tensor.dtype):
            return None
        launches = self._together.launches
        if self._launcher and launches is not None and note is None and launches.prepare(tensor, arriving[0]):
            measured: Measurement | None = self._launcher.measure(tensor, launches.moment_batches)
            if measured is not None:
                return measured
        extent = extent_of(tensor)
        return (
            None if extent is None or extent.shape is not None else self._launch(extent, tensor, shape, note)
        )

    def _measure_copy(
        self, tensor: torch.Tensor, shape: tuple[int, ...], note: str | None
    ) -> Measurement | None:
        """Returns the same of a tensor whose elements do not lie side by side."""
        once, repeats = once_each(tensor)
        copy = once.contiguous()
        extent = extent_of(copy)
        if extent is None:
            return None
        extent = extent._replace(repeats=repeats, is_row_major=repeats == 1)
        return self._launch(extent, copy, shape, note)

    def _launch(
        self, extent: Extent, tensor: torch.Tensor, shape: tuple[int, ...], note: str | None
    ) -> Measurement | None:
        dtype = tensor.dtype
        form, arriving = format_of(dtype), self._arriving.get(tensor.device)
        if form is None or arriving is None or extent.address % tensor.element_size():
            return None
        kernels, rows = arriving
        row = rows.take()
        parts = form.parts if extent.is_row_major else 0
        task = Task(extent.address, extent.numel * form.parts, extent.repeats, parts, rows.address(row))
        try:
            with graph_captures.device_work(tensor) as is_allowed:
                was_launched = is_allowed and kernels.measure(task, dtype)
        except BaseException:
            rows.free([row])
            raise
        if was_launched:
            return _measured(rows, row, shape, dtype, note)
        rows.untake(row)
        return None


def _new_host_measurer(rows: HostRows) -> Any:
    """Returns what measures plain tensors in main memory in C; None where that, or torch's way to them, is missing."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if HostMeasurer is None or exchange is None or dispatch_keys is None:
        return None
    form, (_, free, addresses, block_rows, row_bytes) = format_of(torch.complex64), rows.path()
    held = (
        (torch.Tensor, torch.nn.Parameter), plain_kinds(), dispatch_keys, tracing_state, Measurement,
        None if form is None else form.note, rows, free, addresses,
    )  # fmt: skip
    return HostMeasurer(held, exchange, block_rows, row_bytes)


def _measured(
    rows: Rows, row: int, shape: tuple[int, ...], dtype: torch.dtype, note: str | None
) -> Measurement:
    form = format_of(dtype)
    return Measurement(rows, row, shape, dtype, _both(note, None if form is None else form.note))


def not_asked_for(tensor: torch.Tensor) -> Measurement:
    """Returns the measurement of a tensor for which no statistics are wanted."""
    part, shard = _answer(lambda: find_shard(tensor)) or (tensor, None)
    found = Measurement(None, -1, shape_of(part), _answer(lambda: tensor.dtype), NOT_ASKED_FOR)
    return found if shard is None else ShardMeasurement(found, shard)


def why_not(tensor: torch.Tensor) -> str:
    """Returns the reason why a strided tensor cannot be read."""
    if format_of(tensor.dtype) is None:
        return f"not measured: dtype {str(tensor.dtype).removeprefix('torch.')}"
    return f"not measured: {why_unread(tensor)}"


def _first_nonfinite(tensor: torch.Tensor, shape: tuple[int, ...], form: Format) -> int:
    """Returns the index of the first non-finite element.

    It is -1 where the index is not one in `shape`, as of a sparse tensor, and where it cannot be found. The statistics
    of the tensor are kept then.
    """
    if tensor.shape != shape:
        return -1
    try:
        array = logical_array(tensor)
        with np.errstate(all="ignore"):
            return -1 if array is None else first_nonfinite(array, form)
    except Exception:  # there may be no memory for the copy that it reads
        return -1


def _unmeasured(tensor: torch.Tensor, error: Exception) -> Measurement:
    """Returns the measurement of a tensor that raises when it is read."""
    note = f"not measured: {type(error).__name__}{_answer(lambda: f': {error}') or ''}"
    return Measurement(None, -1, shape_of(tensor), _answer(lambda: tensor.dtype), shortened(note))


def _answer(ask: Callable[[], _T]) -> _T | None:
    try:
        return ask()
    except Exception:
        return None


def _both(note: str | None, more: str | None) -> str | None:
    return more if note is None else shortened(note if more is None else f"{note}; {more}")
