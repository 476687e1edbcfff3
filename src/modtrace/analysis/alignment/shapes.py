"""Reads shapes and dtypes of measured tensors and of what ops returned, as columns."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..step.calls import RowFinder, Rows, column_of
from ..step.ops import dictionary_codes
from .keys import number_keys, number_texts, take
from .sides import Side

Sizes = npt.NDArray[np.int64]  # (rows, dimensions): a shape in each row, -1 behind its end


def read_sizes(column: pa.ChunkedArray) -> Sizes:
    """Returns a column of shapes as a matrix."""
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):  # of no chunk
        return np.empty((0, 0), np.int64)
    offsets = np.asarray(lists.offsets)
    flat = np.asarray(lists.values)
    counts = np.diff(offsets)
    sizes = np.full((len(counts), int(counts.max(initial=0))), -1, np.int64)
    at = np.arange(int(counts.sum()))
    within = at - np.repeat(np.cumsum(counts) - counts, counts)
    sizes[np.repeat(np.arange(len(counts)), counts), within] = flat[np.repeat(offsets[:-1], counts) + within]
    return sizes


def number_sizes(one: Sizes, other: Sizes) -> tuple[Rows, Rows]:
    """Returns a number for each shape of two matrices. Equal shapes have equal numbers."""
    width = max(one.shape[1], other.shape[1], 1)
    wide = [
        np.concatenate([each, np.full((len(each), width - each.shape[1]), -1, np.int64)], axis=1)
        for each in (one, other)
    ]
    return number_keys(*((wide[0][:, at], wide[1][:, at]) for at in range(width)))


def number_shapes(a: Side, b: Side) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows]]:
    """Returns numbers of the shapes and of the dtypes of what the ops of both returned first; -1 for none."""
    outputs = [_read_outputs(side) for side in (a, b)]
    shapes = number_sizes(*(sizes for sizes, _, _, _ in outputs))
    dtypes = number_texts(*(names for _, _, names, _ in outputs))
    rows = [row for _, _, _, row in outputs]
    codes = [take(number, each[1]) for number, each in zip(dtypes, outputs, strict=True)]
    return (take(shapes[0], rows[0]), take(shapes[1], rows[1])), (
        take(codes[0], rows[0]),
        take(codes[1], rows[1]),
    )


def _read_outputs(side: Side) -> tuple[Sizes, Any, tuple[str, ...], Rows]:
    """Returns shapes, dtypes as codes, their names, and for each op the row of the first tensor that it returned."""
    table = side.data.table("tensors")
    producer = column_of(table, "producer_op")
    rows = np.flatnonzero(np.isin(producer, column_of(side.data.table("ops"), "op_id")[side.ops.kept]))
    table = table.select(["shape", "dtype"]).take(rows)
    distinct, first = np.unique(producer[rows], return_index=True)
    of_op = take(first, RowFinder(distinct)(column_of(side.data.table("ops"), "op_id")))
    dtype, names = dictionary_codes(table["dtype"])
    return read_sizes(table["shape"]), dtype, names, of_op
