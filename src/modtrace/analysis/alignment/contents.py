"""Numbers the shapes of tensors, and what they hold, so that two recordings have the same number for the same."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.statistics.moments import Numbers
from ..tables.columns import Column, Partners, Rows, dictionary_codes, number_codes, number_keys, take
from ..tables.tensors import Sizes, count_elements, number_sizes, read_sizes, sort_sizes
from .sides import Side, ValueSide

_EXTREMES = ("min", "max")


def have_equal_extremes(a: Side, b: Side, rows: Rows, rows_b: Rows) -> bool:
    """Returns whether all pairs of rows of `values` hold the same, as `number_contents` tells; or nothing is known."""
    pairs = [(_read(a.values, name)[rows], _read(b.values, name)[rows_b]) for name in _EXTREMES]
    return all(np.array_equal(one, other, equal_nan=True) for one, other in pairs)


def _read(values: ValueSide, name: str) -> Numbers:
    return to_numpy(values.table[name], null=np.nan)


def number_contents(a: Side, b: Side, rows: Sequence[Rows]) -> Partners:
    """Returns a number of what each of some rows of `values` holds, by its sizes, in any order, and its extremes.

    It is -1 for all other rows and for constants.
    """
    sides = a.values, b.values
    found = np.full(len(a.values.step), -1, np.int64), np.full(len(b.values.step), -1, np.int64)
    least, largest = (
        [_read(each, name)[of] for each, of in zip(sides, rows, strict=True)] for name in _EXTREMES
    )
    sizes = number_sizes(*(sort_sizes(each.sizes[of]) for each, of in zip(sides, rows, strict=True)))
    split = len(rows[0])
    codes = [
        np.unique(np.concatenate(extremes), return_inverse=True)[1].reshape(-1)
        for extremes in (least, largest)
    ]
    numbers = number_keys(sizes, *((each[:split], each[split:]) for each in codes))
    for into, of, number, low, high in zip(found, rows, numbers, least, largest, strict=True):
        into[of] = np.where(low < high, number, -1)
    return found


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
