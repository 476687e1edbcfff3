"""Compares recomputes with their forwards, and orders their pairs and those of the two recordings by time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Column, Rows
from ..tables.measured import read_measured
from ..tables.placement import ModuleName
from .answer import FIRST
from .errors import find_errors
from .inherited import find_inherited, order_by_use
from .noise import assume_noise, find_cancellation, give_noise
from .pairs import Compared, ComparedSide, is_uninitialized
from .ranking import rank


def compare_recomputed(
    run: ComparedSide,
    pairs: Rows,
    recompute_of: str,
    modules: Mapping[ModuleName, ModuleName],
    tolerance: float | None,
) -> tuple[Compared, Numbers]:
    """Returns what is found out of the recomputed tensors, and what every row of `values` has inherited of that.

    Args:
        run: the recording.
        pairs: a row of `values` of a recompute, and that of its forward.
        recompute_of: which of the two recordings it is.
        modules: the names by which modules are told; of those that are not among them it is their own.
        tolerance: the relative error that is noise; None: rounding is assumed.
    """
    side = run.side
    pairs = pairs[~is_uninitialized(run, pairs[:, 0])]
    pairs = pairs[order_by_use(side, pairs[:, 0])]
    rows = pairs[:, 0]
    again, first = read_measured(side.data, rows), read_measured(side.data, pairs[:, 1])
    errors = find_errors(first, again)
    every = np.arange(len(side.values.step))
    every = every[order_by_use(side, every)]
    of_row = np.zeros(len(every))  # all other tensors are themselves
    of_row[rows] = errors.error
    inherited = find_inherited(side, every, of_row[every])
    given = np.empty(len(every))
    given[every] = inherited.error
    place = np.argsort(every)[rows]
    if tolerance is None:
        noise = assume_noise(first, again, find_cancellation(side, rows, again))
    else:
        noise = give_noise(tolerance, len(rows))
    mine = replace(inherited.take(place), through=np.full(len(rows), -1))
    return Compared(
        side=replace(side, names=tuple(modules.get(each, each) for each in side.names)),
        other=side,
        modules={},
        partner=np.full(len(side.ops.name), -1, np.int64),
        alone=(none_alone := np.zeros(len(side.ops.name) + 1, bool)),
        alone_b=none_alone,
        a=again,
        b=first,
        errors=errors,
        inherited=mine,
        noise=noise,
        ranking=rank(errors, mine, noise, np.ones(len(rows), bool)),
        misfits=pairs[:0],
        recompute_of=recompute_of,
    ), given


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedPairs:
    """All pairs in the order of use."""

    parts: Sequence[Compared]  # the pairs of the two recordings, and then those of recomputes
    order: Rows  # of the pairs of all parts one after the other

    def collect(self, columns: Sequence[Column]) -> Column:
        """Returns a column of all pairs from that of each part."""
        return np.concatenate(columns)[self.order]

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
