"""Finds tensors of one recording that are parts of one of the other: of fused modules, and of batches."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import INPUT, OF_PARAMETERS, OUTPUT
from ..tables.columns import (
    Column,
    Partners,
    Rows,
    count_before,
    find_rows,
    number_codes,
    number_keys,
    rows_in_order,
    take,
)
from ..tables.run import RunTables
from ..tables.tensors import Sizes, widen
from .contract import Joined
from .modules import PlacePairs, Split
from .values import TRANSPOSED, is_transposed


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


def join_splits(a: RunTables, b: RunTables, splits: Sequence[Split], step: Rows) -> list[JoinedRows]:
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


def number_rows(a: RunTables, b: RunTables, step: Rows, outer: Partners) -> Partners:
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
    of_parts: RunTables, of_whole: RunTables, splits: Sequence[Split], calls: tuple[Rows, Rows]
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


def join_rows(of_parts: RunTables, of_whole: RunTables, rows: PartRows, *, whole_in_a: bool) -> JoinedRows:
    """Returns those of the parts whose sizes add up to their whole's in one dimension, and are equal in the others."""
    nth_key = rows.keys[0] * (int(rows.nth.max(initial=0)) + 1) + rows.nth
    keys = number_keys(rows.keys, (count_before(nth_key), count_before(rows.keys[1])))
    whole = find_rows(keys[1], keys[0])
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


_FORWARD = PHASES.index(FORWARD)


@dataclass(frozen=True)
class MicroBatches:
    """Several calls of a model in a step of one recording that are one call in the other."""

    count: int  # of each batch
    whole_in_a: bool
    models: tuple[int, int]  # its place in both


def find_micro_batches(a: RunTables, b: RunTables, places: PlacePairs, steps: Rows) -> MicroBatches | None:
    """Returns the micro-batches; None if both call their models as often in a step, or not on parts of one batch."""
    calls = a.calls
    outermost = calls.kept & (calls.parent < 0) & (calls.phase == _FORWARD) & (calls.place >= 0)
    for at in np.unique(calls.place[outermost]).tolist():
        there = int(places.partner[at])
        if there < 0:
            continue
        counts = _count_outermost(a, at, steps[:, 0]), _count_outermost(b, there, steps[:, 1])
        for whole_in_a, wholes, parts in ((False, counts[1], counts[0]), (True, counts[0], counts[1])):
            if not wholes.any() or wholes.sum() >= parts.sum():
                continue
            count = int(parts.sum() // wholes.sum())
            sides = ((b, there), (a, at)) if whole_in_a else ((a, at), (b, there))
            if (parts == wholes * count).all() and _are_parts(sides[0], sides[1], count):
                return MicroBatches(count, whole_in_a, (at, there))
    return None


def _count_outermost(side: RunTables, place: int, steps: Rows) -> Rows:
    calls = side.calls
    rows = calls.kept & (calls.place == place) & (calls.parent < 0) & (calls.phase == _FORWARD)
    found: Rows = np.searchsorted(np.sort(calls.step[rows]), np.stack([steps, steps + 1]))
    return np.asarray(found[1] - found[0], np.int64)


def _are_parts(side: tuple[RunTables, int], whole: tuple[RunTables, int], count: int) -> bool:
    """Returns whether what the first calls are given, or return, adds up to that of the first call of the whole."""
    for role in (INPUT, OUTPUT):
        parts, one = _find_batches(*side, role), _find_batches(*whole, role)
        if len(parts) >= count and len(one) and int(parts[:count].sum()) == int(one[0]):
            return True
    return False


def _find_batches(side: RunTables, place: int, role: str) -> Rows:
    """Returns the first dimensions of the first tensors of a role that each outermost call has, in order."""
    values = side.values
    kept = values.kept & (values.place == place) & values.is_of(role) & (values.call >= 0)
    rows = rows_in_order(kept, values.order)
    _, first = np.unique(values.call[rows], return_index=True)
    rows = rows[np.sort(first)]
    return values.sizes[rows, 0] if values.sizes.shape[1] else rows[:0]


@dataclass(frozen=True)
class Batched:
    """Which rows of one recording belong to micro-batches, or to the batch that has them as parts."""

    calls: Column
    ops: Column
    values: Column

    def leave_out(self, side: RunTables) -> RunTables:
        """Returns the recording without these ops and values."""
        ops = replace(side.ops, kept=side.ops.kept & ~self.ops)
        return replace(side, ops=ops, values=replace(side.values, kept=side.values.kept & ~self.values))


def find_batched(side: RunTables, place: int | None) -> Batched:
    """Returns the rows of a model that is called with micro-batches, and of what is done outside with its outputs."""
    calls, ops, values = side.calls, side.ops, side.values
    if place is None:
        return Batched(*(np.zeros(len(each.step), bool) for each in (calls, ops, values)))
    of_calls = np.asarray(calls.kept & (take(calls.place, calls.outermost) == place), bool)
    is_outside = (ops.call < 0) & (ops.phase != PHASES.index(OPTIMIZER))
    of_ops = np.asarray(is_outside | (take(of_calls, ops.call) > 0), bool)
    of_values = np.where(side.values.is_of_op, take(of_ops, values.op), take(of_calls, values.call)) > 0
    return Batched(of_calls, ops.kept & of_ops, values.kept & of_values)


def join_micro_batches(
    a: RunTables,
    b: RunTables,
    places: PlacePairs,
    step: Rows,
    found: MicroBatches,
    batched: tuple[Batched, Batched],
) -> JoinedRows:
    """Returns the tensors of micro-batches that are parts of those of the whole batch."""
    keys = _number_values(a, b, places, step, found)
    sides, batched = ((b, a), batched[::-1]) if found.whole_in_a else ((a, b), batched)
    keys = keys[::-1] if found.whole_in_a else keys
    parts, wholes = (
        np.flatnonzero(each.values & (side.values.call >= 0))
        for side, each in zip(sides, batched, strict=True)
    )
    part_calls = sides[0].values.call[parts]
    return join_rows(
        *sides,
        PartRows(
            parts,
            wholes,
            (keys[0][parts], keys[1][wholes]),
            sides[0].calls.outer[part_calls] % found.count,
            np.full(len(parts), found.count),
            np.zeros(len(parts), bool),
        ),
        whole_in_a=found.whole_in_a,
    )


def _number_values(
    a: RunTables, b: RunTables, places: PlacePairs, step: Rows, found: MicroBatches
) -> Partners:
    """Returns a number of what each row was measured of, where micro-batches have that of their batch."""
    of_a, of_b = a.values, b.values
    outer = take(a.calls.outer, of_a.call), take(b.calls.outer, of_b.call)
    outer = (outer[0], outer[1] // found.count) if found.whole_in_a else (outer[0] // found.count, outer[1])
    op = number_codes((a.ops.names, take(a.ops.name, of_a.op)), (b.ops.names, take(b.ops.name, of_b.op)))
    return number_keys(
        number_rows(a, b, step, outer),
        (take(places.partner, of_a.place), of_b.place),
        (np.where(of_a.is_of_op, op[0], -1), np.where(of_b.is_of_op, op[1], -1)),
        (
            np.where(of_a.is_of_op, take(a.ops.nth, of_a.op), -1),
            np.where(of_b.is_of_op, take(b.ops.nth, of_b.op), -1),
        ),
    )
