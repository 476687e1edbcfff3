"""Follows a difference through what one run computes from it, until it is gone or comes to an end."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Groups, Rows
from ..tables.measured import ComparedRows
from ..tables.op_rules import ADDITIVE
from .errors import Errors
from .paired_run import (
    PairedRun,
    SharedMemory,
    find_kept,
    find_module_outputs,
    find_norms,
    find_summands,
    find_tensors,
    find_unread_aliases,
)
from .ranking import IS_MADE, Ranking

#: What is computed from a difference is equal again if it is apart by less than so much of what would be left of that.
_GONE = 0.1

#: So many tensors that come of a check are looked at, to tell whether anything is computed from it.
_MOST_OF_SUMMARY = 64

#: So many ops in front of one are looked at, to tell whether it reads another difference.
_MOST_BEFORE = 64

#: The arguments by which ops that add multiply what they read as another.
_FACTORS = {"other": "alpha", "tensor1": "value", "tensor2": "value", "end": "weight"}

#: So many tensors are looked at for all differences of a ranking. Those that were not followed to their end stay.
_MOST_TENSORS = 200_000


class ComparedRun(NamedTuple):
    """One of the two recordings, and what is known of its row of each pair."""

    paired: PairedRun
    measured: ComparedRows
    are_repeated: Bools  # its module is called another number of times in the other recording
    elsewhere: Numbers  # of each tensor: see `find_elsewhere`


class _Difference(NamedTuple):
    """A tensor that differs."""

    tensor: int
    error: float  # how far it is apart; of a tensor without partner: what it was computed from
    size: float  # its L2 norm, or the largest that it may have; NaN where that is not known


class Consequences:
    """What one run has computed from each tensor."""

    def __init__(self, run: ComparedRun, ranking: Ranking, errors: Errors, size: Numbers) -> None:
        side, rows = run.paired.side, run.paired.rows
        flow = side.flow
        self._noise, self._error = ranking.noise, errors.error
        #: Statistics do not show how far tensors are apart that are as far apart as their noise.
        self._resolution = np.where(ranking.is_estimated, ranking.noise, errors.floor)
        self._tensor = find_tensors(side, rows, errors.error > ranking.noise)
        self._pairs = Groups(self._tensor, np.arange(len(rows)), len(flow.tensors))
        self._size = find_norms(side)
        np.fmax.at(self._size, self._tensor[self._tensor >= 0], size[self._tensor >= 0])
        self._is_elsewhere = ~np.isnan(run.elsewhere)
        self._readers = flow.readers
        self._reads, self._slot_of_read = (
            Groups(flow.reader, each, len(flow.op_id)) for each in (flow.read, flow.slot)
        )
        self._slots, self._ops = flow.slots, side.ops
        is_read = np.zeros(len(flow.tensors), bool)
        is_read[flow.read] = True
        is_unread_workspace = side.is_internal & ~is_read
        made = np.flatnonzero(
            (flow.tensors.producer >= 0) & ~is_unread_workspace & ~find_unread_aliases(flow)
        )
        self._outputs = Groups(flow.tensors.producer[made], made, len(flow.op_id))
        self._order = side.ops.order
        self._producer, self._slot = flow.tensors.producer, flow.tensors.slot
        self._memory = SharedMemory(side)
        self._is_end = ~(is_read | side.is_internal) | self._memory.stays
        self._is_end[flow.returned.tensor] = True
        self._is_end[find_kept(side, rows, self._tensor, errors.error > IS_MADE * ranking.noise)] = True
        self._is_end |= self._memory.find_kept_gradients(side)
        self._are_results = run.paired.are_results
        self._is_ignored = np.zeros(len(flow.tensors), bool)
        self._is_ignored[find_module_outputs(side, rows[run.are_repeated])] = True
        self._is_ignored[np.concatenate([flow.read, flow.returned.tensor])] = False
        self._is_ignored &= ~self._memory.stays
        self._is_whole = flow.tensors.is_whole
        self._is_plain = side.ops.is_plain
        self._adds, self._averages = side.ops.are_named(ADDITIVE), side.ops.are_named({"mean"})
        self._summand = find_summands(side)
        self._differing: dict[int, set[int]] = {}  # what an op reads and differs, as far as it was asked for
        self._leads_to_end: set[int] = set()  # what was compared, and a difference of which comes to an end
        self.begin()

    def begin(self) -> None:
        """Begins with a ranking: nothing was looked at or left out."""
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
        add = waiting.append if with_others else partial(heappush, waiting)
        while waiting:
            time, each = waiting.pop() if with_others else heappop(waiting)
            if not with_others and time >= 0 and self._reads_another(int(self._producer[each.tensor]), seen):
                left_out.add(each.tensor)
                continue
            self._left -= 1
            if self._left < 0:
                return np.empty(0, np.int64)
            if self._is_elsewhere[each.tensor]:
                is_gone = True
                continue
            if self._is_ignored[each.tensor]:
                is_unsure = True
            elif self._is_result_equal(each.tensor):
                is_gone = True
            elif self._is_end[each.tensor] or (with_others and each.tensor in self._leads_to_end):
                return self._remember_end(each.tensor, comes_from)
            reads = [(op, made) for op in self._readers[each.tensor].tolist() for made in self._find_made(op)]
            if any(made < 0 for _, made in reads):
                return self._remember_end(each.tensor, comes_from)
            for op, made in reads:
                if made in seen:
                    continue
                if self._is_gone(each, op, made):
                    is_all = self._shows_all(each.tensor, made)
                    is_gone, is_unsure = is_gone or is_all, is_unsure or not is_all
                    continue
                seen.add(made)
                comes_from[made] = each.tensor
                add((int(self._order[op]), self._describe(made, each, op)))
        if (is_unsure or left_out) and not is_gone:
            return np.empty(0, np.int64)
        pairs = [pair for tensor in left_out for pair in self._pairs[tensor].tolist()]
        self.first_left_out = min([self.first_left_out, *pairs])
        return np.concatenate([self._pairs[tensor] for tensor in sorted(seen - left_out)])

    def _find_made(self, op: int) -> list[int]:
        """Returns the tensors that an op has returned; -1 stands for what the program has got instead."""
        return self._outputs[op].tolist() or [-1]

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
        is_result, most = self._are_results[pairs], IS_MADE * self._noise[pairs]
        differs, is_noise = self._error[pairs] > most, self._error[pairs] <= most  # NaN is neither
        is_equal = is_result.any() and is_noise[is_result].all() and differs.any()
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
        """Yields what an op reads and differs, also through ops whose outputs were not compared."""
        waiting, seen = [op], {-1, op}
        while waiting and len(seen) < _MOST_BEFORE:
            for tensor in self._reads[waiting.pop()].tolist():
                pairs, producer = self._pairs[tensor], int(self._producer[tensor])
                if len(pairs):
                    if (self._error[pairs] > IS_MADE * self._noise[pairs]).any():
                        yield tensor
                elif producer not in seen:
                    seen.add(producer)
                    waiting.append(producer)

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
        wholes = [each for each in others if self._memory.ratio(each, tensor) >= 1]
        return tensor if len(self._pairs[tensor]) or not wholes else wholes[0]

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
        given = json.loads(self._ops.read_args(op) or "{}")
        factors = [given[name] for slot, name in _FACTORS.items() if slot in slots and name in given]
        return max((abs(each) for each in factors if isinstance(each, int | float)), default=1.0)
