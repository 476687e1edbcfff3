"""Measures tier 2 of an array in memory: histogram and sums, the largest magnitude of each channel, a sample."""

from functools import reduce
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...recording.statistics.sample import sample_positions
from ...recording.statistics.tier2 import BINS
from ..blocks import blocks, in_row, index_in_whole, without_repeats
from ..dtypes import CHUNK, Format, Raw
from ..elements import address_of, kind_of, to_floats
from .native_tier2 import largest_into
from .tier2_kernel import Histogram, Tier2, is_read, join, measure_piece

#: Of a tensor with more channels than these, the largest magnitude of each is not kept.
MOST_CHANNELS = 16_384

#: Shorter rows are compared several at a time, and shorter runs of a channel as channels of their own.
_SHORT_ROW, _SHORT_RUN = 256, 64

Channels = npt.NDArray[np.float32]
Bits = npt.NDArray[Any]  # signed integers


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
    found = _measure(once, form)
    argmax = index_in_whole(array, once, found.argmax // form.parts, form.parts)
    return RawTier2(
        found.sumabs * repeats, found.zeros * repeats, found.sum4 * repeats, argmax, found.histogram * repeats
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


def _measure(array: Raw, form: Format) -> Tier2:
    if is_read(form) and array.flags.c_contiguous and array.flags.aligned:
        return measure_piece(array, form)
    with np.errstate(all="ignore"):  # the user's error handler does not receive ours
        return join(measure_piece(in_row(array[block]), form) for block in blocks(array.shape, CHUNK))


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
        sizes = [each.stop - each.start for each in block]
        found = _largest_of_runs(bits.reshape(prod(sizes[:axis]), sizes[axis], prod(sizes[axis + 1 :])))
        np.maximum(largest[block[axis]], found, out=largest[block[axis]])
    assert largest is not None
    floats = to_floats(largest.view(form.raw), form) if is_float else largest.view(f"f{largest.itemsize}")
    return np.asarray(floats.astype(np.float32))


def _largest_of_runs(bits: Bits) -> Bits:
    """Returns the largest magnitude of each channel of `[outer, channels, inner]`."""
    outer, channels, inner = bits.shape
    if 1 < inner < _SHORT_RUN:
        found = _largest_of_rows(bits.reshape(outer, channels * inner)).reshape(channels, inner)
        together: Bits = reduce(np.maximum, found.T)  # `max(axis=1)` of pairs takes ten times as long
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
    found = _compare(bits[:whole].reshape(whole // together, together * channels, 1))
    largest: Bits = found.reshape(together, channels).max(axis=0)
    return largest if whole == rows else np.maximum(largest, _compare(bits[whole:, :, None]))


def _compare(bits: Bits) -> Bits:
    if largest_into is None:
        return np.asarray(np.maximum.reduce(bits & np.iinfo(bits.dtype).max, axis=(0, 2)))
    found = np.empty(bits.shape[1], bits.dtype)
    outer, channels, inner = bits.shape
    largest_into(address_of(bits), outer, channels, inner, bits.itemsize, address_of(found))
    return found
