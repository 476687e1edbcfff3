"""Reads the tensors of a recording as columns."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy, to_numpy
from .columns import Bools, Column, Rows, column_of, dictionary_codes, number_keys, ranges

#: The beginnings of the names of integer dtypes.
_WHOLE = ("int", "uint", "bool")


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

    @cached_property
    def site_id(self) -> Column:
        """The id of the site of each tensor that no op made, or that belongs to the model; -1 for none."""
        return column_of(self.table, "site_id")

    @cached_property
    def producer_op(self) -> Column:
        """The id of the op that made each tensor, whether it is among the requested ops or not; -1 for none."""
        return column_of(self.table, "producer_op")

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each tensor."""
        return [tuple(shape) for shape in self.table["shape"].to_pylist()]

    @cached_property
    def shape_texts(self) -> list[str]:
        """The shape of each tensor as a text."""
        return [shape_text(shape) for shape in self.shapes]

    def read_sizes(self, rows: Rows | None = None) -> Sizes:
        """Returns the shape of each tensor, or of some, as rows of a matrix, which is too large to be cached."""
        shapes = self.table["shape"]
        return read_sizes(shapes if rows is None else shapes.take(from_numpy(rows)))

    @cached_property
    def numel(self) -> Column:
        """The number of elements of each tensor."""
        return count_elements(self.read_sizes()).reshape(-1)

    @cached_property
    def storage(self) -> Column:
        """A number of the memory that each tensor lies in; -1 where it is not known."""
        return column_of(self.table, "storage")

    @cached_property
    def version(self) -> Column:
        """The number of writes to each tensor's memory before the tensor was seen."""
        return column_of(self.table, "version")

    @cached_property
    def dtype(self) -> tuple[Column, tuple[str, ...]]:
        """The dtype of each tensor as a code, and the names of the codes, such as `float32`."""
        return dictionary_codes(self.table["dtype"])

    @cached_property
    def dtypes(self) -> list[str]:
        """The dtype of each tensor, such as `float32`."""
        return list(self.table["dtype"].to_pylist())

    @cached_property
    def is_whole(self) -> Bools:
        """A mask of the tensors that hold integers or booleans."""
        code, dtypes = self.dtype
        return np.array([*(name.startswith(_WHOLE) for name in dtypes), True])[code]


def shape_text(shape: Iterable[int]) -> str:
    """Returns the sizes of a tensor as a text that is easily typed: `64x32`, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def read_sizes(column: pa.ChunkedArray) -> Sizes:
    """Returns a column of shapes as a matrix with a row for each shape."""
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):  # a column without chunks combines to a chunked array
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
