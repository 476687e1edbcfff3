"""Pairs the ops of two recordings, by the sequence in which they ran inside of each pair of calls."""

from collections.abc import Sequence

import numpy as np

from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import OP_OUTPUT, PARAMETER
from ..tables.calls import iterate_levels
from ..tables.columns import (
    Bools,
    Column,
    Partners,
    RowFinder,
    Rows,
    find_rows,
    number_codes,
    number_keys,
    ranges,
    rows_in_order,
    take,
)
from ..tables.ops import bare_name
from ..tables.run import RunTables
from .calls import translate
from .contents import number_contents, number_shapes
from .modules import PlacePairs
from .sequences import align_sequences

_FORWARD, _OPTIMIZED = PHASES.index(FORWARD), PHASES.index(OPTIMIZER)

#: Instead of the number of a call: ops that can have no partner.
_ALONE = -2


def pair_ops(
    a: RunTables, b: RunTables, places: PlacePairs, calls: tuple[Rows, Rows], steps: Rows
) -> tuple[Rows, Rows]:
    """Returns the partner of each op; -1 if there is none.

    What ran in a call of a module without partner is aligned as a part of the call around it: it may be that one of the
    two models has a module where the other has a few lines. If the module has a partner that is called less often, the
    ops of the further calls have none. What ran for nothing in one has no partner that the other needs, if there is a
    better one. Those of a call that `is_apart` have none in a call that is not.

    Two calls that ran ops of the same names in the same order, and the same ones for nothing, ran the same ones, of
    whatever shapes. Optimizers run the same ops for each parameter: where they are not the same throughout, none is
    known to be for the same parameter. In other calls those come first that read the same weights, or return the same,
    then those that such ops read, and then those that something needs.
    """
    groups, is_alone = _number_groups(a, b, places, calls, steps)
    rows = [
        _sort_ops(side, side.ops.kept & ~alone, group)
        for side, alone, group in zip((a, b), is_alone, groups, strict=True)
    ]
    if not _update_in_one_order(a, b, places):
        rows = [each[side.ops.phase[each] != _OPTIMIZED] for side, each in zip((a, b), rows, strict=True)]
    found = _GroupedOps((rows[0], rows[1]), groups)
    tokens, are_idle = _number_ops(a, b), (_run_for_nothing(a), _run_for_nothing(b))
    differing = found.pair_equal(number_keys(tokens[0], are_idle))
    differing = differing[a.ops.phase[rows[0][found.begins[differing]]] != _OPTIMIZED]
    if not len(differing):
        return found.partners
    found.align(
        differing, [_leave_out(each, are_idle) for each in (_number_weights(a, b), _number_outputs(a, b))]
    )
    alike = number_keys(tokens[1], groups)
    _pair_by_readers(a, b, found, alike)
    partner, back = found.partners
    known, are_known = (
        (np.where(partner >= 0, np.arange(len(partner)), -1), back.copy()),
        (partner >= 0, back >= 0),
    )
    exact = number_keys(tokens[1], are_idle)
    others = [_leave_out(each, are_known) for each in (_leave_out(exact, are_idle), exact, *tokens[1:])]
    found.align(differing, [known, *others])
    _pair_by_readers(a, b, found, alike)
    return found.partners


class _GroupedOps:
    """Ops of two recordings that may be partners if they are of one group, and the partners that were found."""

    def __init__(self, rows: tuple[Rows, Rows], groups: tuple[Rows, Rows]) -> None:
        """Finds no partners yet.

        Args:
            rows: the ops; those of one group stand next to each other, in the order in which they ran.
            groups: a number of the group of each op, whether it is among them or not.
        """
        self.rows = rows
        self.partners = np.full(len(groups[0]), -1, np.int64), np.full(len(groups[1]), -1, np.int64)
        one, other = groups[0][rows[0]], groups[1][rows[1]]
        distinct, self.begins, self._counts = np.unique(one, return_index=True, return_counts=True)
        self._starts = np.searchsorted(other, distinct)
        self._others = np.searchsorted(other, distinct, side="right") - self._starts

    def pair_equal(self, tokens: Partners) -> Rows:
        """Pairs the ops of groups with equal tokens throughout, and returns which of the other groups both have.

        Most groups are equal, so no loop is run.
        """
        one, other = tokens[0][self.rows[0]], tokens[1][self.rows[1]]
        is_equal = self._counts == self._others
        sizes = self._counts[is_equal]
        group = np.repeat(np.flatnonzero(is_equal), sizes)
        pairs = np.stack(
            [ranges(self.begins[is_equal], sizes), ranges(self._starts[is_equal], sizes)], axis=1
        )
        is_equal[group[one[pairs[:, 0]] != other[pairs[:, 1]]]] = False
        self._pair(pairs[is_equal[group]])
        return np.flatnonzero(~is_equal & (self._others > 0))

    def align(self, groups: Rows, tokens: Sequence[Partners]) -> None:
        """Pairs ops of some groups that have no partner, by the order of equal tokens; negative ones equal none."""
        chosen = [
            (np.maximum(one[self.rows[0]], -1), np.where(other < 0, -2, other)[self.rows[1]])
            for one, other in tokens
        ]
        for at in groups.tolist():
            one = slice(self.begins[at], self.begins[at] + self._counts[at])
            other = slice(self._starts[at], self._starts[at] + self._others[at])
            pairs = align_sequences(*((left[one], right[other]) for left, right in chosen))
            self._pair(pairs + np.array([self.begins[at], self._starts[at]]))

    def _pair(self, positions: Rows) -> None:
        partner, back = self.partners
        one, other = self.rows[0][positions[:, 0]], self.rows[1][positions[:, 1]]
        is_new = (partner[one] < 0) & (back[other] < 0)
        partner[one[is_new]], back[other[is_new]] = other[is_new], one[is_new]


def _pair_by_readers(a: RunTables, b: RunTables, found: _GroupedOps, alike: Partners) -> None:
    """Pairs ops without partner whose outputs the same op reads as the same argument; not those of optimizers.

    They may run before or behind another branch in one of the recordings.

    Args:
        a: a recording.
        b: the other one.
        found: the ops that may have a partner, and those that have.
        alike: equal numbers of ops of both that may be the same, of one group.
    """
    partner, back = found.partners
    can = np.zeros(len(partner), bool), np.zeros(len(back), bool)
    for each, side, rows, known in zip(can, (a, b), found.rows, found.partners, strict=True):
        each[rows] = (known[rows] < 0) & (side.ops.phase[rows] != _OPTIMIZED)
    if not (can[0].any() and can[1].any()):
        return
    paired = PairedReads(a, b)
    made, made_b = (each.flow.tensors.producer[each.flow.read] for each in (a, b))
    begins = np.searchsorted(a.flow.reader, np.arange(len(partner) + 1))
    readers = np.flatnonzero(partner >= 0)
    while len(readers):
        reads = ranges(begins[readers], begins[readers + 1] - begins[readers])
        reads = reads[take(can[0], made[reads]) > 0]
        one, other = made[reads], take(made_b, paired.find(reads, partner))
        fits = (partner[one] < 0) & (take(can[1], other) > 0) & (take(back, other) < 0)
        fits &= alike[0][one] == take(alike[1], other)
        one, other = one[fits], other[fits]
        for column in (0, 1):  # each op once
            _, first = np.unique((one, other)[column], return_index=True)
            one, other = one[first], other[first]
        partner[one], back[other] = other, one
        readers = np.sort(one)


def _run_for_nothing(side: RunTables) -> Bools:
    """Returns which ops of forward nothing needs; of backward, gradients are what nothing reads."""
    return np.asarray(side.find_unread() & (side.ops.phase == _FORWARD))


def number_names(a: RunTables, b: RunTables) -> Partners:
    """Returns a number of the bare name of each op of two recordings."""
    one, other = (([*map(bare_name, side.ops.names)], side.ops.name) for side in (a, b))
    return number_codes(one, other)


def _number_ops(a: RunTables, b: RunTables) -> list[tuple[Rows, Rows]]:
    """Returns numbers of the ops of both: by name, with shape and dtype, with shape, with the number of elements."""
    name = number_codes(*((side.ops.names, side.ops.name) for side in (a, b)))
    base = number_names(a, b)
    shape, numel, dtype = number_shapes(a, b)
    with_shape = number_keys(base, shape)
    return [
        _choose_for_optimizers(a, b, with_shape, base),
        number_keys(name, shape, dtype),
        with_shape,
        number_keys(base, numel),
    ]


def _number_weights(a: RunTables, b: RunTables) -> Partners:
    """Returns a number of what the largest parameter that each op reads held at first, for ops of the same name.

    It is -1 for ops that read none, also not through views, or only constants.
    """
    parameters = [np.flatnonzero(each.values.is_of(PARAMETER)) for each in (a, b)]
    base = number_names(a, b)
    weight = [
        _find_read(side, rows, content)
        for side, rows, content in zip((a, b), parameters, number_contents(a, b, parameters), strict=True)
    ]
    numbers = number_keys((weight[0], weight[1]), base)
    one, other = (np.where(read < 0, -1, number) for read, number in zip(weight, numbers, strict=True))
    return one, other


def _number_outputs(a: RunTables, b: RunTables) -> Partners:
    """Returns a number of what each op returned first, for ops of the same name; -1 for what was not measured."""
    rows = [np.flatnonzero(each.values.is_of(OP_OUTPUT) & (each.values.op >= 0)) for each in (a, b)]
    rows = [mine[each.values.is_first[mine]] for each, mine in zip((a, b), rows, strict=True)]
    base = number_names(a, b)
    found = []
    for side, mine, content in zip((a, b), rows, number_contents(a, b, rows), strict=True):
        of_op = np.full(len(side.ops.name), -1, np.int64)
        of_op[side.values.op[mine]] = content[mine]
        found.append(of_op)
    numbers = number_keys((found[0], found[1]), base)
    return np.where(found[0] < 0, -1, numbers[0]), np.where(found[1] < 0, -1, numbers[1])


def _find_read(side: RunTables, rows: Rows, content: Rows) -> Rows:
    """Returns for each op the largest number of the contents of the parameters that it reads, maybe through views.

    Args:
        side: the recording.
        rows: rows of `values` of parameters.
        content: a number of what each row of `values` holds; -1 for none.
    """
    flow, tensors = side.flow, side.flow.tensors
    row = find_rows(side.values.site_id[rows], tensors.site_id)
    of_tensor = np.where(tensors.site_id < 0, -1, take(content[rows], row))
    storages, which = np.unique(tensors.storage, return_inverse=True)
    of_storage = np.full(len(storages), -1, np.int64)
    np.maximum.at(of_storage, which.reshape(-1), of_tensor)
    of_storage[storages < 0] = -1
    found = np.full(len(flow.op_id), -1, np.int64)
    np.maximum.at(found, flow.reader, of_storage[which.reshape(-1)[flow.read]])
    return found


def _choose_for_optimizers(a: RunTables, b: RunTables, ones: Partners, others: Partners) -> Partners:
    """Returns the first numbers for what an optimizer runs, the second for other ops; they are made disjoint."""
    beyond = 1 + max(int(each.max(initial=0)) for each in others)
    one, other = (
        np.where(side.ops.phase == _OPTIMIZED, number + beyond, by_name)
        for side, number, by_name in zip((a, b), ones, others, strict=True)
    )
    return one, other


def _sort_ops(side: RunTables, kept: Column, group: Rows) -> Rows:
    """Returns the ops in the order in which they began, those of one group next to each other."""
    rows = np.flatnonzero(kept)
    return rows[np.lexsort((side.ops.order[rows], group[rows]))]


def _number_groups(
    a: RunTables, b: RunTables, places: PlacePairs, calls: tuple[Rows, Rows], steps: Rows
) -> tuple[tuple[Rows, Rows], tuple[Column, Column]]:
    """Returns a number of the call in which each op is aligned, and whether it is not aligned at all."""
    numbers = np.arange(len(calls[1]))
    apart = a.is_apart, b.is_apart
    differs = [np.append(apart[1 - at], False)[calls[at]] != apart[at] for at in range(2)]
    around = (
        _find_around(a, places.partner, places.find_split(in_a=True), calls[0], calls[0], differs[0]),
        _find_around(b, places.back, places.find_split(in_a=False), calls[1], numbers, differs[1]),
    )
    call, call_b = take(around[0], a.ops.call), take(around[1], b.ops.call)
    step = translate(a.ops.step, steps)
    groups = number_keys(
        (np.maximum(call, -1), np.maximum(call_b, -1)),
        (np.where(call < 0, step, -1), np.where(call_b < 0, b.ops.step, -1)),
        (np.where(call < 0, a.ops.phase, -1), np.where(call_b < 0, b.ops.phase, -1)),
    )
    return groups, ((call == _ALONE) | (step < 0), (call_b == _ALONE) | ~np.isin(b.ops.step, steps[:, 1]))


def _find_around(
    side: RunTables, places: Rows, split: Rows, partner: Rows, number: Rows, differs: Bools
) -> Rows:
    """Returns for each call the number of the call in which its ops are aligned; -1: outside of calls; or _ALONE.

    Args:
        side: the recording.
        places: the partner of each place.
        split: places that are parts of one in the other recording.
        partner: the partner of each call.
        number: the number of each call.
        differs: whether the call `is_apart`, and its partner is not, or the other way round.
    """
    calls, found = side.calls, np.full(len(partner), -1, np.int64)
    key, _ = number_keys(*((column, column[:0]) for column in (calls.place, calls.step, calls.phase)))
    has_other = np.isin(key, key[(partner >= 0) & (calls.place >= 0)])
    is_alone = has_other & (calls.wraps == 0) & (take(places, calls.place) >= 0)
    is_alone |= np.isin(calls.place, split)  # a part of an op is no op of the whole
    for level in iterate_levels(calls.parent):
        above = np.where(is_alone[level], _ALONE, take(found, calls.parent[level]))
        found[level] = np.where(partner[level] >= 0, np.where(differs[level], _ALONE, number[level]), above)
    return found


def _update_in_one_order(a: RunTables, b: RunTables, places: PlacePairs) -> bool:
    """Returns whether the optimizers of both were seen to go through the parameters in the same order."""
    orders = [
        each.place[rows_in_order(each.kept & (each.phase == _OPTIMIZED) & ~each.is_of_op, each.order)]
        for each in (a.values, b.values)
    ]
    partners = take(places.partner, orders[0])
    return bool(np.array_equal(_drop_repeats(partners), _drop_repeats(orders[1])))


def _drop_repeats(places: Rows) -> Rows:
    """Returns each place once, in the order in which they come first."""
    return places[np.sort(np.unique(places, return_index=True)[1])]


def _leave_out(numbers: Partners, are_out: tuple[Bools, Bools]) -> Partners:
    """Returns numbers with which those that are left out are equal to none."""
    return np.where(are_out[0], -1, numbers[0]), np.where(are_out[1], -1, numbers[1])


class PairedReads:
    """Finds the reads of the second recording, for those of the first; numbers of reads are those of `OpFlow`."""

    def __init__(self, a: RunTables, b: RunTables) -> None:
        self._flow = a.flow
        self._slot, slot_b = number_codes(*((each.flow.slots, each.flow.slot) for each in (a, b)))
        self._width = 1 + max(int(each.max(initial=0)) for each in (self._slot, slot_b))
        self._find = RowFinder(b.flow.reader * self._width + slot_b)

    def find(self, reads: Rows, partner: Rows) -> Rows:
        """Returns the read of the same argument of the partner of each reader; -1 for none.

        Args:
            reads: of the first recording.
            partner: of each op of that; -1 for none.
        """
        reader = partner[self._flow.reader[reads]]
        return self._find(np.where(reader >= 0, reader * self._width + self._slot[reads], -1))

    def find_all(self, partner: Rows) -> tuple[Rows, Rows]:
        """Returns all pairs of reads of ops that are partners."""
        reads = np.flatnonzero(partner[self._flow.reader] >= 0)
        there = self.find(reads, partner)
        return reads[there >= 0], there[there >= 0]
