"""Finds tensors of one recording that are parts of a tensor of the other, as modules are fused or batches split."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    join_columns,
    number_codes,
    number_keys,
    rows_in_order,
    take,
)
from ..tables.run import RunTables
from ..tables.tensors import Sizes, widen
from .both import Runs, for_both, swap
from .contract import Joined
from .modules import PlacePairs, Split
from .values import TRANSPOSED, is_transposed


class PartRows(NamedTuple):
    """Rows of `values` that may be parts, and rows of the other recording that may be their wholes."""

    parts: Rows
    wholes: Rows
    keys: tuple[Rows, Rows]  # a key for each part and for each whole; parts have the key of their whole
    nth: Rows  # for each part, its index among the parts of its whole
    total: Rows  # for each part, the number of parts that its whole must have
    transposed: Column  # for each part, whether it is a transposed matrix


#: The joined parts, and pairs (n, 2) of rows of a and b that are one tensor, which the whole and all parts are given.
_JoinedRows = tuple[Joined, Rows]


def join_splits(runs: Runs, splits: Sequence[Split], step: Partners) -> list[_JoinedRows]:
    """Returns the parts of the modules that one of the two recordings has split.

    Args:
        runs: the two recordings.
        splits: the split modules.
        step: for each row of `values` of both recordings, its step as the second recording numbers it.
    """
    calls = number_rows(runs, step, for_both(lambda run: take(run.calls.outer, run.values.call), runs))
    groups = []
    for whole_in_a in (True, False):
        chosen = [split for split in splits if split.whole_in_a == whole_in_a]
        if chosen:  # the functions below take the recording with the parts first
            sides = swap(runs, is_swapped=whole_in_a)
            rows = _find_split_rows(sides, chosen, swap(calls, is_swapped=whole_in_a))
            groups.append(join_rows(sides, rows, whole_in_a=whole_in_a))
    return groups


def number_rows(runs: Runs, step: Partners, outer: Partners) -> Partners:
    """Returns for each row of `values` a number of its step, phase, call within its step, role and slot.

    Args:
        runs: the two recordings.
        step: for each row of `values` of both recordings, its step as the second recording numbers it.
        outer: for each row of `values` of both recordings, the number of its outermost call in its step.
    """
    one, other = runs[0].values, runs[1].values
    return number_keys(
        step,
        (one.phase, other.phase),
        outer,
        for_both(lambda run: take(run.calls.inner, run.values.call), runs),
        number_codes((one.roles, one.role), (other.roles, other.role)),
        number_codes((one.slots, one.slot), (other.slots, other.slot)),
    )


def _find_split_rows(runs: Runs, splits: Sequence[Split], calls: Partners) -> PartRows:
    of_parts, of_whole = runs
    split = np.full(len(of_parts.names), -1, np.int64)
    nth, transposed = split.copy(), np.zeros(len(split), bool)
    whole = np.full(len(of_whole.names), -1, np.int64)
    for number, (whole_place, _, places) in enumerate(splits):
        whole[whole_place] = number
        split[[*places]], nth[[*places]] = number, np.arange(len(places))
        types = [of_parts.names[place].type for place in places]
        transposed[[*places]] = [is_transposed(of_whole.names[whole_place].type, name) for name in types]
    values, others = of_parts.values, of_whole.values
    parts = np.flatnonzero(values.kept & (take(split, values.place) >= 0) & ~values.is_of_op)
    wholes = np.flatnonzero(others.kept & (take(whole, others.place) >= 0) & ~others.is_of_op)
    place = values.place[parts]
    keys = number_keys((split[place], whole[others.place[wholes]]), (calls[0][parts], calls[1][wholes]))
    counts = np.array([len(known.parts) for known in splits], np.int64)
    is_weight = values.is_of(*OF_PARAMETERS, rows=parts)
    return PartRows(parts, wholes, keys, nth[place], counts[split[place]], transposed[place] & is_weight)


def join_rows(runs: Runs, rows: PartRows, *, whole_in_a: bool) -> _JoinedRows:
    """Returns the parts whose sizes in one dimension add up to that of their whole, and that equal it in the others."""
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
    given, wanted = widen(runs[0].values.sizes[part], runs[1].values.sizes[whole_rows])
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
    return joined, pairs[:, ::-1] if whole_in_a else pairs


def _find_dimension(given: Sizes, wanted: Sizes, group: Rows, groups: int) -> Rows:
    """Returns for each group of parts the dimension along which they are concatenated; -1 if there is none."""
    total, whole, differ = np.zeros((3, groups, given.shape[1]), np.int64)
    np.add.at(total, group, given)
    np.maximum.at(differ, group, given != wanted)
    whole[group] = wanted
    others = differ.sum(axis=1, keepdims=True) - differ
    fits = (total == whole) & (whole >= 0) & (others == 0)
    return np.where(fits.any(axis=1), fits.argmax(axis=1), -1)


def collect(groups: Sequence[Joined]) -> Joined:
    """Returns all joined parts of several groups as one."""
    none = np.empty(0, np.int64)
    no_parts = Joined(
        part=none, whole=none, whole_in_a=none.astype(bool), dimension=none, offset=none, permuted=none
    )
    return Joined(**join_columns([no_parts, *groups]))


_FORWARD = PHASES.index(FORWARD)


@dataclass(frozen=True)
class MicroBatches:
    """The calls of a model on micro-batches in one recording that together are one call in the other."""

    count: int  # the number of micro-batches in a batch
    whole_in_a: bool
    models: tuple[int, int]  # the place of the model in both recordings


def find_micro_batches(runs: Runs, places: PlacePairs, steps: Rows) -> MicroBatches | None:
    """Returns the micro-batches; None if no model is called on parts of a batch in one recording only."""
    calls = runs[0].calls
    outermost = calls.kept & (calls.parent < 0) & (calls.phase == _FORWARD) & (calls.place >= 0)
    for place in np.unique(calls.place[outermost]).tolist():
        models = place, int(places.partner[place])
        if models[1] < 0:
            continue
        counts = for_both(_count_outermost, runs, models, steps.T)
        for whole_in_a in (False, True):
            parts, wholes = swap(counts, is_swapped=whole_in_a)
            if not wholes.any() or wholes.sum() >= parts.sum():
                continue
            count = int(parts.sum() // wholes.sum())
            sides, places_of = swap(runs, is_swapped=whole_in_a), swap(models, is_swapped=whole_in_a)
            if (parts == wholes * count).all() and _are_parts(sides, places_of, count):
                return MicroBatches(count, whole_in_a, models)
    return None


def _count_outermost(side: RunTables, place: int, steps: Rows) -> Rows:
    calls = side.calls
    rows = calls.kept & (calls.place == place) & (calls.parent < 0) & (calls.phase == _FORWARD)
    found: Rows = np.searchsorted(np.sort(calls.step[rows]), np.stack([steps, steps + 1]))
    return np.asarray(found[1] - found[0], np.int64)


def _are_parts(runs: Runs, models: tuple[int, int], count: int) -> bool:
    """Returns whether the batch sizes of the first `count` calls, of inputs or outputs, add up to that of the whole."""
    for role in (INPUT, OUTPUT):
        parts, wholes = for_both(_find_batches, runs, models, (role, role))
        if len(parts) >= count and len(wholes) and int(parts[:count].sum()) == int(wholes[0]):
            return True
    return False


def _find_batches(side: RunTables, place: int, role: str) -> Rows:
    """Returns the size of the first dimension of the first tensor with this role in each outermost call, in order."""
    values = side.values
    kept = values.kept & (values.place == place) & values.is_of(role) & (values.call >= 0)
    rows = rows_in_order(kept, values.order)
    _, first = np.unique(values.call[rows], return_index=True)
    rows = rows[np.sort(first)]
    return values.sizes[rows, 0] if values.sizes.shape[1] else rows[:0]


@dataclass(frozen=True)
class Batched:
    """The rows of one recording that belong to micro-batches, or to the batch that the micro-batches are parts of."""

    calls: Column
    ops: Column
    values: Column

    def leave_out(self, side: RunTables) -> RunTables:
        """Returns the tables of the recording without these ops and values."""
        ops = replace(side.ops, kept=side.ops.kept & ~self.ops)
        return replace(side, ops=ops, values=replace(side.values, kept=side.values.kept & ~self.values))


def find_batched(side: RunTables, place: int | None) -> Batched:
    """Returns the rows of a model that is called with micro-batches, and of ops outside of calls and optimizers."""
    calls, ops, values = side.calls, side.ops, side.values
    if place is None:
        return Batched(*(np.zeros(len(rows.step), bool) for rows in (calls, ops, values)))
    of_calls = np.asarray(calls.kept & (take(calls.place, calls.outermost) == place), bool)
    is_outside = (ops.call < 0) & (ops.phase != PHASES.index(OPTIMIZER))
    of_ops = np.asarray(is_outside | (take(of_calls, ops.call) > 0), bool)
    of_values = np.where(side.values.is_of_op, take(of_ops, values.op), take(of_calls, values.call)) > 0
    return Batched(of_calls, ops.kept & of_ops, values.kept & of_values)


def join_micro_batches(
    runs: Runs, places: PlacePairs, step: Partners, micro: MicroBatches, batched: tuple[Batched, Batched]
) -> _JoinedRows:
    """Returns the tensors of micro-batches that are parts of tensors of the whole batch."""
    keys = swap(_number_values(runs, places, step, micro), is_swapped=micro.whole_in_a)
    runs, batched = swap(runs, is_swapped=micro.whole_in_a), swap(batched, is_swapped=micro.whole_in_a)
    parts, wholes = for_both(
        lambda run, of: np.flatnonzero(of.values & (run.values.call >= 0)), runs, batched
    )
    part_rows = PartRows(
        parts,
        wholes,
        (keys[0][parts], keys[1][wholes]),
        runs[0].calls.outer[runs[0].values.call[parts]] % micro.count,
        np.full(len(parts), micro.count),
        np.zeros(len(parts), bool),
    )
    return join_rows(runs, part_rows, whole_in_a=micro.whole_in_a)


def _number_values(runs: Runs, places: PlacePairs, step: Partners, micro: MicroBatches) -> Partners:
    """Returns for each row a number of its call or op; the rows of a micro-batch have that of the whole batch."""
    counts = (1, micro.count) if micro.whole_in_a else (micro.count, 1)
    outer = for_both(lambda run, count: take(run.calls.outer, run.values.call) // count, runs, counts)
    op = for_both(lambda run: np.where(run.values.is_of_op, run.values.op, -1), runs)
    return number_keys(
        number_rows(runs, step, outer),
        (take(places.partner, runs[0].values.place), runs[1].values.place),
        number_codes(*((run.ops.names, take(run.ops.name, of)) for run, of in zip(runs, op, strict=True))),
        for_both(lambda run, of: take(run.ops.nth, of), runs, op),
    )
