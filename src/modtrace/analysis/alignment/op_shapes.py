"""Numbers the shapes and dtypes of what ops returned."""

from typing import Any

import numpy as np

from ..step.calls import RowFinder, Rows, column_of
from ..step.ops import dictionary_codes
from .keys import number_texts, take
from .sides import Side
from .sizes import Sizes, number_sizes, read_sizes


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
