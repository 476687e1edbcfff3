"""Numbers the shapes and dtypes of what ops returned."""

from typing import NamedTuple

import numpy as np

from ...recording.arrow.arrays import from_numpy
from ..tables.columns import Column, Partners, Rows, dictionary_codes, number_codes, take
from .sides import Side
from .sizes import Sizes, count_elements, number_sizes, read_sizes


def number_shapes(a: Side, b: Side) -> tuple[Partners, Partners, Partners]:
    """Returns numbers of shape, count of elements and dtype of what the ops of both returned first; -1 for none."""
    outputs = _read_outputs(a), _read_outputs(b)
    shapes = number_sizes(outputs[0].sizes, outputs[1].sizes)
    counts = number_sizes(count_elements(outputs[0].sizes), count_elements(outputs[1].sizes))
    dtypes = number_codes(*((each.dtypes, each.dtype) for each in outputs))
    rows = outputs[0].of_op, outputs[1].of_op
    one, two, three = (
        (take(numbers[0], rows[0]), take(numbers[1], rows[1])) for numbers in (shapes, counts, dtypes)
    )
    return one, two, three


class _Outputs(NamedTuple):
    """The tensors that ops returned."""

    sizes: Sizes
    dtype: Column  # codes of `dtypes`
    dtypes: tuple[str, ...]
    of_op: Rows  # of each op: the first that it returned


def _read_outputs(side: Side) -> _Outputs:
    of_op = np.where(side.ops.kept, side.flow.first_returned, -1)
    is_kept = of_op >= 0
    table = side.flow.tensors.table.select(["shape", "dtype"]).take(from_numpy(of_op[is_kept]))
    of_op[is_kept] = np.arange(table.num_rows)
    dtype, names = dictionary_codes(table["dtype"])
    return _Outputs(read_sizes(table["shape"]), dtype, names, of_op)
