"""Reads shapes as a matrix, a shape in each row."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...recording.arrow.arrays import to_numpy
from ..tables.columns import Rows, number_keys, ranges

Sizes = npt.NDArray[np.int64]  # (rows, dimensions); -1 behind the end of a shape


def read_sizes(column: pa.ChunkedArray) -> Sizes:
    """Returns a column of shapes as a matrix."""
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):  # of no chunk
        return np.empty((0, 0), np.int64)
    offsets = to_numpy(lists.offsets)
    flat = to_numpy(lists.values)
    counts = np.diff(offsets)
    sizes = np.full((len(counts), int(counts.max(initial=0))), -1, np.int64)
    row, dimension = np.repeat(np.arange(len(counts)), counts), ranges(np.zeros_like(counts), counts)
    sizes[row, dimension] = flat[ranges(offsets[:-1], counts)]
    return sizes


def number_sizes(one: Sizes, other: Sizes) -> tuple[Rows, Rows]:
    """Returns a number for each shape of two matrices. Equal shapes have equal numbers."""
    wide, other_wide = widen(one, other)
    return number_keys(*((wide[:, at], other_wide[:, at]) for at in range(wide.shape[1])))


def widen(one: Sizes, other: Sizes) -> tuple[Sizes, Sizes]:
    """Returns two matrices of shapes with as many columns each, at least two."""
    width = max(one.shape[1], other.shape[1], 2)
    wide, other_wide = (
        np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in (one, other)
    )
    return wide, other_wide


def count_elements(sizes: Sizes) -> Sizes:
    """Returns a column with the number of elements of each shape."""
    counts: Sizes = np.where(sizes < 0, 1, sizes).prod(axis=1, keepdims=True, dtype=np.int64)
    return counts


def sort_sizes(sizes: Sizes) -> Sizes:
    """Returns each shape with its dimensions in descending order."""
    return -np.sort(-sizes, axis=1)
