"""Finds differences that are gone again in all that both runs compute from them, as those of another order of sums."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...recording.arrow.arrays import from_numpy
from ...recording.phase import OPTIMIZER, PHASES
from ...recording.role import BUFFER, OP_OUTPUT, OUTPUT, PARAMETER
from ...recording.statistics.moments import Numbers, read_statistics
from ..alignment.keys import number_keys
from ..alignment.sides import Side
from ..alignment.sizes import count_elements, number_sizes, read_sizes
from ..step.calls import Bools, Groups, RowFinder, Rows, column_of, take
from ..tables.op_flow import OpFlow
from ..tables.op_rules import ADDITIVE, ADDS_PRODUCT
from .errors import Errors
from .measured import ComparedRows
from .ranking import IS_MADE, Ranking, choose_first

#: What is computed from a difference is equal again if it is apart by less than so much of what would be left of that.
_GONE = 0.1

#: So many tensors are looked at for all differences together. Those that were not followed to their end stay.
_MOST_TENSORS = 200_000


def dismiss_absorbed(ranking: Ranking, errors: Errors, sides: Sequence[tuple[Side, ComparedRows]]) -> Ranking:
    """Returns a ranking without blame on differences from which both runs go on to compute what is equal.

    A difference stays if it, or what was computed from it and differs too, comes to an end: what no op reads, what an
    outermost call returns, what the program reads, and what is left in memory that outlives the step. What was not
    compared may differ. Ops that read several differences are left out of the ways of each if what they return stands
    behind what is blamed then, and is explained by that.

    Args:
        ranking: what is said of each pair.
        errors: how far each is apart.
        sides: the two recordings, and what was measured of each pair.
    """
    if not ranking.is_beyond.any() or not all(len(side.flow.read) for side, _ in sides):
        return ranking
    size = np.fmax(*(measured.stats.l2 for _, measured in sides))
    paths = [_Paths(side, measured.rows, ranking, errors, size) for side, measured in sides]
    whole = _dismiss(ranking, paths, with_others=True)
    if choose_first(whole) is None:
        return whole
    without = _dismiss(whole, paths, with_others=False)
    first, left_out = choose_first(without), min(path.first_left_out for path in paths)
    return without if first is not None and left_out > first else whole


def _dismiss(ranking: Ranking, paths: Sequence["_Paths"], *, with_others: bool) -> Ranking:
    """Returns a ranking without blame on what comes to nothing, followed as `_Paths.follow` says."""
    is_absorbed = np.zeros(len(ranking.score), bool)
    for at in np.flatnonzero(ranking.is_beyond & ~ranking.is_beyond_inputs).tolist():
        if not is_absorbed[at]:
            is_absorbed[_follow(paths, at, with_others)] = True
    ranking = ranking.dismiss(is_absorbed)
    while (first := choose_first(ranking)) is not None:
        gone = _follow(paths, first, with_others)
        if not len(gone):
            break
        ranking = ranking.dismiss(np.isin(np.arange(len(is_absorbed)), gone))
    return ranking


def _follow(paths: Sequence["_Paths"], pair: int, with_others: bool) -> Rows:
    """Returns all pairs through which a difference goes until it is gone in both runs; none if it is not.

    What the caller of a module ignores in one of the runs, as the last state of an LSTM, is followed in the other.
    """
    found = {pair}
    for number, path in enumerate([each for each in paths if not each.is_ignored(pair)] or paths):
        passed = path.follow(pair, with_others)
        if not len(passed):
            return passed
        found = {*passed.tolist()} if not number else found & {*passed.tolist()}
    return np.array(sorted(found | {pair}), np.int64)


class _Difference(NamedTuple):
    """A tensor that differs."""

    tensor: int
    error: float  # how far it is apart; of a tensor without partner: what it was computed from
    size: float  # its L2 norm, or the largest that it may have; NaN where that is not known


class _Paths:
    """What one run has computed from each tensor."""

    def __init__(self, side: Side, rows: Rows, ranking: Ranking, errors: Errors, size: Numbers) -> None:
        flow = side.flow
        self._noise, self._error = ranking.noise, errors.error
        #: Statistics do not show how far tensors are apart that are as far apart as their noise.
        self._resolution = np.where(ranking.is_estimated, ranking.noise, errors.floor)
        self._tensor = _find_tensors(side, rows, ranking.is_beyond)
        self._pairs = Groups(self._tensor, np.arange(len(rows)), len(flow.tensors))
        self._size = _find_norms(side)
        np.fmax.at(self._size, self._tensor[self._tensor >= 0], size[self._tensor >= 0])
        self._readers = Groups(flow.read, flow.reader, len(flow.tensors))
        self._reads = Groups(flow.reader, flow.read, len(flow.op_id))
        is_read = np.zeros(len(flow.tensors), bool)
        is_read[flow.read] = True
        is_unread_workspace = side.is_internal & ~is_read
        made = np.flatnonzero(
            (flow.tensors.producer >= 0) & ~is_unread_workspace & ~_find_unread_aliases(flow)
        )
        self._outputs = Groups(flow.tensors.producer[made], made, len(flow.op_id))
        self._producer, self._slot = flow.tensors.producer, flow.tensors.slot
        self._memory = _Memory(side)
        self._is_end = ~(is_read | side.is_internal) | self._memory.stays
        self._is_end[flow.returned.tensor] = True
        self._is_ignored = np.zeros(len(flow.tensors), bool)
        self._is_ignored[_find_results_of_modules(side)] = True
        self._is_ignored[np.concatenate([flow.read, flow.returned.tensor])] = False
        self._is_ignored &= ~self._memory.stays
        self._is_plain = side.ops.is_plain
        self._adds, self._averages = side.ops.are_named(ADDITIVE), side.ops.are_named({"mean"})
        self._summand = _find_summands(side)
        self._differing: dict[int, set[int]] = {}  # what an op reads and differs, as far as it was asked for
        self._left = _MOST_TENSORS
        self.first_left_out: float = math.inf  # the first pair of what ops returned that were left out

    def is_ignored(self, pair: int) -> bool:
        """Returns whether a module returned the tensor of a pair with others, and its caller has not read it."""
        tensor = int(self._tensor[pair])
        return tensor >= 0 and all(self._is_ignored[each] for each in self._find_beside(tensor))

    def follow(self, pair: int, with_others: bool) -> Rows:
        """Returns the pairs through which a difference goes until it is gone, itself first; none if it is not.

        What the caller of a module ignores is no end, where something else that comes of the difference is equal.

        Args:
            pair: the difference.
            with_others: it is followed through ops that read another difference, which does not come of this one.
        """
        tensor = int(self._tensor[pair])
        if tensor < 0:
            return np.empty(0, np.int64)
        first = _Difference(tensor, float(self._error[pair]), float(self._size[tensor]))
        waiting = [first._replace(tensor=each) for each in self._find_beside(tensor)]
        seen, is_gone, are_ignored = {tensor, *(each.tensor for each in waiting)}, False, False
        mixed: list[tuple[int, _Difference]] = []  # ops that read another difference, and what they return
        while waiting:
            each = waiting.pop()
            self._left -= 1
            if self._is_ignored[each.tensor]:
                are_ignored = True
            elif self._is_end[each.tensor] or self._left < 0:
                return np.empty(0, np.int64)
            for op in self._readers[each.tensor].tolist():
                outputs = self._outputs[op].tolist()
                if not outputs:
                    return np.empty(0, np.int64)
                for made in outputs:
                    if made in seen:
                        continue
                    if self._is_gone(each, op, made):
                        is_gone = True
                        continue
                    seen.add(made)
                    if with_others:
                        waiting.append(self._describe(made, each, op))
                    else:
                        mixed.append((op, self._describe(made, each, op)))
            if not waiting and mixed:
                left_out = [self._reads_another(op, seen) for op, _ in mixed]
                waiting = [made for (_, made), is_out in zip(mixed, left_out, strict=True) if not is_out]
                mixed = [each for each, is_out in zip(mixed, left_out, strict=True) if is_out]
        if (are_ignored or mixed) and not is_gone:
            return np.empty(0, np.int64)
        of_both = {made.tensor for _, made in mixed}
        pairs = [pair for tensor in of_both for pair in self._pairs[tensor].tolist()]
        self.first_left_out = min([self.first_left_out, *pairs])
        return np.concatenate([self._pairs[tensor] for tensor in sorted(seen - of_both)])

    def _reads_another(self, op: int, seen: set[int]) -> bool:
        """Returns whether an op reads a tensor that differs and does not come of those that were seen."""
        if op not in self._differing:
            self._differing[op] = {*self._find_differing(op)}
        return not self._differing[op] <= seen

    def _find_differing(self, op: int) -> Iterator[int]:
        """Yields what an op reads and differs, also through views."""
        for tensor in self._reads[op].tolist():
            pairs, producer = self._pairs[tensor], int(self._producer[tensor])
            if len(pairs):
                if (self._error[pairs] > IS_MADE * self._noise[pairs]).any():
                    yield tensor
            elif producer >= 0 and self._is_plain[producer]:
                yield from self._find_differing(producer)

    def _find_beside(self, tensor: int) -> Iterable[int]:
        """Returns a tensor, and the others that its op returned at the same slot: the same memory in other forms.

        One that nobody reads is left out where others are read.
        """
        outputs = self._outputs[self._producer[tensor]]
        beside = outputs[self._slot[outputs] == self._slot[tensor]]
        return beside.tolist() or [tensor]

    def _describe(self, made: int, read: _Difference, op: int) -> _Difference:
        pairs = self._pairs[made]
        if len(pairs):
            return _Difference(made, float(self._error[pairs].max()), float(self._size[made]))
        if not self._is_plain[op]:
            return _Difference(made, read.error, float(self._size[made]))
        return _Difference(
            made, read.error, read.size * min(1.0, math.sqrt(self._memory.ratio(made, read.tensor)))
        )

    def _is_gone(self, read: _Difference, op: int, made: int) -> bool:
        """Returns whether an output was compared, and is apart by less than what the difference would leave.

        What is large hides a difference that stays, where it is added to it or put beside it. So the difference of what
        was read is measured by the size of the output, and must be more than what was measured there can miss. An op in
        place may write to a part of the memory that differs.
        """
        pairs = self._pairs[made]
        if not len(pairs) or self._memory.is_part_written(read.tensor, made):
            return False
        error, seen = self._error[pairs], self._resolution[pairs]
        if not self._size[made]:  # both are 0: nothing is left
            return not error.any()
        left = read.error * self._find_share(read, op, made)
        is_noise = error <= IS_MADE * self._noise[pairs]
        return bool((is_noise & (np.maximum(error, seen) <= _GONE * left)).all())

    def _find_share(self, read: _Difference, op: int, made: int) -> float:
        """Returns how much of an output comes from a tensor that its op has read, 1 at most; NaN if it is not known."""
        size, ratio = float(self._size[made]), self._memory.ratio(made, read.tensor)
        share = read.size / size
        if self._averages[op]:
            share *= ratio
        elif self._adds[op]:
            share *= math.sqrt(max(1.0, ratio))  # it is added to several rows
        summand = int(self._summand[op])
        if summand in (-1, read.tensor):
            return min(1.0, share)
        of_summand = float(self._size[summand]) * math.sqrt(self._memory.ratio(made, summand))
        return min(1.0, share) * max(0.0, 1.0 - of_summand / size)


class _Memory:
    """Which tensors of a run show the same memory."""

    def __init__(self, side: Side) -> None:
        tensors = side.flow.tensors
        self._storage, self._version = (column_of(tensors.table, name) for name in ("storage", "version"))
        numel = self._numel = count_elements(read_sizes(tensors.table["shape"])).reshape(-1)
        _, memory = np.unique(self._storage, return_inverse=True)
        largest, last = np.zeros(len(memory) + 1, np.int64), np.zeros(len(memory) + 1, np.int64)
        np.maximum.at(largest, memory, numel)
        np.maximum.at(last, memory, self._version)
        self._is_part = numel < largest[memory]
        #: What is left in memory that outlives the step: no op has made it, or an optimizer writes to it.
        self.stays = (self._storage >= 0) & (self._version == last[memory]) & (self._version > 0)
        phase = take(side.ops.phase, tensors.producer)
        outlives = np.zeros(len(memory) + 1, bool)
        outlives[memory[(tensors.producer < 0) | (phase == PHASES.index(OPTIMIZER))]] = True
        self.stays &= outlives[memory]

    def ratio(self, one: int, other: int) -> float:
        """Returns how many times as many elements one tensor has as the other."""
        return float(self._numel[one] / max(self._numel[other], 1))

    def is_part_written(self, read: int, made: int) -> bool:
        """Returns whether an op in place that has read a tensor wrote to less than all memory of that."""
        is_same = self._storage[read] == self._storage[made] >= 0
        return bool(is_same and self._version[made] > self._version[read] and self._is_part[made])


def _find_norms(side: Side) -> Numbers:
    """Returns the L2 norm of each tensor as an op returned it, or of a leaf as it was met first; NaN for none."""
    values, tensors = side.values, side.flow.tensors
    norm = read_statistics(values.table).l2
    found = np.full(len(tensors), np.nan)
    leaves = np.flatnonzero(~values.is_of(OP_OUTPUT) & ((values.op >= 0) | values.is_of(PARAMETER, BUFFER)))
    row = take(leaves, RowFinder(column_of(values.table, "site_id")[leaves])(tensors.site_id))
    is_leaf = (row >= 0) & (tensors.site_id >= 0)
    found[is_leaf] = norm[row[is_leaf]]
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT))
    made = side.find_tensors(outputs)
    found[made[made >= 0]] = norm[outputs[made >= 0]]
    return found


def _find_results_of_modules(side: Side) -> Rows:
    """Returns the tensors that modules returned with others, of which a caller may ignore some, and that ops made."""
    values = side.values
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT))
    of_modules = np.flatnonzero(values.is_of(OUTPUT) & (values.call >= 0))
    counts = np.bincount(values.call[of_modules], minlength=len(side.calls.place))
    returned = values.group[of_modules[counts[values.call[of_modules]] > 1]]
    tensors = side.find_tensors(outputs[np.isin(values.group[outputs], returned)])
    return tensors[tensors >= 0]


def _find_summands(side: Side) -> Rows:
    """Returns the tensor that each op adds to what it computes of others, as a bias; -1 for none."""
    flow = side.flow
    is_bias = np.array([*(slot == "bias" for slot in flow.slots), False])[flow.slot]
    is_self = np.array([*(slot == "self" for slot in flow.slots), False])[flow.slot]
    is_summand = is_bias | (is_self & side.ops.are_named(ADDS_PRODUCT)[flow.reader])
    found = np.full(len(flow.op_id), -1, np.int64)
    found[flow.reader[is_summand]] = flow.read[is_summand]
    return found


def _find_tensors(side: Side, rows: Rows, wanted: Bools) -> Rows:
    """Returns the tensor of each of some rows of `values` that an op has returned; -1 for other rows.

    Args:
        side: the recording.
        rows: rows of `values`.
        wanted: which of them are looked up, too, if they are of a module that returns a view.
    """
    values = side.values
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT))
    of_group = np.full(int(values.group.max(initial=-1)) + 1, -1, np.int64)
    of_group[values.group[outputs]] = side.find_tensors(outputs)
    found = of_group[values.group[rows]]
    at = np.flatnonzero(wanted & (found < 0) & values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0))
    found[at] = _find_returned_views(side, rows[at])
    return found


def _find_returned_views(side: Side, rows: Rows) -> Rows:
    """Returns the only view of its shape that the call of each row has left to others; -1 for none, or several."""
    values, flow, producer = side.values, side.flow, side.flow.tensors.producer
    call = take(side.ops.call, producer)
    is_left = np.append(side.ops.is_view, False)[producer] & (call >= 0)
    is_left[flow.read[side.ops.call[flow.reader] == call[flow.read]]] = False
    views = np.flatnonzero(is_left)
    shape, own_shape = number_sizes(
        read_sizes(flow.tensors.table["shape"].take(from_numpy(views))), values.sizes[rows]
    )
    keys, wanted = number_keys((call[views], values.call[rows]), (shape, own_shape))
    distinct, first, counts = np.unique(keys, return_index=True, return_counts=True)
    where = RowFinder(distinct)(wanted)
    where = np.where(take(counts, where) == 1, where, -1)
    return take(views, take(first, where))


def _find_unread_aliases(flow: OpFlow) -> Bools:
    """Returns the tensors that no op reads, while their op returned the same memory in another form that is read.

    An op in place returns what it was given, and the whole tensor of which that is a part.
    """
    is_read = np.zeros(len(flow.tensors), bool)
    is_read[np.concatenate([flow.read, flow.returned.tensor])] = True
    _, output = np.unique(flow.output, return_inverse=True)
    has_read = np.zeros(len(flow.tensors) + 1, bool)
    has_read[output[is_read]] = True
    return np.asarray(~is_read & has_read[output] & (flow.output >= 0))
