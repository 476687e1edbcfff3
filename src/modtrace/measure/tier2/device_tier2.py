"""Measures tier 2 of a tensor on its device without waiting for it.

Decisions that depend on the data are made on the device.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from ...recording.statistics.sample import place_in_parts
from ...recording.statistics.tier2 import BINS
from ..blocks import blocks
from ..memory import once_each
from .tier2 import why_no_channels

#: Elements per chunk; intermediate results take at most some fifty times this many bytes.
_CHUNK = 2**22

#: The number of tables that neighbours add to: additions to the same number wait for each other.
_TABLES = 64


class DeviceTier2(NamedTuple):
    """The fields of `RawTier2`, as tensors on the device."""

    sumabs: torch.Tensor  # float64
    zero_count: torch.Tensor  # int64
    sum4: torch.Tensor  # float64
    argmax: torch.Tensor | None  # int64
    histogram: torch.Tensor  # int64 [256]


def tier2_on_device(tensor: torch.Tensor) -> DeviceTier2:
    """Measures all elements of a strided tensor; those of an expanded one count as often as they occur.

    It is not yet optimised for speed: two dozen kernels a chunk. Call it without modes, gradients or transforms.

    Args:
        tensor: any floating, complex, integer or boolean dtype that the device can convert.
    """
    if not tensor.numel():
        counts = torch.zeros(BINS + 1, dtype=torch.int64, device=tensor.device)
        sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
        return DeviceTier2(sums[0], counts[0], sums[1], None, counts[1:])
    once, repeats = once_each(tensor)
    parts = 2 if tensor.is_complex() else 1
    start, pieces = 0, []
    for numbers in _chunks(torch.view_as_real(once) if parts == 2 else once):
        pieces.append(_measure(numbers, start))
        start += numbers.numel()
    sumabs, zeros, sum4, histogram, largest, argmax = (
        torch.stack(results) for results in zip(*pieces, strict=True)
    )
    # `argmax[...]` would wait for the index.
    index = argmax.gather(0, largest.argmax().reshape(1)).reshape(()) // parts
    return DeviceTier2(
        sumabs.sum() * repeats,
        zeros.sum() * repeats,
        sum4.sum() * repeats,
        index if repeats == 1 else _index_in(tensor, once, index),
        histogram.sum(dim=0) * repeats,
    )


def channel_max_on_device(tensor: torch.Tensor, dim: int) -> torch.Tensor | str:
    """Returns what `channel_max_array` does, as float32 on the device, or the reason why there is none."""
    reason = why_no_channels(tuple(tensor.shape), dim)
    if reason is not None:
        return reason
    axis = dim % tensor.dim()
    once, _ = once_each(tensor)
    numbers = torch.view_as_real(once) if tensor.is_complex() else once
    largest = torch.zeros(once.shape[axis], dtype=torch.float32, device=tensor.device)
    others = [other for other in range(numbers.dim()) if other != axis]
    for block in blocks(numbers.shape, _CHUNK):
        magnitudes = _to_floats(numbers[block]).abs()
        magnitudes = torch.amax(magnitudes, dim=others) if others else magnitudes
        of_block = largest[block[axis]]
        torch.maximum(of_block, magnitudes.to(torch.float32), out=of_block)
    return largest.expand(tensor.shape[axis]) if once.shape[axis] < tensor.shape[axis] else largest


def sample_on_device(tensor: torch.Tensor, k: int) -> torch.Tensor:
    """Returns what `sample_array` does, as float32 on the device."""
    shape, numel = tensor.shape, tensor.numel()
    places = torch.arange(min(numel, k), device=tensor.device)
    if numel > k:
        places = place_in_parts(places, numel, k)
    elements = tensor[_unravel(places, shape)] if shape else tensor.reshape(1)[places]
    if tensor.is_complex():
        elements = torch.view_as_real(elements)
    return elements.to(torch.float32).reshape(-1)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields all elements in row-major order, in rows of bounded length."""
    if tensor.is_contiguous():
        yield from torch.split(tensor.reshape(-1), _CHUNK)
    else:
        yield from (tensor[block].reshape(-1) for block in blocks(tensor.shape, _CHUNK))


def _measure(numbers: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    """Returns sumabs, zeros, sum4, the histogram, the bits of the largest magnitude, and argmax."""
    floats = _to_floats(numbers)
    bits = floats.view(torch.int32 if floats.dtype == torch.float32 else torch.int64)
    # The bits of magnitudes, which have the same order; those of NaN are above all others.
    bits = bits & torch.iinfo(bits.dtype).max
    zeros = (bits == 0).sum()
    comparable = bits.clamp(max=_NAN[bits.dtype])  # all NaN are equal here
    wide = floats.to(torch.float64)
    squares = wide * wide
    return (
        wide.abs().sum(),
        zeros,
        torch.dot(squares, squares),
        _count_exponents(bits, zeros),
        comparable.amax().to(torch.int64),
        comparable.argmax() + start,
    )


def _to_floats(numbers: torch.Tensor) -> torch.Tensor:
    """Converts to float32, or to float64 if float32 is too narrow."""
    if numbers.dtype == torch.float64 or (not numbers.is_floating_point() and numbers.element_size() > 2):
        return numbers.to(torch.float64)
    return numbers.to(torch.float32)


def _count_exponents(bits: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    if bits.dtype == torch.int32:
        bins = bits >> 23
        nonfinite = (bins == 255).sum()
    else:
        exponents = bits >> 52
        nonfinite = (exponents == 2047).sum()
        bins = (exponents - 896).clamp(0, BINS - 1)  # the biases are 1023 and 127
    # `bincount` and `histc` wait for the device, or are refused where ops have to be deterministic.
    table = torch.arange(bins.numel(), device=bits.device) % _TABLES
    counts = torch.zeros(BINS * _TABLES, dtype=torch.int64, device=bits.device)
    counts.scatter_add_(0, bins.to(torch.int64) * _TABLES + table, torch.ones_like(table))
    histogram = counts.view(BINS, _TABLES).sum(dim=1)
    histogram[0] -= zeros
    histogram[-1] -= nonfinite
    return histogram


def _index_in(tensor: torch.Tensor, once: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the index of an element of `once` in the expanded tensor; that of its first copy."""
    whole_index = torch.zeros_like(index)
    for size, at in zip(tensor.shape, _unravel(index, once.shape), strict=True):
        whole_index = whole_index * size + at
    return whole_index


def _unravel(index: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, ...]:
    sizes: list[int] = list(shape)
    return tuple(index // prod(sizes[dim + 1 :]) % size for dim, size in enumerate(sizes))


_NAN: dict[torch.dtype, Any] = {torch.int32: 0x7F800001, torch.int64: 0x7FF0000000000001}
