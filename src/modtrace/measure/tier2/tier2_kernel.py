"""Measures tier 2 of contiguous numbers, in one pass by the compiled kernel if it is available, else by numpy."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...recording.statistics.tier2 import BINS
from ..dtypes import Floats, Format, Raw
from ..elements import address_of, kind_of, kind_of_floats, to_floats
from .native_tier2 import tier2_into

Histogram = npt.NDArray[np.int64]


class Tier2(NamedTuple):
    """The statistics of one piece of an array, or of several."""

    size: int
    histogram: Histogram
    zeros: int
    argmax: int  # the first of those numbers that are as large as the largest
    sumabs: float
    sum4: float
    largest: float  # magnitude


def measure_piece(raw: Raw, form: Format) -> Tier2:
    """Measures contiguous raw elements; at most CHUNK of them if the kernel does not read them."""
    kind = kind_of(form)
    if tier2_into is None:
        return _measure_with_numpy(to_floats(raw, form))
    if kind is not None:
        return _measure_memory(raw, kind)
    floats = to_floats(raw, form)
    return _measure_memory(floats, kind_of_floats(floats))


def is_read(form: Format) -> bool:
    """Returns whether the compiled kernel is available and reads these raw elements."""
    return tier2_into is not None and kind_of(form) is not None


def join(pieces: Iterable[Tier2]) -> Tier2:
    """Joins the statistics of at least one piece, in order, into those of the whole."""
    whole: Tier2 | None = None
    start = 0
    for piece in pieces:
        whole = piece if whole is None else _joined(whole, piece, start)
        start += piece.size
    assert whole is not None
    return whole


def _joined(one: Tier2, other: Tier2, start: int) -> Tier2:
    """Joins the statistics of two adjacent pieces; `start` is the index of the second one's first element."""
    is_larger = other.largest > one.largest or (math.isnan(other.largest) and not math.isnan(one.largest))
    return Tier2(
        start + other.size,
        one.histogram + other.histogram,
        one.zeros + other.zeros,
        start + other.argmax if is_larger else one.argmax,
        one.sumabs + other.sumabs,
        one.sum4 + other.sum4,
        other.largest if is_larger else one.largest,
    )


def _measure_memory(array: Raw, kind: int) -> Tier2:
    assert tier2_into is not None
    found = np.empty(BINS + 5, np.int64)
    tier2_into(address_of(array), array.size, kind, address_of(found))
    zeros, argmax = found[BINS : BINS + 2].tolist()
    sumabs, sum4, largest = found[BINS + 2 :].view(np.float64).tolist()
    return Tier2(array.size, found[:BINS], zeros, argmax, sumabs, sum4, largest)


def _measure_with_numpy(floats: Floats) -> Tier2:
    bits = floats.view(f"i{floats.itemsize}")
    # The bits of magnitudes, which have the same order; those of NaN are above all others.
    bits = bits & np.iinfo(bits.dtype).max
    zeros = len(bits) - int(np.count_nonzero(bits))
    histogram = _count_exponents(bits)
    histogram[0] -= zeros
    argmax = int(np.minimum(bits, _NAN[bits.dtype]).argmax())  # all NaN are equal here
    squares = np.square(floats, dtype=np.float64)
    np.square(squares, out=squares)
    return Tier2(
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
