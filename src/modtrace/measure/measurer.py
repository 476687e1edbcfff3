"""Measures any tensor into a row, or notes why it cannot; never raises, and changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ..torch_internals import tensors
from ..torch_internals.graph_captures import BEING_CAPTURED, graph_captures
from ..torch_internals.modes import tracing_state, unseen
from ..torch_internals.tensors import is_on_device, kind_of, plain_kinds
from ..torch_internals.transforms import outside_transforms
from .cpu_kernel import measure_array, repeat
from .device_kernel import measure_on_device
from .dtypes import Format, format_of
from .first_index import first_nonfinite
from .memory import array_over, extent_of, is_held, logical_array, too_many, why_unread
from .native_moments import KINDS, measure_into
from .rows import DeviceRows, HostRows, Rows
from .special import find_plain, is_uninitialized, shape_of
from .want import Extra

_MOST_OF_A_NOTE = 120

#: The note if no capture wants statistics.
NOT_ASKED_FOR = "statistics not asked for"

#: The note if work on the tensor would end the capture of a CUDA graph, or become part of it.
NOT_MEASURED_IN_GRAPH = f"not measured: {BEING_CAPTURED}"

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class Measurement:
    """The result of measuring one tensor."""

    rows: Rows | None  # where its statistics are; None: it could not be measured
    row: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: there was no tensor, or it did not tell
    note: str | None  # why it was not measured, or which part of it was
    start_ns: int = 0  # when it began, if that is needed
    extra: Extra | None = None  # what else was kept of it


class Measurer:
    """Measures tensors into rows, each on its own device."""

    def __init__(self) -> None:
        self._plain = plain_kinds()
        self._host = HostRows()
        self._devices: dict[torch.device, DeviceRows] = {}

    def measure(self, tensor: torch.Tensor) -> Measurement:
        """Measures a tensor. Call it inside `DisableTorchFunction()`."""
        try:
            # While `torch.jit.trace` runs, reading a shape would become part of the trace.
            if kind_of(tensor) in self._plain and not is_uninitialized(tensor) and tracing_state() is None:
                shape = tensor.shape
                if type(shape) is not torch.Size:  # 40 ns
                    raise TypeError(f"shape of the tensor is a {type(shape).__name__}")
                measured = self._measure_memory(tensor, shape, None)
                if measured is not None:
                    return measured
            return self._measure_special(tensor)
        except Exception as error:  # a subclass of the user's, a device that lacks an op
            return _unmeasured(tensor, error)

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
        host = self._host
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
        with (
            unseen(),
            outside_transforms(),
            torch.no_grad(),
            graph_captures.device_work(tensor) as is_allowed,
        ):
            if not is_allowed:
                return Measurement(None, -1, shape_of(tensor), tensor.dtype, NOT_MEASURED_IN_GRAPH)
            plain = find_plain(tensor)
            shape = tuple(plain.shape)
            if plain.tensor is None:
                return Measurement(None, -1, shape, tensor.dtype, shortened(plain.note))
            measure = self._measure_on_device if is_on_device(plain.tensor) else self._measure_memory
            measured = measure(plain.tensor, shape, plain.note)
        return measured or Measurement(None, -1, shape, tensor.dtype, shortened(why_not(plain.tensor)))

    def _measure_on_device(
        self, tensor: torch.Tensor, shape: tuple[int, ...], note: str | None
    ) -> Measurement | None:
        form = format_of(tensor.dtype)
        if form is None or not is_held(tensor) or too_many(tensor, once=True) is not None:
            return None
        rows = self._devices.get(tensor.device)
        if rows is None:
            rows = self._devices[tensor.device] = DeviceRows(tensor.device)
        row = rows.take()
        try:
            measure_on_device(tensor, rows.row(row))
        except BaseException:
            rows.free([row])
            raise
        return Measurement(rows, row, shape, tensor.dtype, _both(note, form.note))


def not_asked_for(tensor: torch.Tensor) -> Measurement:
    """Returns the measurement of a tensor for which no statistics are wanted."""
    return Measurement(None, -1, shape_of(tensor), _answer(lambda: tensor.dtype), NOT_ASKED_FOR)


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


def shortened(note: str | None) -> str | None:
    """Returns the first line. Notes are dictionary-encoded, so there must not be many different ones."""
    return None if note is None else " ".join(note.split("\n", 1)[0].split())[:_MOST_OF_A_NOTE]
