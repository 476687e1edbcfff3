"""A numpy array over a CPU tensor's own memory, made without a single op of torch's."""

from typing import Any

import numpy as np
import torch

from .dtypes import Format, Raw


def array_over(tensor: torch.Tensor, form: Format) -> tuple[Raw, int] | None:
    """The raw elements of a strided CPU tensor, and how often each of them counts.

    Nothing is copied, and nothing is kept alive: the array must be gone before the tensor is. Of an expanded tensor
    each element is there once; a tensor whose elements lie dense in memory comes flat, whatever the order of its
    dimensions.

    Returns:
        None if its storage is too small to hold it: it has been freed (FSDP does that).
    """
    if tensor.is_contiguous():
        return _flat(tensor, form, tensor.numel(), 1)
    shape, strides, repeats = [], [], 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0:
            repeats *= size
        elif size != 1:
            shape.append(size)
            strides.append(stride)
    if _is_dense(shape, strides):
        return _flat(tensor, form, tensor.numel() // repeats, repeats)
    return _strided(tensor, form, shape, strides, repeats)


def is_held(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor's storage reaches to its last element; one that has been freed does not.

    A null `data_ptr()` does not tell: that of a view into freed memory is its offset.
    """
    if not tensor.numel():
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _reaches(tensor, last + 1)


def _reaches(tensor: torch.Tensor, extent: int) -> bool:
    end = (tensor.storage_offset() + extent) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= end  # 0.1 us


def _flat(tensor: torch.Tensor, form: Format, numel: int, repeats: int) -> tuple[Raw, int] | None:
    raw = np.dtype(form.raw)
    if not numel:
        return np.empty(0, raw), repeats
    if not _reaches(tensor, numel):
        return None
    return _array(tensor.data_ptr(), raw, (numel * form.parts,), None), repeats


def _strided(
    tensor: torch.Tensor, form: Format, shape: list[int], strides: list[int], repeats: int
) -> tuple[Raw, int] | None:
    if not is_held(tensor):
        return None
    raw = np.dtype(form.raw)
    item = raw.itemsize * form.parts
    sizes, steps = (*shape, form.parts), (*(item * stride for stride in strides), raw.itemsize)
    return _array(tensor.data_ptr(), raw, sizes, steps), repeats


def _is_dense(shape: list[int], strides: list[int]) -> bool:
    """Whether the elements lie side by side without gaps, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if stride != expected:
            return False
        expected *= size
    return True


class _Memory:
    """What numpy asks for an array over memory."""

    __slots__ = ("__array_interface__",)

    def __init__(self, description: dict[str, Any]) -> None:
        self.__array_interface__ = description


def _array(address: int, raw: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Raw:
    # 0.8 us; `tensor.detach().numpy()` takes as long, dispatches an op, and knows neither bfloat16 nor float8.
    memory = _Memory(
        {"version": 3, "data": (address, True), "typestr": raw.str, "shape": shape, "strides": strides}
    )
    return np.asarray(memory)
