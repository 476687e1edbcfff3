"""Reads the tensors of a recording as columns."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import DamagedRecordingError
from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.suggestions import count_of
from .columns import Bools, Column, Rows, column_of, dictionary_codes, lazy_column, number_keys, ranges

#: The beginnings of the names of integer dtypes.
_WHOLE = ("int", "uint", "bool")

#: The beginnings of the names of real and complex dtypes.
_REAL = ("float", "bfloat", "complex")

#: The most columns of a matrix of shapes.
_MOST_COLUMNS = 16

Sizes = npt.NDArray[np.int64]  # a row for each shape; columns behind its last dimension hold -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensors:
    """Tensors that ops or calls read or return."""

    tensor_id: Column
    producer: Rows  # the op (in a graph, the node) that made each tensor; -1 for none
    slot: Column  # the slot at which the op returned each tensor, as a code of `slots`
    table: pa.Table  # a row of the table `tensors` for each tensor
    slots: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tensor_id)

    #: The id of the site of each tensor that no op made, or that belongs to the model; -1 for none.
    site_id = lazy_column("site_id")
    #: The id of the op that made each tensor, whether it is among the requested ops or not; -1 for none.
    producer_op = lazy_column("producer_op")

    @cached_property
    def shape(self) -> tuple[Rows, list[tuple[int, ...]]]:
        """The shape of each tensor as a code, and the shapes that the codes stand for."""
        counts, sizes = _read_lists(self.table["shape"])
        codes, shapes, starts = (
            np.empty(len(counts), np.int64),
            list[tuple[int, ...]](),
            np.cumsum(counts) - counts,
        )
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            distinct, code = np.unique(
                sizes[starts[rows, None] + np.arange(count)], axis=0, return_inverse=True
            )
            codes[rows] = code.reshape(-1) + len(shapes)
            shapes += map(tuple, distinct.tolist())
        return codes, shapes

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each tensor."""
        code, shapes = self.shape
        return [shapes[number] for number in code.tolist()]

    def read_sizes(self, rows: Rows | None = None) -> Sizes:
        """Returns the shape of each tensor, or of some, as rows of a matrix, which is too large to be cached."""
        shapes = self.table["shape"]
        return read_sizes(shapes if rows is None else shapes.take(from_numpy(rows)))

    @cached_property
    def numel(self) -> Column:
        """The number of elements of each tensor."""
        counts, sizes = _read_lists(self.table["shape"])
        return _reduce(np.multiply, sizes, counts, 1)

    @cached_property
    def bounds(self) -> tuple[Rows, Rows]:
        """The first element of its storage that each tensor spans, and the one behind the last.

        A tensor without storage, such as a sparse one, spans the element 0.
        """
        is_known = self.storage >= 0
        table = self.table if is_known.all() else self.table.filter(from_numpy(is_known))
        (counts, sizes), (of_strides, strides) = (_read_lists(table[name]) for name in ("shape", "stride"))
        for row in np.flatnonzero(counts != of_strides)[:1].tolist():
            count = count_of(int(of_strides[row]), "stride")
            raise DamagedRecordingError(
                f"tensors.stride: a tensor of {count_of(int(counts[row]), 'size')} has {count}. "
                "Copy the recording again."
            )
        extent = _reduce(np.add, (sizes - 1) * strides, counts, 1)
        start, stop = np.zeros(len(self), np.int64), np.ones(len(self), np.int64)
        start[is_known] = column_of(table, "offset")
        stop[is_known] = start[is_known] + np.where(self.numel[is_known] > 0, extent, 0)
        return start, stop

    @cached_property
    def memory(self) -> Column:
        """A number of the memory that each tensor lies in; where none is known, one that is the tensor's alone."""
        return np.where(self.storage >= 0, self.storage, -1 - np.arange(len(self)))

    #: A number of the memory that each tensor lies in; -1 where it is not known.
    storage = lazy_column("storage")
    #: The number of writes to each tensor's memory before the tensor was seen.
    version = lazy_column("version")

    @cached_property
    def known_version(self) -> Column:
        """The version of each tensor's memory; 0 where none is known."""
        return np.maximum(self.version, 0)

    @cached_property
    def dtype(self) -> tuple[Column, tuple[str, ...]]:
        """The dtype of each tensor as a code, and the names of the codes, such as `float32`."""
        return dictionary_codes(self.table["dtype"])

    @cached_property
    def dtypes(self) -> list[str]:
        """The dtype of each tensor, such as `float32`."""
        code, dtypes = self.dtype
        names: list[Any] = [*dtypes, None]
        return [names[number] for number in code.tolist()]

    @cached_property
    def is_float(self) -> Bools:
        """A mask of the tensors that hold real or complex numbers, as far as their dtypes are known."""
        code, dtypes = self.dtype
        return np.array([*(name.startswith(_REAL) for name in dtypes), True])[code]

    @cached_property
    def holds_numbers(self) -> Bools:
        """A mask of the tensors that have elements, and a dtype that can hold NaN."""
        return np.asarray(self.is_float & (self.numel != 0))

    @cached_property
    def is_whole(self) -> Bools:
        """A mask of the tensors that hold integers or booleans."""
        code, dtypes = self.dtype
        return np.array([*(name.startswith(_WHOLE) for name in dtypes), True])[code]


def shape_text(shape: Iterable[int]) -> str:
    """Returns the sizes of a tensor as a text that is easily typed: `64x32`, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def read_sizes(column: pa.ChunkedArray) -> Sizes:
    """Returns a column of shapes as a matrix with a row for each shape.

    A shape with more than `_MOST_COLUMNS` dimensions has the product of the others in the last column, as one long
    shape would else widen the matrix for all.
    """
    counts, flat = _read_lists(column)
    starts, kept = np.cumsum(counts) - counts, np.minimum(counts, _MOST_COLUMNS)
    sizes = np.full((len(counts), int(kept.max(initial=0))), -1, np.int64)
    row, dimension = np.repeat(np.arange(len(counts)), kept), ranges(np.zeros_like(kept), kept)
    sizes[row, dimension] = flat[ranges(starts, kept)]
    for long in np.flatnonzero(counts > _MOST_COLUMNS).tolist():
        sizes[long, -1] = flat[starts[long] + _MOST_COLUMNS - 1 : starts[long] + counts[long]].prod()
    return sizes


def _read_lists(column: pa.ChunkedArray) -> tuple[Rows, Rows]:
    """Returns the lengths of the lists in a column, and the numbers of all lists, concatenated."""
    counts, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for chunk in column.chunks:
        offsets = to_numpy(chunk.offsets)
        counts.append(np.diff(offsets).astype(np.int64))
        numbers.append(to_numpy(chunk.values)[offsets[:1].sum() : offsets[-1:].sum()])
    return np.concatenate(counts), np.concatenate(numbers)


def _reduce(join: np.ufunc, numbers: Rows, counts: Rows, first: int) -> Rows:
    """Returns `first` joined with the numbers of each list, of which `counts` are the lengths."""
    reduced, filled = np.full(len(counts), first, np.int64), np.flatnonzero(counts)
    if len(filled):
        starts = (np.cumsum(counts) - counts)[filled]
        reduced[filled] = join(reduced[filled], join.reduceat(numbers, starts))
    return reduced


def number_sizes(one: Sizes, other: Sizes) -> tuple[Rows, Rows]:
    """Returns a number for each shape of two matrices. Equal shapes have equal numbers."""
    wide, other_wide = widen(one, other)
    return number_keys(*((wide[:, at], other_wide[:, at]) for at in range(wide.shape[1])))


def widen(one: Sizes, other: Sizes) -> tuple[Sizes, Sizes]:
    """Returns two matrices of shapes with equal numbers of columns, at least two."""
    width = max(one.shape[1], other.shape[1], 2)
    wide, other_wide = (
        np.pad(shapes, ((0, 0), (0, width - shapes.shape[1])), constant_values=-1) for shapes in (one, other)
    )
    return wide, other_wide


def count_elements(sizes: Sizes) -> Sizes:
    """Returns a column with the product of each shape's dimensions."""
    counts: Sizes = np.where(sizes < 0, 1, sizes).prod(axis=1, keepdims=True, dtype=np.int64)
    return counts


def sort_sizes(sizes: Sizes) -> Sizes:
    """Returns the shapes with the dimensions of each in descending order."""
    return -np.sort(-sizes, axis=1)
