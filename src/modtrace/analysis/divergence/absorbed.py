"""Finds differences that are gone again in all that both runs compute from them, as those of another order of sums."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ...recording.arrow.arrays import from_numpy
from ...recording.phase import BACKWARD, OPTIMIZER, PHASES
from ...recording.role import BUFFER, OP_OUTPUT, OUTPUT, PARAMETER
from ...recording.statistics.moments import Numbers, read_statistics
from ..alignment.keys import number_keys
from ..alignment.sides import Side
from ..alignment.sizes import count_elements, number_sizes, read_sizes
from ..step.calls import Bools, Groups, RowFinder, Rows, column_of, iterate_levels, take
from ..step.ops import dictionary_codes
from ..tables.op_flow import OpFlow
from ..tables.op_rules import ADDITIVE, ADDS_PRODUCT, OVERWRITES
from .errors import Errors
from .measured import ComparedRows
from .ranking import IS_MADE, Ranking, choose_first

#: What is computed from a difference is equal again if it is apart by less than so much of what would be left of that.
_GONE = 0.1

#: How the names of dtypes of whole numbers begin.
_WHOLE = ("int", "uint", "bool")

#: So many tensors that come of a check are looked at, to tell whether anything is computed from it.
_MOST_OF_SUMMARY = 64

#: The arguments by which ops that add multiply what they read as another.
_FACTORS = {"other": "alpha", "tensor1": "value", "tensor2": "value", "end": "weight"}

#: So many tensors are looked at for all differences together. Those that were not followed to their end stay.
_MOST_TENSORS = 200_000


class ComparedRun(NamedTuple):
    """One of the two recordings, and what is known of its row of each pair."""

    side: Side
    measured: ComparedRows
    are_results: Bools  # outermost calls returned it
    are_repeated: Bools  # its module is called another number of times in the other recording


class AbsorbedDifferences:
    """Finds differences from which both runs go on to compute what is equal."""

    def __init__(self, runs: Sequence[ComparedRun], errors: Errors) -> None:
        """Looks at nothing yet.

        Args:
            runs: the two recordings.
            errors: how far each pair is apart.
        """
        self._runs, self._errors = runs, errors
        self._known: dict[int, _Paths] = {}

    def dismiss(self, ranking: Ranking) -> Ranking:
        """Returns a ranking without blame on differences that come to nothing.

        A difference stays if it, or what was computed from it and differs too, comes to an end: what no op reads, what
        an outermost call returns, what the program reads, and what is left in memory that outlives the step. What was
        not compared may differ. Ops that read several differences are left out of the ways of each if what they return
        stands behind what is blamed then, and is explained by that.

        Args:
            ranking: what is said of each pair; the noise is the same at each call.
        """
        if not ranking.is_beyond.any() or not all(len(run.side.flow.read) for run in self._runs):
            return ranking
        whole = self._dismiss(ranking, np.ones(len(ranking.score), bool), with_others=True)
        if (first := choose_first(whole)) is None:
            return whole
        run = self._runs[0]
        step = run.side.values.step[run.measured.rows]
        without = self._dismiss(whole, step == step[first], with_others=False)
        first, left_out = choose_first(without), min(path.first_left_out for path in self._known.values())
        return without if first is not None and left_out > first else whole

    def _dismiss(self, ranking: Ranking, among: Bools, *, with_others: bool) -> Ranking:
        """Returns a ranking without blame on what of some pairs comes to nothing, followed as `_Paths.follow` says.

        Then those are followed that would be blamed, until one stays.
        """
        is_absorbed = np.zeros(len(ranking.score), bool)
        for at in np.flatnonzero(ranking.is_beyond & ~ranking.is_beyond_inputs & among).tolist():
            if not is_absorbed[at]:
                is_absorbed[self._follow(ranking, at, with_others)] = True
        ranking = ranking.dismiss(is_absorbed)
        while (first := choose_first(ranking)) is not None:
            gone = self._follow(ranking, first, with_others)
            if not len(gone):
                break
            ranking = ranking.dismiss(np.isin(np.arange(len(is_absorbed)), gone))
        return ranking

    def _follow(self, ranking: Ranking, pair: int, with_others: bool) -> Rows:
        """Returns all pairs through which a difference goes until it is gone in both runs; none if it is not.

        What the caller of a module ignores in one of the runs, as the last state of an LSTM, is followed in the other.
        """
        found: list[set[int]] = []
        for path in self._choose_paths(ranking, pair):
            passed = path.follow(pair, with_others)
            if not len(passed):
                return passed
            found.append({*passed.tolist()})
        return np.array(sorted(set.intersection(*found) | {pair}), np.int64)

    def _choose_paths(self, ranking: Ranking, pair: int) -> Iterator["_Paths"]:
        is_ignored = True
        for number in range(2):
            path = self._paths(ranking, number)
            if not path.is_ignored(pair):
                is_ignored = False
                yield path
        if is_ignored:
            yield from self._known.values()

    def _paths(self, ranking: Ranking, number: int) -> "_Paths":
        """Returns what the first or the second run has computed, which is read when it is asked for."""
        if number not in self._known:
            size = np.fmax(*(run.measured.stats.l2 for run in self._runs))
            self._known[number] = _Paths(self._runs[number], ranking, self._errors, size)
        return self._known[number]


class _Difference(NamedTuple):
    """A tensor that differs."""

    tensor: int
    error: float  # how far it is apart; of a tensor without partner: what it was computed from
    size: float  # its L2 norm, or the largest that it may have; NaN where that is not known


class _Paths:
    """What one run has computed from each tensor."""

    def __init__(self, run: ComparedRun, ranking: Ranking, errors: Errors, size: Numbers) -> None:
        side, rows = run.side, run.measured.rows
        flow = side.flow
        self._noise, self._error = ranking.noise, errors.error
        #: Statistics do not show how far tensors are apart that are as far apart as their noise.
        self._resolution = np.where(ranking.is_estimated, ranking.noise, errors.floor)
        self._tensor = _find_tensors(side, rows, errors.error > ranking.noise)
        self._pairs = Groups(self._tensor, np.arange(len(rows)), len(flow.tensors))
        self._size = _find_norms(side)
        np.fmax.at(self._size, self._tensor[self._tensor >= 0], size[self._tensor >= 0])
        self._readers = flow.readers
        self._reads, self._slot_of_read = (
            Groups(flow.reader, each, len(flow.op_id)) for each in (flow.read, flow.slot)
        )
        self._slots, self._args = flow.slots, side.data.table("ops")["args"]
        is_read = np.zeros(len(flow.tensors), bool)
        is_read[flow.read] = True
        is_unread_workspace = side.is_internal & ~is_read
        made = np.flatnonzero(
            (flow.tensors.producer >= 0) & ~is_unread_workspace & ~_find_unread_aliases(flow)
        )
        self._outputs = Groups(flow.tensors.producer[made], made, len(flow.op_id))
        self._order = side.ops.order
        self._producer, self._slot = flow.tensors.producer, flow.tensors.slot
        self._memory = _Memory(side)
        self._is_end = ~(is_read | side.is_internal) | self._memory.stays
        self._is_end[flow.returned.tensor] = True
        self._is_end[_find_kept(side, rows, self._tensor, errors.error > IS_MADE * ranking.noise)] = True
        self._is_end |= self._memory.find_kept_gradients(side)
        self._are_results = run.are_results
        self._is_ignored = np.zeros(len(flow.tensors), bool)
        self._is_ignored[_find_results_of(side, rows[run.are_repeated])] = True
        self._is_ignored[np.concatenate([flow.read, flow.returned.tensor])] = False
        self._is_ignored &= ~self._memory.stays
        code, dtypes = dictionary_codes(flow.tensors.table["dtype"])
        self._is_whole = np.array([*(name.startswith(_WHOLE) for name in dtypes), True])[code]
        self._is_plain = side.ops.is_plain
        self._adds, self._averages = side.ops.are_named(ADDITIVE), side.ops.are_named({"mean"})
        self._summand = _find_summands(side)
        self._differing: dict[int, set[int]] = {}  # what an op reads and differs, as far as it was asked for
        self._leads_to_end: set[int] = set()  # what was compared, and a difference of which comes to an end
        self._left = _MOST_TENSORS
        self.first_left_out: float = math.inf  # the first pair of what ops returned that were left out

    def is_ignored(self, pair: int) -> bool:
        """Returns whether the caller of a module ignores the tensor of a pair; see `ComparedRun.are_repeated`."""
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
        # In the order of the ops that made them: what each op reads is known before it is looked at.
        waiting = [(-1, first._replace(tensor=each)) for each in self._find_beside(tensor)]
        seen, is_gone, is_unsure = {tensor, *(each.tensor for _, each in waiting)}, False, False
        left_out: set[int] = set()  # what ops return that read another difference
        comes_from: dict[int, int] = {}
        while waiting:
            time, each = waiting.pop() if with_others else heappop(waiting)
            if not with_others and time >= 0 and self._reads_another(int(self._producer[each.tensor]), seen):
                left_out.add(each.tensor)
                continue
            self._left -= 1
            if self._left < 0:
                return np.empty(0, np.int64)
            if self._is_ignored[each.tensor]:
                is_unsure = True
            elif self._is_result_equal(each.tensor):
                is_gone = True
            elif self._is_end[each.tensor] or (with_others and each.tensor in self._leads_to_end):
                return self._remember_end(each.tensor, comes_from)
            for op in self._readers[each.tensor].tolist():
                outputs = self._outputs[op].tolist()
                if not outputs:
                    return self._remember_end(each.tensor, comes_from)
                for made in outputs:
                    if made in seen:
                        continue
                    if self._is_gone(each, op, made):
                        if self._shows_all(each.tensor, made):
                            is_gone = True
                        else:
                            is_unsure = True
                        continue
                    seen.add(made)
                    comes_from[made] = each.tensor
                    add = waiting.append if with_others else partial(heappush, waiting)
                    add((int(self._order[op]), self._describe(made, each, op)))
        if (is_unsure or left_out) and not is_gone:
            return np.empty(0, np.int64)
        pairs = [pair for tensor in left_out for pair in self._pairs[tensor].tolist()]
        self.first_left_out = min([self.first_left_out, *pairs])
        return np.concatenate([self._pairs[tensor] for tensor in sorted(seen - left_out)])

    def _remember_end(self, tensor: int, comes_from: Mapping[int, int]) -> Rows:
        """Returns no pairs, and remembers which tensors that were compared lead to this one."""
        at: int | None = tensor
        while at is not None:
            if len(self._pairs[at]):
                self._leads_to_end.add(at)
            at = comes_from.get(at)
        return np.empty(0, np.int64)

    def _is_result_equal(self, tensor: int) -> bool:
        """Returns whether a tensor differs where its op returned it, and not where the model did."""
        pairs = self._pairs[tensor]
        is_result, differs = self._are_results[pairs], self._error[pairs] > IS_MADE * self._noise[pairs]
        is_equal = is_result.any() and not differs[is_result].any() and differs.any()
        return bool(is_equal and not self._memory.stays[tensor])

    def _shows_all(self, read: int, made: int) -> bool:
        """Returns whether an output is no count, check or single number that only the program looks at.

        Such are equal also of tensors that differ, and one that the program keeps.
        """
        is_summary = self._is_whole[made] > self._is_whole[read] or self._memory.is_single(made, read)
        return not is_summary or self._is_used(made)

    def _is_used(self, summary: int) -> bool:
        """Returns whether ops make tensors of real numbers, with several elements, of a summary."""
        waiting, seen = [summary], {summary}
        while waiting and len(seen) < _MOST_OF_SUMMARY:
            for op in self._readers[waiting.pop()].tolist():
                for made in self._outputs[op].tolist():
                    if not self._is_whole[made] and not self._memory.is_single(made):
                        return True
                    if made not in seen:
                        seen.add(made)
                        waiting.append(made)
        return False

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

    def _find_whole(self, tensor: int) -> int:
        """Returns a tensor if it was compared, and else one that was, of which it may be a part: of the same output."""
        others = [each for each in self._find_beside(tensor) if len(self._pairs[each])]
        is_whole = [each for each in others if self._memory.ratio(each, tensor) >= 1]
        return tensor if len(self._pairs[tensor]) or not is_whole else is_whole[0]

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
        made = self._find_whole(made)
        pairs = self._pairs[made]
        if self._are_results[pairs].any():
            pairs = pairs[self._are_results[pairs]]
        if not len(pairs) or self._memory.is_part_written(read.tensor, made):
            return False
        error, seen = self._error[pairs], self._resolution[pairs]
        if not self._size[made]:  # both are 0: nothing is left
            return not error.any()
        # What is not finite, or nobody knows how far apart, leaves something whatever its size is.
        left = read.error if math.isinf(read.error) else read.error * self._find_share(read, op, made)
        is_noise = error <= IS_MADE * self._noise[pairs]
        return bool(left > 0 and (is_noise & (np.maximum(error, seen) <= _GONE * left)).all())

    def _find_share(self, read: _Difference, op: int, made: int) -> float:
        """Returns how much of an output comes from a tensor that its op has read, 1 at most; NaN if it is not known."""
        size, ratio = float(self._size[made]), self._memory.ratio(made, read.tensor)
        share = read.size / size * self._find_factor(op, read.tensor)
        if self._averages[op]:
            share *= ratio
        elif self._adds[op]:
            share *= math.sqrt(max(1.0, ratio))  # it is added to several rows
        summand = int(self._summand[op])
        if summand in (-1, read.tensor):
            return float(np.minimum(1.0, share))
        of_summand = float(self._size[summand]) * math.sqrt(self._memory.ratio(made, summand))
        return float(np.minimum(1.0, share)) * max(0.0, 1.0 - of_summand / size)

    def _find_factor(self, op: int, tensor: int) -> float:
        """Returns by how much an op multiplies a tensor before it adds it: the rate of an optimizer, as `alpha`."""
        if not self._adds[op]:
            return 1.0
        slots = {self._slots[at] for at in self._slot_of_read[op][self._reads[op] == tensor].tolist()}
        given = json.loads(self._args[op].as_py() or "{}")
        factors = [given[name] for slot, name in _FACTORS.items() if slot in slots and name in given]
        return max((abs(each) for each in factors if isinstance(each, int | float)), default=1.0)


class _Memory:
    """Which tensors of a run show the same memory."""

    def __init__(self, side: Side) -> None:
        tensors = side.flow.tensors
        self._storage, self._version = (column_of(tensors.table, name) for name in ("storage", "version"))
        numel = self._numel = count_elements(read_sizes(tensors.table["shape"])).reshape(-1)
        _, memory = np.unique(self._storage, return_inverse=True)
        self._memory = memory
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

    def find_kept_gradients(self, side: Side) -> Bools:
        """Returns what backward has made last, the program reads by ops, and no optimizer reads."""
        flow, of_maker = side.flow, take(side.ops.phase, side.flow.tensors.producer)
        read_in = np.zeros((len(PHASES) + 1, len(flow.tensors)), bool)  # the last for ops outside of phases
        read_in[side.ops.phase[flow.reader], flow.read] = True
        in_backward, in_optimizer = PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)
        is_read = np.delete(read_in, in_backward, axis=0).any(axis=0) & ~read_in[in_optimizer]
        is_changed = ~np.append(side.ops.are_named(OVERWRITES), False)[flow.tensors.producer]
        memory = self._memory
        last = np.full(len(memory) + 1, -1, np.int64)
        np.maximum.at(last, memory[is_changed], self._version[is_changed])
        return np.asarray(is_read & (of_maker == in_backward) & is_changed & (self._version == last[memory]))

    def is_single(self, one: int, other: int | None = None) -> bool:
        """Returns whether a tensor has one element, and another one has several."""
        return bool(self._numel[one] <= 1 and (other is None or self._numel[other] > 1))

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


def _find_kept(side: Side, rows: Rows, tensor: Rows, is_over: Bools) -> Rows:
    """Returns the tensors that differ where modules return them, and that no op outside of the module reads in forward.

    Args:
        side: the recording.
        rows: its row of `values` of each pair.
        tensor: what an op returned there; -1 where none is known.
        is_over: which pairs differ by more than noise.
    """
    values, calls, flow = side.values, side.calls.calls, side.flow
    at = np.flatnonzero(is_over & (tensor >= 0) & values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0))
    last_inside = np.full(len(calls.parent) + 1, -1, np.int64)
    np.maximum.at(last_inside, side.ops.call, side.ops.order)
    for level in reversed([*iterate_levels(calls.parent)]):
        np.maximum.at(last_inside, calls.parent[level], last_inside[level])
    in_backward = side.ops.phase[flow.reader] == PHASES.index(BACKWARD)
    last_read = np.full(len(flow.tensors), -1, np.int64)
    np.maximum.at(last_read, flow.read[~in_backward], side.ops.order[flow.reader[~in_backward]])
    return np.asarray(tensor[at[last_read[tensor[at]] <= last_inside[values.call[rows[at]]]]])


def _find_results_of(side: Side, rows: Rows) -> Rows:
    """Returns the tensors that the modules of some rows of `values` returned, and that ops made."""
    values = side.values
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT))
    is_theirs = np.isin(values.place, values.place[rows]) & (values.place >= 0)
    returned = values.group[values.is_of(OUTPUT) & (values.call >= 0) & is_theirs]
    tensors = side.find_tensors(outputs[np.isin(values.group[outputs], returned)])
    return tensors[tensors >= 0]


def _find_summands(side: Side) -> Rows:
    """Returns the tensor that each op adds to what it computes of others, as a bias; -1 for none."""
    flow = side.flow
    is_bias = np.array([*(slot == "bias" for slot in flow.slots), False])[flow.slot]
    is_self = np.array([*(slot == "self" for slot in flow.slots), False])[flow.slot]
    is_backward = np.array([*("backward" in name for name in side.ops.names), False])[side.ops.name]
    is_summand = is_bias & ~is_backward[flow.reader] | (
        is_self & side.ops.are_named(ADDS_PRODUCT)[flow.reader]
    )
    found = np.full(len(flow.op_id), -1, np.int64)
    found[flow.reader[is_summand]] = flow.read[is_summand]
    return found


def _find_tensors(side: Side, rows: Rows, wanted: Bools) -> Rows:
    """Returns the tensor of each of some rows of `values` that an op, or an outermost call, returned; -1 for others.

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
    found = np.where(found < 0, _find_results(side, rows), found)
    at = np.flatnonzero(wanted & (found < 0) & values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0))
    found[at] = _find_returned_views(side, rows[at])
    return found


def _find_results(side: Side, rows: Rows) -> Rows:
    """Returns the tensor that an outermost call returned at the slot of each row; -1 for other rows."""
    values, flow = side.values, side.flow
    codes = {
        name.removeprefix("output"): code for code, name in enumerate(flow.slots) if name.startswith("output")
    }
    slot = np.array([*(codes.get(name, -1) for name in values.slots), -1])[values.slot[rows]]
    width = len(flow.slots)
    at = RowFinder(flow.returned.call * width + flow.returned.slot)(values.call[rows] * width + slot)
    is_result = values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0) & (slot >= 0)
    return np.where(is_result, take(flow.returned.tensor, at), -1)


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
