"""Pairs the ops of two recordings by the order in which they ran inside each pair of calls."""

from collections.abc import Sequence

import numpy as np

from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import OP_OUTPUT, PARAMETER
from ..tables.calls import iterate_levels
from ..tables.columns import (
    Bools,
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
from .both import (
    Runs,
    for_both,
    no_partners,
    number_contents,
    number_partners,
    number_shapes,
    number_steps,
)
from .modules import PlacePairs
from .sequences import align_sequences

_FORWARD, _OPTIMIZED = PHASES.index(FORWARD), PHASES.index(OPTIMIZER)

#: Stands in place of the number of a call for ops that cannot have a partner.
_ALONE = -2


def pair_ops(runs: Runs, places: PlacePairs, calls: Partners, steps: Rows) -> Partners:
    """Returns the partner of each op of both recordings; -1 if there is none.

    Ops in a call of a module without partner are aligned as part of the surrounding call, because one model may have a
    module where the other has a few lines. If the module has a partner that is called less often, ops of its surplus
    calls have no partner. An op whose result is unused is paired with a used one only if no better partner exists. Ops
    of a call that `is_apart` are never paired with those of a call that is not.

    Two calls are paired op by op if they ran ops of the same names in the same order, with the same ones unused,
    whatever the shapes. Optimizers run the same ops for each parameter, so their ops stay unpaired if these sequences
    differ. In other calls, ops that read equal weights or return equal tensors are paired first, then the ops that
    paired ops read from, then other used ops.
    """
    groups, is_alone = _number_groups(runs, places, calls, steps)
    rows = for_both(_sort_ops, runs, is_alone, groups)
    if not _update_in_one_order(runs, places):
        rows = for_both(lambda run, rows: rows[run.ops.phase[rows] != _OPTIMIZED], runs, rows)
    ops = _GroupedOps(rows, groups)
    tokens, are_idle = _number_ops(runs), for_both(_run_for_nothing, runs)
    differing = ops.pair_equal(number_keys(tokens[0], are_idle))
    differing = differing[runs[0].ops.phase[rows[0][ops.begins[differing]]] != _OPTIMIZED]
    if not len(differing):
        return ops.partners
    ops.align(
        differing,
        [_leave_out(numbers, are_idle) for numbers in (_number_weights(runs), _number_outputs(runs))],
    )
    alike = number_keys(tokens[1], groups)
    _pair_by_readers(runs, ops, alike)
    known = number_partners(*ops.partners)
    are_known = for_both(lambda numbers: numbers >= 0, known)
    exact = number_keys(tokens[1], are_idle)
    others = [_leave_out(numbers, are_known) for numbers in (_leave_out(exact, are_idle), exact, *tokens[1:])]
    ops.align(differing, [known, *others])
    _pair_by_readers(runs, ops, alike)
    return ops.partners


class _GroupedOps:
    """Ops of two recordings, grouped so that only ops of one group may be partners, and the partners found so far."""

    def __init__(self, rows: Partners, groups: Partners) -> None:
        """Starts without any partners.

        Args:
            rows: the ops to pair; the ops of one group are adjacent, in the order in which they ran.
            groups: the number of the group of each op, including ops that are not in `rows`.
        """
        self.rows = rows
        self.partners = no_partners(*groups)
        one, other = groups[0][rows[0]], groups[1][rows[1]]
        distinct, self.begins, self._counts = np.unique(one, return_index=True, return_counts=True)
        self._starts = np.searchsorted(other, distinct)
        self._others = np.searchsorted(other, distinct, side="right") - self._starts

    def pair_equal(self, tokens: Partners) -> Rows:
        """Pairs the ops of groups whose tokens are all equal, and returns the other groups that both recordings have.

        Most groups are equal, so they are compared all at once instead of in a loop.
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
        """Pairs ops of some groups that lack a partner, by aligning equal tokens; negative tokens match nothing."""
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


def _pair_by_readers(runs: Runs, ops: _GroupedOps, alike: Partners) -> None:
    """Pairs ops without partner whose outputs are the same argument of paired ops; ops of optimizers are left out.

    An op found this way may run before another branch in one recording and after it in the other.

    Args:
        runs: the two recordings.
        ops: the ops to pair, with the partners found so far.
        alike: a number for each op of both recordings; only ops with equal numbers may be partners.
    """
    partner, back = ops.partners
    can = for_both(lambda known: np.zeros(len(known), bool), ops.partners)
    for is_open, run, rows, known in zip(can, runs, ops.rows, ops.partners, strict=True):
        is_open[rows] = (known[rows] < 0) & (run.ops.phase[rows] != _OPTIMIZED)
    if not (can[0].any() and can[1].any()):
        return
    paired = PairedReads(*runs)
    made, made_b = (run.flow.tensors.producer[run.flow.read] for run in runs)
    begins = np.searchsorted(runs[0].flow.reader, np.arange(len(partner) + 1))
    readers = np.flatnonzero(partner >= 0)
    while len(readers):
        reads = ranges(begins[readers], begins[readers + 1] - begins[readers])
        reads = reads[take(can[0], made[reads]) > 0]
        one, other = made[reads], take(made_b, paired.find(reads, partner))
        fits = (partner[one] < 0) & (take(can[1], other) > 0) & (take(back, other) < 0)
        fits &= alike[0][one] == take(alike[1], other)
        one, other = one[fits], other[fits]
        for column in (0, 1):  # an op may be the argument of several ops
            _, first = np.unique((one, other)[column], return_index=True)
            one, other = one[first], other[first]
        partner[one], back[other] = other, one
        readers = np.sort(one)


def _run_for_nothing(side: RunTables) -> Bools:
    """Returns which ops of forward have an output that nothing uses; in backward, unread gradients are normal."""
    return np.asarray(side.find_unread() & (side.ops.phase == _FORWARD))


def number_names(a: RunTables, b: RunTables) -> Partners:
    """Returns for each op of two recordings a number of its bare name."""
    one, other = (([*map(bare_name, side.ops.names)], side.ops.name) for side in (a, b))
    return number_codes(one, other)


def _number_ops(runs: Runs) -> list[Partners]:
    """Returns numbers of the ops of both, from strict to loose: by name, with shape and dtype, shape, or element count.

    The first number also includes the shape for ops of optimizers.
    """
    name = number_codes(*((run.ops.names, run.ops.name) for run in runs))
    base = number_names(*runs)
    shape, numel, dtype = number_shapes(runs)
    with_shape = number_keys(base, shape)
    is_optimized = for_both(lambda run: run.ops.phase == _OPTIMIZED, runs)
    shape_of_optimized = _leave_out(with_shape, for_both(np.logical_not, is_optimized))
    return [
        number_keys(is_optimized, base, shape_of_optimized),
        number_keys(name, shape, dtype),
        with_shape,
        number_keys(base, numel),
    ]


def _number_weights(runs: Runs) -> Partners:
    """Returns for each op a number of its name and of the first contents of the largest parameter that it reads.

    The number is -1 for ops that read no parameter, also not through views, or only constant ones.
    """
    rows = for_both(lambda run: np.flatnonzero(run.values.is_of(PARAMETER)), runs)
    return _number_by_name(runs, for_both(_find_read, runs, rows, number_contents(runs, rows)))


def _number_outputs(runs: Runs) -> Partners:
    """Returns for each op a number of its name and of the contents of its first output; -1 if that was not measured."""
    rows = for_both(_find_first_outputs, runs)
    contents = no_partners(runs[0].ops.name, runs[1].ops.name)
    for run, at, number, content in zip(runs, rows, number_contents(runs, rows), contents, strict=True):
        content[run.values.op[at]] = number[at]
    return _number_by_name(runs, contents)


def _find_first_outputs(run: RunTables) -> Rows:
    values = run.values
    rows = np.flatnonzero(values.is_of(OP_OUTPUT) & (values.op >= 0))
    return rows[values.is_first[rows]]


def _number_by_name(runs: Runs, contents: Partners) -> Partners:
    """Returns numbers of contents combined with the bare name of the op; -1 stays -1."""
    is_unknown = for_both(lambda content: content < 0, contents)
    return _leave_out(number_keys(contents, number_names(*runs)), is_unknown)


def _find_read(side: RunTables, rows: Rows, content: Rows) -> Rows:
    """Returns for each op the largest content number among the parameters that it reads, directly or through views.

    Args:
        side: the tables of the recording.
        rows: the rows of `values` that are of parameters.
        content: the number of the contents of each row of `values`; -1 for none.
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


def _sort_ops(run: RunTables, is_alone: Bools, group: Rows) -> Rows:
    """Returns the ops to align, those of one group adjacent, in the order in which they began."""
    rows = np.flatnonzero(run.ops.kept & ~is_alone)
    return rows[np.lexsort((run.ops.order[rows], group[rows]))]


def _number_groups(
    runs: Runs, places: PlacePairs, calls: Partners, steps: Rows
) -> tuple[Partners, tuple[Bools, Bools]]:
    """Returns for each op the number of the call in which it is aligned, and whether it is excluded from aligning."""
    apart = runs[0].is_apart, runs[1].is_apart
    around = for_both(
        _find_around,
        runs,
        (places.partner, places.back),
        (places.find_split(in_a=True), places.find_split(in_a=False)),
        number_partners(*calls),
        for_both(
            lambda own, other, partner: np.append(other, False)[partner] != own, apart, apart[::-1], calls
        ),
    )
    call = for_both(lambda run, around: take(around, run.ops.call), runs, around)
    step = number_steps(runs[0].ops.step, runs[1].ops.step, steps)
    groups = number_keys(
        for_both(lambda call: np.maximum(call, -1), call),
        for_both(lambda call, step: np.where(call < 0, step, -1), call, step),
        for_both(lambda call, run: np.where(call < 0, run.ops.phase, -1), call, runs),
    )
    return groups, for_both(lambda call, step: (call == _ALONE) | (step < 0), call, step)


def _find_around(run: RunTables, places: Rows, split: Rows, number: Rows, differs: Bools) -> Rows:
    """Returns for each call the number of the call in which its ops are aligned; -1 outside of calls; else _ALONE.

    Args:
        run: the tables of the recording.
        places: the partner of each place of the module tree.
        split: the places that are parts of one place of the other recording.
        number: a number for each call that is equal for partners; -1 for calls without partner.
        differs: whether exactly one of the call and its partner `is_apart`.
    """
    calls, around = run.calls, np.full(len(number), -1, np.int64)
    key, _ = number_keys(*((column, column[:0]) for column in (calls.place, calls.step, calls.phase)))
    has_other = np.isin(key, key[(number >= 0) & (calls.place >= 0)])
    is_alone = has_other & (calls.wraps == 0) & (take(places, calls.place) >= 0)
    is_alone |= np.isin(calls.place, split)  # ops of a part do only some of the work of the whole's op
    for level in iterate_levels(calls.parent):
        above = np.where(is_alone[level], _ALONE, take(around, calls.parent[level]))
        around[level] = np.where(number[level] >= 0, np.where(differs[level], _ALONE, number[level]), above)
    return around


def _update_in_one_order(runs: Runs, places: PlacePairs) -> bool:
    """Returns whether the optimizers of both recordings were seen to update the parameters in the same order."""
    order, order_b = for_both(_order_updates, runs, (places.partner, np.arange(len(places.back))))
    return bool(np.array_equal(order, order_b))


def _order_updates(run: RunTables, numbers: Rows) -> Rows:
    """Returns the numbers of the places whose parameters the optimizer updates, in the order of their first update."""
    values = run.values
    kept = values.kept & (values.phase == _OPTIMIZED) & ~values.is_of_op
    places = take(numbers, values.place[rows_in_order(kept, values.order)])
    return places[np.sort(np.unique(places, return_index=True)[1])]


def _leave_out(numbers: Partners, are_out: tuple[Bools, Bools]) -> Partners:
    """Returns the numbers with values for left-out ops that equal no other number."""
    return for_both(lambda is_out, number: np.where(is_out, -1, number), are_out, numbers)


class PairedReads:
    """Finds the reads of the second recording that correspond to reads of the first, numbered as in `OpFlow`."""

    def __init__(self, a: RunTables, b: RunTables) -> None:
        self._flow = a.flow
        self._slot, slot_b = number_codes(*((run.flow.slots, run.flow.slot) for run in (a, b)))
        self._width = 1 + max(int(slots.max(initial=0)) for slots in (self._slot, slot_b))
        self._find = RowFinder(b.flow.reader * self._width + slot_b)

    def find(self, reads: Rows, partner: Rows) -> Rows:
        """Returns for each read the one by which the reader's partner reads the same argument; -1 if there is none.

        Args:
            reads: the reads of the first recording.
            partner: the partner of each op of the first recording; -1 for none.
        """
        reader = partner[self._flow.reader[reads]]
        return self._find(np.where(reader >= 0, reader * self._width + self._slot[reads], -1))

    def find_all(self, partner: Rows) -> tuple[Rows, Rows]:
        """Returns all pairs of corresponding reads of partners."""
        reads = np.flatnonzero(partner[self._flow.reader] >= 0)
        there = self.find(reads, partner)
        return reads[there >= 0], there[there >= 0]
