"""Puts the pairs of two recordings, and of recomputes and their forwards, in one order of time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy
from ..tables.columns import Column, Rows
from .answer import FIRST
from .inherited import order_by_use
from .pairs import Compared


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedPairs:
    """All pairs in the order of use."""

    parts: Sequence[Compared]  # the pairs of the two recordings, and then those of recomputes
    order: Rows  # of the pairs of all parts one after the other

    def collect(self, columns: Sequence[Column]) -> Column:
        """Returns a column of all pairs from that of each part."""
        return np.concatenate(columns)[self.order]

    def sort_tables(self, tables: Sequence[pa.Table]) -> pa.Table:
        """Returns the table of all pairs from that of each part."""
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables).take(from_numpy(self.order))

    def locate(self, at: int) -> tuple[int, int]:
        """Returns the index of the part to which a pair belongs, and the place of the pair there."""
        place = int(self.order[at])
        begins = np.cumsum([0, *(len(each.errors) for each in self.parts)])
        number = int(np.searchsorted(begins, place, side="right")) - 1
        return number, place - int(begins[number])


def put_in_order(parts: Sequence[Compared]) -> MergedPairs:
    """Returns the pairs of all parts in one order. A recompute comes before what its recording used next."""
    pairs, *recomputes = parts
    places = [np.arange(len(pairs.errors)), *(_find_next(pairs, each) for each in recomputes)]
    number = np.repeat(np.arange(len(parts)), [len(each) for each in places])
    return MergedPairs(parts=parts, order=np.lexsort((-number, np.concatenate(places))))


def _find_next(pairs: Compared, recomputed: Compared) -> Rows:
    """Returns of each recomputed tensor which pair its recording used next."""
    rows = (pairs.a if recomputed.recompute_of == FIRST else pairs.b).rows
    every = np.concatenate([rows, recomputed.a.rows])
    order = order_by_use(recomputed.other, every)
    is_pair = order < len(rows)
    behind = np.append(order[is_pair], len(rows))
    number = np.cumsum(is_pair)  # of the pairs up to here
    found = np.empty(len(every), np.int64)
    found[order] = behind[number]
    return found[len(rows) :]
