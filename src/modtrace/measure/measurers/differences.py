"""Computes how far the elements of a tensor move, from a copy made before."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from ...errors import describe_error
from ...torch_internals.graph_captures import graph_captures
from ...torch_internals.tensors import kind_of, plain_kinds
from ..dtypes import format_of, to_floats
from ..memory import array_over, extent_of, why_unread
from ..special import NOT_MEASURED_IN_GRAPH, Plain, find_plain, is_uninitialized, shape_of, shortened
from .measurer import why_not

#: For tensors in CPU memory with these dtypes numpy computes the difference, so that no profiler sees an op of ours.
_READ_BY_NUMPY = frozenset(
    {torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16}
)
_COMPLEX = {torch.complex64: np.complex64, torch.complex128: np.complex128}

_Array = npt.NDArray[Any]


class Difference(NamedTuple):
    """The elements of a tensor minus those of an earlier copy, or the reason why they are not known."""

    tensor: torch.Tensor | None  # None: not known
    shape: tuple[int, ...]
    note: str | None  # the part that it is of, or why there is none


class Before:
    """A copy of a tensor's elements. Its memory is reused for the next copy of the same tensor."""

    __slots__ = ("_array", "_copy", "_layout", "_note", "_shape")

    def __init__(self) -> None:
        self._array: _Array | None = None  # raw elements, in the order in which they lie
        self._copy: torch.Tensor | None = None
        self._layout: Any = None  # of the tensor that was copied; None: nothing was
        self._note: str | None = None  # why not
        self._shape: tuple[int, ...] = ()  # as its user sees it

    def take(self, tensor: torch.Tensor) -> None:
        """Copies a tensor's elements. Call it in `unseen()`, without gradients and inference mode. It never raises."""
        try:
            self._layout, self._note, self._shape = None, None, ()
            with graph_captures.device_work(tensor) as is_allowed:
                if is_allowed:
                    self._take(tensor)
                else:
                    self._shape, self._note = shape_of(tensor), NOT_MEASURED_IN_GRAPH
        except Exception as error:  # a subclass of the user's, no memory left, a device that lacks an op
            self._layout, self._note = None, _failure(error)

    def difference(self, tensor: torch.Tensor, *, keep: bool) -> Difference:
        """Returns the tensor's present elements minus the copied ones, in float32 at least.

        Call it as `take()`; it never raises.

        Args:
            tensor: the tensor that was copied.
            keep: the result must not change. Otherwise it may use our memory, until the next `take()`.
        """
        try:
            if self._layout is None:
                return Difference(None, self._shape, self._note)
            with graph_captures.device_work(tensor) as is_allowed:
                if not is_allowed:
                    return Difference(None, shape_of(tensor), NOT_MEASURED_IN_GRAPH)
                return self._difference(tensor, keep)
        except Exception as error:
            return Difference(None, (), _failure(error))

    def _take(self, tensor: torch.Tensor) -> None:
        plain = _plain_of(tensor)
        self._shape = tuple(plain.shape)
        if plain.tensor is None:
            self._note = plain.note
        elif self._take_memory(plain.tensor) or self._take_by_op(plain.tensor):
            self._layout = _layout_of(plain.tensor)
        else:
            self._note = why_not(plain.tensor)

    def _difference(self, tensor: torch.Tensor, keep: bool) -> Difference:
        plain = _plain_of(tensor)
        shape = tuple(plain.shape)
        if plain.tensor is None:
            return Difference(None, shape, plain.note)
        if _layout_of(plain.tensor) != self._layout:
            return Difference(None, shape, "not measured: its shape, dtype or device has changed meanwhile")
        return Difference(self._subtract(plain.tensor, keep), shape, plain.note)

    def _take_memory(self, tensor: torch.Tensor) -> bool:
        """Copies the elements without an op of torch's. Returns False if that is impossible."""
        raw = _raw_of(tensor)
        if raw is None:
            self._array = None
            return False
        if self._array is None or self._array.shape != raw.shape or self._array.dtype != raw.dtype:
            self._array = np.empty_like(raw)
        np.copyto(self._array, raw)
        self._copy = None
        return True

    def _take_by_op(self, tensor: torch.Tensor) -> bool:
        """Copies the elements by an op of torch's. Returns False if there is nothing to copy."""
        if why_unread(tensor) is not None:
            return False
        known = self._copy
        # Without the strides: an expanded one's copy is dense.
        if known is None or _layout_of(known)[1:] != _layout_of(tensor)[1:]:
            self._copy = known = torch.empty_like(tensor)
        known.copy_(tensor)
        return True

    def _subtract(self, tensor: torch.Tensor, keep: bool) -> torch.Tensor | None:
        old = self._array
        if old is not None:
            raw = _raw_of(tensor)
            if raw is None:
                raise RuntimeError("its storage has been freed")
            return _as_tensor(_moved(raw, old, tensor.dtype, keep), tensor)
        assert self._copy is not None
        dtype = _wide(tensor.dtype)
        if dtype != tensor.dtype:
            return tensor.to(dtype).sub_(self._copy.to(dtype))
        return torch.sub(tensor, self._copy) if keep else torch.sub(tensor, self._copy, out=self._copy)


def _plain_of(tensor: torch.Tensor) -> Plain:
    if kind_of(tensor) in plain_kinds() and not is_uninitialized(tensor):
        return Plain(tensor, tensor.shape, None)
    return find_plain(tensor)


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.stride(), tensor.dtype, tensor.device, tuple(tensor.shape)


def _raw_of(tensor: torch.Tensor) -> _Array | None:
    """Returns the elements of contiguous CPU memory; None for other memory, or if numpy cannot subtract them."""
    if tensor.device.type != "cpu" or tensor.dtype not in _READ_BY_NUMPY:
        return None
    form, extent = format_of(tensor.dtype), extent_of(tensor)
    if form is None or extent is None or extent.shape is not None or extent.repeats != 1:
        return None
    return array_over(extent, form)


def _moved(new: _Array, old: _Array, dtype: torch.dtype, keep: bool) -> _Array:
    with np.errstate(all="ignore"):  # the user's error handler does not receive ours
        form = format_of(dtype)
        if form is not None and form.decode is not None:  # halves
            new, old, keep = to_floats(new, form), to_floats(old, form), False
        moved: _Array = np.subtract(new, old, out=None if keep else old)
    return moved


def _as_tensor(numbers: _Array, like: torch.Tensor) -> torch.Tensor:
    """Returns numbers as a tensor with the shape and strides of `like`. `torch.from_numpy` would run an op."""
    kind = _COMPLEX.get(like.dtype)
    if kind is not None:
        numbers = numbers.view(kind)
    if like.is_contiguous():
        numbers = numbers.reshape(tuple(like.shape))
    else:
        steps = tuple(stride * numbers.itemsize for stride in like.stride())
        numbers = np.lib.stride_tricks.as_strided(numbers, tuple(like.shape), steps)
    tensor: torch.Tensor = from_dlpack(numbers)
    return tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns a dtype in which a difference is exact, or rounded once."""
    if dtype.is_complex:
        return torch.complex64 if dtype.itemsize < 8 else dtype
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    return torch.int64


def _failure(error: Exception) -> str | None:
    return shortened(f"not measured: {describe_error(error)}")
