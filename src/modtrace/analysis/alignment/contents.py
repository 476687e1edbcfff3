"""Numbers the shapes of tensors, and what they hold, so that two recordings have the same number for the same."""

from collections.abc import Sequence

import numpy as np

from ..tables.columns import Partners, Rows, number_codes, number_keys, take
from ..tables.run import RunTables
from ..tables.tensors import number_sizes, sort_sizes

_EXTREMES = ("min", "max")


def have_equal_extremes(a: RunTables, b: RunTables, rows: Rows, rows_b: Rows) -> bool:
    """Returns whether all pairs of rows of `values` hold the same, as `number_contents` tells; or nothing is known."""
    pairs = [
        (getattr(a.values.stats, name)[rows], getattr(b.values.stats, name)[rows_b]) for name in _EXTREMES
    ]
    return all(np.array_equal(one, other, equal_nan=True) for one, other in pairs)


def number_contents(a: RunTables, b: RunTables, rows: Sequence[Rows]) -> Partners:
    """Returns a number of what each of some rows of `values` holds, by its sizes, in any order, and its extremes.

    It is -1 for all other rows and for constants.
    """
    sides = a.values, b.values
    found = np.full(len(a.values.step), -1, np.int64), np.full(len(b.values.step), -1, np.int64)
    least, largest = (
        [getattr(each.stats, name)[of] for each, of in zip(sides, rows, strict=True)] for name in _EXTREMES
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


def number_shapes(a: RunTables, b: RunTables) -> tuple[Partners, Partners, Partners]:
    """Returns numbers of shape, count of elements and dtype of what the ops of both returned first; -1 for none."""
    tensors = [side.flow.tensors for side in (a, b)]
    rows = [np.where(side.ops.kept, side.flow.first_returned, -1) for side in (a, b)]
    shapes = number_sizes(*(each.sizes for each in tensors))
    counts = number_keys((tensors[0].numel, tensors[1].numel))
    dtypes = number_codes(*(each.dtype[::-1] for each in tensors))
    one, two, three = (
        (take(numbers[0], rows[0]), take(numbers[1], rows[1])) for numbers in (shapes, counts, dtypes)
    )
    return one, two, three
