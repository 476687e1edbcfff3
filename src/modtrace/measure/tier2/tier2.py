"""Measures tier 2 of an array in memory: histogram and sums, the largest magnitude of each channel, a sample."""

import math
from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...recording.statistics.sample import sample_positions
from ...recording.statistics.tier2 import BINS
from ..blocks import blocks, in_row, index_in_whole, without_repeats
from ..dtypes import CHUNK, Floats, Format, Raw, address_of, kind_of, kind_of_floats, to_floats

#: `(address, count, kind, target_address)`: writes 258 int64 and 3 doubles; kinds as in `dtypes.KINDS`.
#: None: not compiled, numpy measures (in 5 to 8 ns a float32 instead of 0.6).
tier2_into: Callable[[int, int, int, int], None] | None

#: `(address, outer, channels, inner, size_bytes, target_address)`: writes the bits of each channel's largest magnitude.
largest_into: Callable[[int, int, int, int, int, int], None] | None

try:
    from ._tier2 import largest_into, tier2_into
except ImportError:
    tier2_into = largest_into = None

#: Of a tensor with more channels than these, the largest magnitude of each is not kept.
MOST_CHANNELS = 16_384

#: Shorter rows are compared several at a time, and shorter runs of a channel as channels of their own.
_SHORT_ROW, _SHORT_RUN = 256, 64

Channels = npt.NDArray[np.float32]
Bits = npt.NDArray[Any]  # signed integers
Histogram = npt.NDArray[np.int64]


class RawTier2(NamedTuple):
    """The columns of the `values` table with the same names."""

    sumabs: float
    zero_count: int
    sum4: float
    argmax: int | None  # None if there are no elements
    histogram: Histogram  # [256]


def tier2_array(array: Raw, form: Format) -> RawTier2:
    """Measures all elements of an array; those of an expanded one count as often as they occur.

    Numbers are converted as in `measure_array`: integers beyond 2^53 are rounded to float64 first. Counts are exact.
    Sums have the rounding errors of float64 alone. For float64 numbers, fourth powers above 1e77 are infinite and below
    1e-81 are zero.

    Args:
        array: raw elements of the dtype in the tensor's shape, of any strides; complex numbers have a last axis of 2
            parts. If it is not contiguous, it is copied in pieces of 131,072 elements.
        form: their format.
    """
    if not array.size:
        return RawTier2(0.0, 0, 0.0, None, np.zeros(BINS, np.int64))
    once, repeats = without_repeats(array)
    measured = _measure(once, form)
    argmax = index_in_whole(array, once, measured.argmax // form.parts, form.parts)
    return RawTier2(
        measured.sumabs * repeats,
        measured.zeros * repeats,
        measured.sum4 * repeats,
        argmax,
        measured.histogram * repeats,
    )


def channel_max_array(array: Raw, form: Format, dim: int) -> Channels | str:
    """Returns the largest magnitude at each index of one dimension, or the reason why there is none.

    It is NaN if there is a NaN. The result is float32; magnitudes beyond its range are infinite. Complex numbers count
    by the larger of their parts.

    Args:
        array: as for `tier2_array`.
        form: its format.
        dim: the dimension of the channels, from the end if negative.
    """
    dims = array.ndim - (form.parts == 2)
    reason = why_no_channels(array.shape[:dims], dim)
    if reason is not None:
        return reason
    once, _ = without_repeats(array)
    axis = dim % dims
    with np.errstate(all="ignore"):
        largest = _largest_of_channels(once, form, axis)
    if once.shape[axis] < array.shape[axis]:
        largest = np.repeat(largest, array.shape[axis])
    return largest


def why_no_channels(shape: tuple[int, ...], dim: int) -> str | None:
    """Returns the reason why a tensor of this shape has no largest magnitudes of channels; None if it has."""
    if not shape:
        return "a tensor of no dimensions has no channels"
    if not -len(shape) <= dim < len(shape):
        return f"no dimension {dim} in a tensor of {len(shape)}"
    if not prod(shape):
        return "no elements"
    if shape[dim] > MOST_CHANNELS:
        return f"{shape[dim]:,} channels in dimension {dim}, more than {MOST_CHANNELS:,}"
    return None


def sample_array(array: Raw, form: Format, k: int) -> Channels:
    """Returns the values of `k` elements, or of all if there are fewer, at `sample_positions`.

    The result is float32. A complex element is two numbers, the real and the imaginary part.
    """
    shape = array.shape if form.parts == 1 else array.shape[:-1]
    places = np.unravel_index(sample_positions(prod(shape), k), shape) if shape else ()
    with np.errstate(all="ignore"):
        raw = np.ascontiguousarray(array[places]).reshape(-1)
        pieces = (raw[start : start + CHUNK] for start in range(0, len(raw), CHUNK))
        floats = [to_floats(piece, form).astype(np.float32) for piece in pieces]
    return np.concatenate([np.empty(0, np.float32), *floats])


class _Piece(NamedTuple):
    """The statistics of one piece of an array, or of several."""

    size: int
    histogram: Histogram
    zeros: int
    argmax: int  # the first of those numbers that are as large as the largest
    sumabs: float
    sum4: float
    largest: float  # magnitude


def _measure(array: Raw, form: Format) -> _Piece:
    if (
        tier2_into is not None
        and kind_of(form) is not None
        and array.flags.c_contiguous
        and array.flags.aligned
    ):
        return _measure_piece(array, form)
    with np.errstate(all="ignore"):  # the user's error handler does not receive ours
        return reduce(
            _join, (_measure_piece(in_row(array[block]), form) for block in blocks(array.shape, CHUNK))
        )


def _measure_piece(raw: Raw, form: Format) -> _Piece:
    """Measures contiguous raw elements; at most CHUNK of them if the compiled kernel does not read them."""
    kind = kind_of(form)
    if kind is None or tier2_into is None:
        raw = to_floats(raw, form)
    if tier2_into is None:
        return _measure_with_numpy(raw)
    results = np.empty(BINS + 5, np.int64)
    tier2_into(address_of(raw), raw.size, kind_of_floats(raw) if kind is None else kind, address_of(results))
    zeros, argmax = results[BINS : BINS + 2].tolist()
    sumabs, sum4, largest = results[BINS + 2 :].view(np.float64).tolist()
    return _Piece(raw.size, results[:BINS], zeros, argmax, sumabs, sum4, largest)


def _join(one: _Piece, other: _Piece) -> _Piece:
    """Joins the statistics of two adjacent pieces."""
    is_larger = other.largest > one.largest or (math.isnan(other.largest) and not math.isnan(one.largest))
    return _Piece(
        one.size + other.size,
        one.histogram + other.histogram,
        one.zeros + other.zeros,
        one.size + other.argmax if is_larger else one.argmax,
        one.sumabs + other.sumabs,
        one.sum4 + other.sum4,
        other.largest if is_larger else one.largest,
    )


def _measure_with_numpy(floats: Floats) -> _Piece:
    bits = floats.view(f"i{floats.itemsize}")
    # The bits of magnitudes, which have the same order; those of NaN are above all others.
    bits = bits & np.iinfo(bits.dtype).max
    zeros = len(bits) - int(np.count_nonzero(bits))
    histogram = _count_exponents(bits)
    histogram[0] -= zeros
    argmax = int(np.minimum(bits, _NAN[bits.dtype]).argmax())  # all NaN are equal here
    squares = np.square(floats, dtype=np.float64)
    np.square(squares, out=squares)
    return _Piece(
        len(floats),
        histogram,
        zeros,
        argmax,
        float(np.add.reduce(np.abs(floats), dtype=np.float64)),
        float(np.add.reduce(squares)),  # `dot` starts threads, which wait for each other on a busy machine
        abs(float(floats[argmax])),
    )


def _count_exponents(bits: npt.NDArray[Any]) -> Histogram:
    """Returns the histogram of exponents. Zeros are in the first bin; numbers that are not finite are in none."""
    if bits.dtype == np.int32:
        histogram = np.bincount(bits >> 23, minlength=BINS)
        histogram[-1] = 0
        return histogram
    exponents = bits >> 52
    bins = np.clip(exponents - 896, 0, BINS - 1)  # the biases are 1023 and 127
    histogram = np.bincount(bins, minlength=BINS)
    histogram[-1] -= np.count_nonzero(exponents == 2047)
    return histogram


_NAN = {np.dtype(np.int32): np.int32(0x7F800001), np.dtype(np.int64): np.int64(0x7FF0000000000001)}


# Channels. Bits of magnitudes are compared: the larger the magnitude, the larger they are, and the largest are NaN.


def _largest_of_channels(array: Raw, form: Format, axis: int) -> Channels:
    by_memory = sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)
    array, axis = array.transpose(by_memory), by_memory.index(axis)
    is_float = kind_of(form) is not None
    largest: Bits | None = None
    is_whole = is_float and array.flags.c_contiguous and array.flags.aligned
    for block in blocks(array.shape, array.size if is_whole else CHUNK):
        raw = in_row(array[block])
        floats = raw if is_float else to_floats(raw, form)
        bits: Bits = floats.view(f"i{floats.itemsize}")
        if largest is None:
            largest = np.zeros(array.shape[axis], bits.dtype)
        sizes = [extent.stop - extent.start for extent in block]
        of_block = _largest_of_runs(bits.reshape(prod(sizes[:axis]), sizes[axis], prod(sizes[axis + 1 :])))
        np.maximum(largest[block[axis]], of_block, out=largest[block[axis]])
    assert largest is not None
    floats = to_floats(largest.view(form.raw), form) if is_float else largest.view(f"f{largest.itemsize}")
    return np.asarray(floats.astype(np.float32))


def _largest_of_runs(bits: Bits) -> Bits:
    """Returns the largest magnitude of each channel of `[outer, channels, inner]`."""
    outer, channels, inner = bits.shape
    if 1 < inner < _SHORT_RUN:
        of_rows = _largest_of_rows(bits.reshape(outer, channels * inner)).reshape(channels, inner)
        together: Bits = reduce(np.maximum, of_rows.T)  # `max(axis=1)` of pairs takes ten times as long
        return together
    if inner == 1:
        return _largest_of_rows(bits.reshape(outer, channels))
    return _compare(bits)


def _largest_of_rows(bits: Bits) -> Bits:
    rows, channels = bits.shape
    together = min(rows, _SHORT_ROW // channels)
    if together < 2:
        return _compare(bits[:, :, None])
    whole = rows - rows % together
    of_groups = _compare(bits[:whole].reshape(whole // together, together * channels, 1))
    largest: Bits = of_groups.reshape(together, channels).max(axis=0)
    return largest if whole == rows else np.maximum(largest, _compare(bits[whole:, :, None]))


def _compare(bits: Bits) -> Bits:
    if largest_into is None:
        return np.asarray(np.maximum.reduce(bits & np.iinfo(bits.dtype).max, axis=(0, 2)))
    largest = np.empty(bits.shape[1], bits.dtype)
    outer, channels, inner = bits.shape
    largest_into(address_of(bits), outer, channels, inner, bits.itemsize, address_of(largest))
    return largest
