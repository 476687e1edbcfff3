"""Numbers what tensors hold, so that two recordings have the same number for the same."""

from collections.abc import Sequence

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.statistics.moments import Numbers
from ..tables.columns import Partners, Rows, number_keys
from .sides import Side, ValueSide
from .sizes import number_sizes, sort_sizes

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
