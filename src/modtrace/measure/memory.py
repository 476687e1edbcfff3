"""Finds where a CPU tensor's elements are in memory, without a single op of torch's."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from .dtypes import Format, Raw, format_of

#: If elements share memory, because a tensor is expanded or its windows overlap, at most this many
#: are visited, or this many times as many as are in memory. `zeros(1).expand(1 << 40)` would take 20 minutes.
MOST_ELEMENTS = 2**27
MOST_TIMES = 16


class Extent(NamedTuple):
    """The memory of a strided tensor's elements, each once."""

    address: int
    numel: int
    repeats: int  # how often each counts, which is more than once if the tensor is expanded
    shape: tuple[int, ...] | None = None  # None: contiguous, in any order of the dimensions
    strides: tuple[int, ...] = ()  # in elements
    is_row_major: bool = False  # the elements lie in memory as they are counted


def extent_of(tensor: torch.Tensor) -> Extent | None:
    """Returns where a strided CPU tensor's elements are.

    Returns None if its storage is too short, because it has been freed as FSDP does, or if there are too many elements
    (see `too_many`). The memory is not kept alive: read it before the tensor is gone.
    """
    if tensor.is_contiguous():
        return _dense(tensor, tensor.numel(), 1, is_row_major=True)
    shape, strides, repeats = [], [], 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0:
            repeats *= size
        elif size != 1:
            shape.append(size)
            strides.append(stride)
    if _is_dense(shape, strides):
        return _dense(tensor, tensor.numel() // repeats, repeats)
    if not is_held(tensor) or _too_many(shape, strides) is not None:
        return None
    return Extent(tensor.data_ptr(), tensor.numel() // repeats, repeats, tuple(shape), tuple(strides))


def once_each(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the tensor with size 1 in each expanded dimension, and how often each of its elements counts."""
    repeats = 1
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            repeats *= tensor.size(dim)
            tensor = tensor.narrow(dim, 0, 1)
    return tensor, repeats


def array_over(extent: Extent, form: Format) -> Raw:
    """Returns the raw elements of an extent as an array, without a copy."""
    raw = np.dtype(form.raw)
    if not extent.numel:
        return np.empty(0, raw)
    if extent.shape is None:
        return _array(extent.address, raw, (extent.numel * form.parts,), None)
    item = raw.itemsize * form.parts
    steps = (*(item * stride for stride in extent.strides), raw.itemsize)
    return _array(extent.address, raw, (*extent.shape, form.parts), steps)


def logical_array(tensor: torch.Tensor) -> Raw | None:
    """Returns the raw elements of a strided CPU tensor in its own shape and order of dimensions, without a copy.

    Complex numbers have a last axis of two parts. Conjugate and negative bits are not applied. The memory is not kept
    alive: read it before the tensor is gone.

    Returns:
        the array; None if the storage has been freed, or the dtype cannot be read.
    """
    form = format_of(tensor.dtype)
    if form is None or not is_held(tensor):
        return None
    raw = np.dtype(form.raw)
    shape = tuple(tensor.shape) if form.parts == 1 else (*tensor.shape, form.parts)
    if not tensor.numel():
        return np.empty(shape, raw)
    if tensor.is_contiguous():
        return _array(tensor.data_ptr(), raw, shape, None)
    item = raw.itemsize * form.parts
    steps = tuple(item * stride for stride in tensor.stride())
    return _array(tensor.data_ptr(), raw, shape, steps if form.parts == 1 else (*steps, raw.itemsize))


def why_unread(tensor: torch.Tensor) -> str | None:
    """Returns the reason why the elements of a strided tensor cannot be read; None if they can."""
    return too_many(tensor) if is_held(tensor) else "its storage has been freed"


def too_many(tensor: torch.Tensor, *, once: bool = False) -> str | None:
    """Returns the reason why a strided tensor has too many elements to visit them all; None if it has not.

    Args:
        tensor: the tensor.
        once: each element of an expanded tensor is visited once, however often it counts.
    """
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    shape_and_strides = [dim for dim in dims if not once or dim[1]]
    return _too_many([size for size, _ in shape_and_strides], [stride for _, stride in shape_and_strides])


def _too_many(shape: Sequence[int], strides: Sequence[int]) -> str | None:
    numel = prod(shape)
    if numel <= MOST_ELEMENTS:
        return None
    held = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if numel <= MOST_TIMES * held:
        return None
    return f"{numel:,} elements that lie in memory as {held:,} are too many"


def is_held(tensor: torch.Tensor) -> bool:
    """Returns whether a strided tensor's storage reaches to its last element. A freed storage does not.

    A null `data_ptr()` does not show this: that of a view into freed memory is its offset.
    """
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _reaches(tensor, last + 1)


def _reaches(tensor: torch.Tensor, extent: int) -> bool:
    end = (tensor.storage_offset() + extent) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= end  # 0.1 us


def _dense(tensor: torch.Tensor, numel: int, repeats: int, *, is_row_major: bool = False) -> Extent | None:
    if not numel:
        return Extent(0, 0, repeats)
    if not _reaches(tensor, numel):
        return None
    return Extent(tensor.data_ptr(), numel, repeats, is_row_major=is_row_major)


def _is_dense(shape: list[int], strides: list[int]) -> bool:
    """Returns whether the elements are contiguous without gaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if stride != expected:
            return False
        expected *= size
    return True


class _Memory:
    """The attributes that numpy reads to make an array over memory."""

    __slots__ = ("__array_interface__",)

    def __init__(self, description: dict[str, Any]) -> None:
        self.__array_interface__ = description


def _array(address: int, raw: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Raw:
    # 0.8 us; `tensor.detach().numpy()` takes as long, dispatches an op, and knows neither bfloat16 nor float8.
    memory = _Memory(
        {"version": 3, "data": (address, True), "typestr": raw.str, "shape": shape, "strides": strides}
    )
    return np.asarray(memory)
