"""Divides an array of any shape and strides into pieces of bounded size."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import numpy as np

from .dtypes import CHUNK, Raw

Block = tuple[slice, ...]


def blocks(shape: Sequence[int], most: int) -> Iterator[Block]:
    """Yields slices that together cover an array, each of at most `most` elements, in row-major order.

    The elements of each slice are consecutive in that order.
    """
    inner, axis = 1, len(shape)
    while axis and inner * shape[axis - 1] <= most:
        axis -= 1
        inner *= shape[axis]
    whole = tuple(slice(0, size) for size in shape[axis:])
    if axis == 0:
        yield whole
        return
    step = max(1, most // inner)
    for place in product(*(range(size) for size in shape[: axis - 1])):
        outer = tuple(slice(at, at + 1) for at in place)
        for start in range(0, shape[axis - 1], step):
            yield (*outer, slice(start, min(start + step, shape[axis - 1])), *whole)


def pieces_of(array: Raw, order: str) -> Iterator[Raw]:
    """Yields all elements, at most CHUNK contiguous ones at a time; a piece may be overwritten by the next.

    Args:
        array: of any strides.
        order: "C" for row-major, "K" for that in which they are in memory.
    """
    flags = ["external_loop", "buffered"]
    with np.nditer(array, flags, [["readonly", "contig"]], order=order, buffersize=CHUNK) as chunks:  # type: ignore[call-overload]
        for some in chunks:
            for start in range(0, len(some), CHUNK):  # memory that needs no buffer is one piece
                yield some[start : start + CHUNK]


def in_row(array: Raw) -> Raw:
    """Returns the elements in row-major order, contiguous and aligned. They are copied only if necessary."""
    return np.require(array, requirements=["C", "A"]).reshape(-1)


def without_repeats(array: Raw) -> tuple[Raw, int]:
    """Returns the array with size 1 in each expanded dimension, and how often each of its elements counts."""
    if 0 not in array.strides:
        return array, 1
    is_repeated = [step == 0 and size > 1 for step, size in zip(array.strides, array.shape, strict=True)]
    kept = tuple(slice(0, 1) if is_one else slice(None) for is_one in is_repeated)
    repeats = prod(size for size, is_one in zip(array.shape, is_repeated, strict=True) if is_one)
    return array[kept], repeats


def index_in_whole(array: Raw, once: Raw, index: int, parts: int) -> int:
    """Returns the row-major index in `array` of an element of `once = without_repeats(array)`, that of its first copy.

    Args:
        parts: 2 if the last axis has the parts of complex numbers, else 1; an index is of an element.
    """
    dims = array.ndim - (parts == 2)
    return index_in_shape(array.shape[:dims], once.shape[:dims], index)


def index_in_shape(shape: Sequence[int], once: Sequence[int], index: int) -> int:
    """Returns the row-major index in `shape` of an element of `once`, which has size 1 in each expanded dimension."""
    if shape == once:
        return index
    whole_index = 0
    for size, at in zip(shape, np.unravel_index(index, once), strict=True):
        whole_index = whole_index * size + int(at)
    return whole_index
