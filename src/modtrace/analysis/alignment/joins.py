"""Finds tensors of one recording that are parts of one of the other: along which dimension, and where."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from ...recording.role import OF_PARAMETERS
from ..tables.columns import Column, Partners, RowFinder, Rows, count_before, number_codes, number_keys, take
from .contract import Joined
from .modules import Split
from .permutations import TRANSPOSED, is_transposed
from .sides import Side
from .sizes import Sizes, widen


class PartRows(NamedTuple):
    """Rows of `values` that are parts, and rows of the other recording that may be their wholes."""

    parts: Rows
    wholes: Rows
    keys: tuple[Rows, Rows]  # of parts, of wholes: equal where the parts are of the whole
    nth: Rows  # of each part: which of the parts it is
    total: Rows  # of each part: how many there must be
    transposed: Column  # of each part: whether it is a matrix with the dimensions in the other order


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """The parts that were joined, and the pairs of those that are one tensor: what all parts are given."""

    joined: Joined
    pairs: Rows  # (n, 2), of a and b


def join_splits(a: Side, b: Side, splits: Sequence[Split], step: Rows) -> list[JoinedRows]:
    """Returns the parts of modules that one of the two recordings has split.

    Args:
        a: a recording.
        b: the other one.
        splits: the split modules.
        step: of each row of `values` of `a`: the step of `b`.
    """
    outer = take(a.calls.outer, a.values.call), take(b.calls.outer, b.values.call)
    calls = number_rows(a, b, step, outer)
    found = []
    for whole_in_a in (True, False):
        chosen = [each for each in splits if each.whole_in_a == whole_in_a]
        if chosen:
            sides = (b, a) if whole_in_a else (a, b)
            rows = _find_split_rows(*sides, chosen, calls[::-1] if whole_in_a else calls)
            found.append(join_rows(*sides, rows, whole_in_a=whole_in_a))
    return found


def number_rows(a: Side, b: Side, step: Rows, outer: Partners) -> Partners:
    """Returns of each row of `values` a number of its step, phase, call within its step, role and slot.

    Args:
        a: a recording.
        b: the other one.
        step: of each row of `a`: the step of `b`.
        outer: of each row of both: the number of its outermost call in its step.
    """
    of_a, of_b = a.values, b.values
    return number_keys(
        (step, of_b.step),
        (of_a.phase, of_b.phase),
        outer,
        (take(a.calls.inner, of_a.call), take(b.calls.inner, of_b.call)),
        number_codes((of_a.roles, of_a.role), (of_b.roles, of_b.role)),
        number_codes((of_a.slots, of_a.slot), (of_b.slots, of_b.slot)),
    )


def _find_split_rows(
    of_parts: Side, of_whole: Side, splits: Sequence[Split], calls: tuple[Rows, Rows]
) -> PartRows:
    split = np.full(len(of_parts.names), -1, np.int64)
    nth, transposed = split.copy(), np.zeros(len(split), bool)
    whole = np.full(len(of_whole.names), -1, np.int64)
    for number, each in enumerate(splits):
        whole[each.whole] = number
        for at, part in enumerate(each.parts):
            split[part], nth[part] = number, at
            transposed[part] = is_transposed(of_whole.names[each.whole].type, of_parts.names[part].type)
    values, others = of_parts.values, of_whole.values
    parts = np.flatnonzero(values.kept & (take(split, values.place) >= 0) & ~values.is_of_op)
    wholes = np.flatnonzero(others.kept & (take(whole, others.place) >= 0) & ~others.is_of_op)
    place = values.place[parts]
    keys = number_keys((split[place], whole[others.place[wholes]]), (calls[0][parts], calls[1][wholes]))
    counts = np.array([len(each.parts) for each in splits], np.int64)
    is_weight = values.is_of(*OF_PARAMETERS, rows=parts)
    return PartRows(parts, wholes, keys, nth[place], counts[split[place]], transposed[place] & is_weight)


def join_rows(of_parts: Side, of_whole: Side, rows: PartRows, *, whole_in_a: bool) -> JoinedRows:
    """Returns those of the parts whose sizes add up to their whole's in one dimension, and are equal in the others."""
    nth_key = rows.keys[0] * (int(rows.nth.max(initial=0)) + 1) + rows.nth
    keys = number_keys(rows.keys, (count_before(nth_key), count_before(rows.keys[1])))
    whole = RowFinder(keys[1])(keys[0])
    order = np.lexsort((rows.nth, whole))
    order = order[whole[order] >= 0]
    group = np.unique(whole[order], return_inverse=True)[1].reshape(-1)
    order = order[np.bincount(group)[group] == rows.total[order]] if len(order) else order
    distinct, group = np.unique(whole[order], return_inverse=True)
    group = group.reshape(-1)
    part, whole_rows = rows.parts[order], rows.wholes[whole[order]]
    given, wanted = widen(of_parts.values.sizes[part], of_whole.values.sizes[whole_rows])
    is_transposed_part = rows.transposed[order] & (given[:, 1] >= 0) & (given[:, 2:] < 0).all(axis=1)
    given[is_transposed_part, :2] = given[is_transposed_part, 1::-1]
    dimension = _find_dimension(given, wanted, group, len(distinct))[group]
    is_joined = dimension >= 0
    first = np.append(True, np.diff(group) != 0)[: len(group)]
    sizes = np.where(is_joined, given[np.arange(len(group)), dimension], 0)
    before = np.cumsum(sizes) - sizes
    same = first & ~is_joined & (given == wanted).all(axis=1)
    pairs = np.stack([part[same], whole_rows[same]], axis=1)
    joined = Joined(
        part=part[is_joined],
        whole=whole_rows[is_joined],
        whole_in_a=np.full(int(is_joined.sum()), whole_in_a),
        dimension=dimension[is_joined],
        offset=(before - np.maximum.accumulate(np.where(first, before, 0)))[is_joined],
        permuted=np.where(is_transposed_part, TRANSPOSED, -1)[is_joined],
    )
    return JoinedRows(joined, pairs[:, ::-1] if whole_in_a else pairs)


def _find_dimension(given: Sizes, wanted: Sizes, group: Rows, groups: int) -> Rows:
    """Returns for each group of parts the dimension in which they follow each other; -1 if there is none."""
    total, whole = np.zeros((groups, given.shape[1]), np.int64), np.zeros((groups, given.shape[1]), np.int64)
    differ = np.zeros((groups, given.shape[1]), bool)
    np.add.at(total, group, given)
    np.logical_or.at(differ, group, given != wanted)
    whole[group] = wanted
    others = differ.sum(axis=1, keepdims=True) - differ
    fits = (total == whole) & (whole >= 0) & (others == 0)
    return np.where(fits.any(axis=1), fits.argmax(axis=1), -1)


def collect(found: Sequence[JoinedRows]) -> Joined:
    """Returns all joined parts."""
    none = np.empty(0, np.int64)
    columns = {
        each.name: [none, *(getattr(one.joined, each.name) for one in found)] for each in fields(Joined)
    }
    joined = {name: np.concatenate(each) for name, each in columns.items()}
    return Joined(**joined | {"whole_in_a": joined["whole_in_a"].astype(bool)})
