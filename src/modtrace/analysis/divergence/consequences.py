"""Follows a difference through the ops of one run that read it, until it is gone or reaches an end."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Groups, Rows
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

#: A difference counts as gone if less than this share of its expected remainder is found in an output.
_GONE = 0.1

#: The largest number of tensors that are followed from a count or check, to find whether tensors are computed from it.
_MOST_OF_SUMMARY = 64

#: The largest number of ops that are traced back from an op, to find whether it reads another difference.
_MOST_BEFORE = 64

#: The argument that holds the factor by which an additive op multiplies what it reads at a slot.
_FACTORS = {"other": "alpha", "tensor1": "value", "tensor2": "value", "end": "weight"}

#: The largest number of tensors that are followed for one ranking. After that, differences count as not gone.
_MOST_TENSORS = 200_000


class _Difference(NamedTuple):
    """A tensor that differs between the runs."""

    tensor: int
    error: float  # for a tensor without partner, the error of the tensor that it was computed from
    norm: float  # the tensor's L2 norm, or an upper bound of it; NaN where it is not known


class Consequences:
    """Finds what becomes of a difference in the ops of one run."""

    def __init__(
        self,
        run: PairedRun,
        elsewhere: Numbers,
        are_repeated: Bools,
        are_reordered: Bools,
        ranking: Ranking,
        errors: Errors,
        norm: Numbers,
    ) -> None:
        """Starts with nothing followed. See `AbsorbedDifferences` for the other arguments.

        Args:
            are_reordered: which pairs of backward or an optimizer have the same numbers in another order.
            norm: the larger norm of each pair.
        """
        tables, rows = run.tables, run.rows
        flow = tables.flow
        self._noise, self._error = ranking.noise, errors.error
        self._are_reordered = are_reordered
        #: The smallest error that each measurement can show; statistics cannot show one as small as the noise.
        self._resolution = np.where(ranking.is_estimated, ranking.noise, errors.floor)
        self._tensor = find_tensors(tables, rows, errors.error > ranking.noise)
        self._pairs = Groups(self._tensor, np.arange(len(rows)), len(flow.tensors))
        self._norm = find_norms(tables)
        np.fmax.at(self._norm, self._tensor[self._tensor >= 0], norm[self._tensor >= 0])
        self._is_elsewhere = ~np.isnan(elsewhere)
        self._readers, self._reads_of, self._ops = flow.readers, flow.reads_of, tables.ops
        is_read = np.zeros(len(flow.tensors), bool)
        is_read[flow.read] = True
        is_unread_workspace = tables.is_internal & ~is_read
        made = np.flatnonzero(
            (flow.tensors.producer >= 0) & ~is_unread_workspace & ~find_unread_aliases(flow)
        )
        self._outputs = Groups(flow.tensors.producer[made], made, len(flow.op_id))
        self._producer, self._slot = flow.tensors.producer, flow.tensors.slot
        self._memory = SharedMemory(tables)
        self._is_end = ~(is_read | tables.is_internal) | self._memory.stays
        self._is_end[flow.returned.tensor] = True
        self._is_end[find_kept(run, self._tensor, errors.error > IS_MADE * ranking.noise)] = True
        self._is_end |= self._memory.find_kept_gradients(tables)
        self._are_results = run.are_results
        self._is_ignored = np.zeros(len(flow.tensors), bool)
        self._is_ignored[find_module_outputs(tables, rows[are_repeated])] = True
        self._is_ignored[np.concatenate([flow.read, flow.returned.tensor])] = False
        self._is_ignored &= ~self._memory.stays
        self._is_whole = flow.tensors.is_whole
        self._adds, self._averages = tables.ops.are_named(ADDITIVE), tables.ops.are_named({"mean"})
        self._summand = find_summands(tables)
        self._differing: dict[int, set[int]] = {}  # by op, the unequal tensors that it reads

    def begin(self, may_be_reordered: Bools) -> None:
        """Resets what was followed and left out, for another ranking.

        Args:
            may_be_reordered: the pairs whose difference counts as gone where only the order of numbers is left of it.
        """
        self._left, self._may_be_reordered = _MOST_TENSORS, may_be_reordered
        self._leads_to_end: set[int] = set()  # compared tensors from which a difference reaches an end
        self.first_left_out: float = math.inf  # the first pair among outputs of ops that were left out

    def is_ignored(self, pair: int) -> bool:
        """Returns whether a pair's tensor is ignored by the caller of a module with another number of calls."""
        tensor = int(self._tensor[pair])
        return tensor >= 0 and all(self._is_ignored[alias] for alias in self._find_aliases(tensor))

    def follow(self, pair: int, with_others: bool) -> Rows:
        """Returns the pairs, the given one first, through which a difference passes until it is gone; none if it stays.

        A difference is gone if everything computed from it is equal in both runs but for noise. Tensors that a module's
        caller ignores may differ, if something else that is computed from the difference is equal.

        Args:
            pair: the pair that differs.
            with_others: whether to follow it through ops that also read a difference from elsewhere.
        """
        tensor = int(self._tensor[pair])
        if tensor < 0:
            return np.empty(0, np.int64)
        first = _Difference(tensor, float(self._error[pair]), float(self._norm[tensor]))
        may_be_reordered = bool(self._may_be_reordered[pair])
        # Ops are taken in order of execution, so that everything an op reads is known before the op is followed.
        waiting = [(-1, first._replace(tensor=alias)) for alias in self._find_aliases(tensor)]
        seen, is_gone, is_unsure = {tensor, *(alias.tensor for _, alias in waiting)}, False, False
        left_out: set[int] = set()  # outputs of ops that also read another difference
        comes_from: dict[int, int] = {}
        add = waiting.append if with_others else partial(heappush, waiting)
        while waiting:
            time, difference = waiting.pop() if with_others else heappop(waiting)
            tensor = difference.tensor
            if not with_others and time >= 0 and self._reads_another(int(self._producer[tensor]), seen):
                left_out.add(tensor)
                continue
            self._left -= 1
            if self._left < 0:
                return np.empty(0, np.int64)
            if self._is_elsewhere[tensor]:
                is_gone = True
                continue
            if self._is_ignored[tensor]:
                is_unsure = True
            elif self._is_result_equal(tensor):
                is_gone = True
            elif self._is_end[tensor] or (with_others and tensor in self._leads_to_end):
                return self._remember_end(tensor, comes_from)
            readers = self._readers[tensor].tolist()
            if any(not len(self._outputs[op]) for op in readers):  # the program gets its result
                return self._remember_end(tensor, comes_from)
            for reader, made in [(op, made) for op in readers for made in self._outputs[op].tolist()]:
                if made in seen:
                    continue
                if (may_be_reordered and self._is_reordered(made)) or self._is_gone(difference, reader, made):
                    is_all = self._shows_all(tensor, made)
                    is_gone, is_unsure = is_gone or is_all, is_unsure or not is_all
                    continue
                seen.add(made)
                comes_from[made] = tensor
                add((int(self._ops.order[reader]), self._describe(made, difference, reader)))
        if (is_unsure or left_out) and not is_gone:
            return np.empty(0, np.int64)
        pairs = [pair for left in left_out for pair in self._pairs[left].tolist()]
        self.first_left_out = min([self.first_left_out, *pairs])
        return np.concatenate([self._pairs[passed] for passed in sorted(seen - left_out)])

    def _remember_end(self, tensor: int, comes_from: Mapping[int, int]) -> Rows:
        """Returns no pairs, and remembers the compared tensors that lead to this one, which is an end."""
        before: int | None = tensor
        while before is not None:
            if len(self._pairs[before]):
                self._leads_to_end.add(before)
            before = comes_from.get(before)
        return np.empty(0, np.int64)

    def _is_result_equal(self, tensor: int) -> bool:
        """Returns whether a tensor differs as its op returned it, but is equal as the model returned it."""
        pairs = self._pairs[tensor]
        is_result, most = self._are_results[pairs], IS_MADE * self._noise[pairs]
        differs, is_noise = self._error[pairs] > most, self._error[pairs] <= most  # a NaN error is in neither
        is_equal = is_result.any() and is_noise[is_result].all() and differs.any()
        return bool(is_equal and not self._memory.stays[tensor])

    def _shows_all(self, read: int, made: int) -> bool:
        """Returns whether an output is no count, check or single number that only the program reads.

        A count, check or single number may be equal although the tensors behind it differ.
        """
        is_summary = self._is_whole[made] > self._is_whole[read] or self._memory.is_single(made, read)
        return not is_summary or self._is_used(made)

    def _is_used(self, summary: int) -> bool:
        """Returns whether ops compute tensors of several real numbers from a count, check or single number."""
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
        """Returns whether an op reads an unequal tensor that is not among those seen while following a difference."""
        if op not in self._differing:
            self._differing[op] = {*self._find_differing(op)}
        return not self._differing[op] <= seen

    def _find_differing(self, op: int) -> Iterator[int]:
        """Yields the tensors read by an op that differ by more than noise.

        For a tensor that was not compared, the tensors that its op reads are checked instead.
        """
        waiting, seen = [op], {-1, op}
        while waiting and len(seen) < _MOST_BEFORE:
            for _, tensor in self._reads_of(waiting.pop()):
                pairs, producer = self._pairs[tensor], int(self._producer[tensor])
                if len(pairs):
                    if (self._error[pairs] > IS_MADE * self._noise[pairs]).any():
                        yield tensor
                elif producer not in seen:
                    seen.add(producer)
                    waiting.append(producer)

    def _find_aliases(self, tensor: int) -> Iterable[int]:
        """Returns a tensor and its aliases: other views of the same memory that its op returned at the same slot.

        Aliases that no op reads are left out if others are read.
        """
        outputs = self._outputs[self._producer[tensor]]
        return outputs[self._slot[outputs] == self._slot[tensor]].tolist() or [tensor]

    def _find_whole(self, tensor: int) -> int:
        """Returns a tensor if it was compared, else a compared alias at least as large, of which it may be a part."""
        if len(self._pairs[tensor]):
            return tensor
        aliases = (alias for alias in self._find_aliases(tensor) if len(self._pairs[alias]))
        return next((alias for alias in aliases if self._memory.ratio(alias, tensor) >= 1), tensor)

    def _describe(self, made: int, read: _Difference, op: int) -> _Difference:
        pairs = self._pairs[made]
        if len(pairs):
            return _Difference(made, float(self._error[pairs].max()), float(self._norm[made]))
        if not self._ops.is_plain[op]:
            return _Difference(made, read.error, float(self._norm[made]))
        share = min(1.0, math.sqrt(self._memory.ratio(made, read.tensor)))
        return _Difference(made, read.error, read.norm * share)

    def _is_gone(self, read: _Difference, op: int, made: int) -> bool:
        """Returns whether an output was compared, and its error is smaller than the remainder of a difference would be.

        A difference may hide behind a large summand or beside a large tensor. So the expected remainder is scaled by
        the norm of the output, and it must exceed what the measurement can miss. An op in place may write to only a
        part of the memory that differs.
        """
        made = self._find_whole(made)
        pairs = self._pairs[made]
        if self._are_results[pairs].any():
            pairs = pairs[self._are_results[pairs]]
        if not len(pairs) or self._memory.is_part_written(read.tensor, made):
            return False
        error, seen = self._error[pairs], self._resolution[pairs]
        if not self._norm[made]:  # both tensors are 0, so nothing of the difference is left
            return not error.any()
        # An infinite or unknown error leaves a remainder whatever the norms are.
        left = read.error if math.isinf(read.error) else read.error * self._find_share(read, op, made)
        is_noise = error <= IS_MADE * self._noise[pairs]
        return bool(left > 0 and (is_noise & (np.maximum(error, seen) <= _GONE * left)).all())

    def _is_reordered(self, made: int) -> bool:
        """Returns whether an output was compared, and has the same numbers in another order."""
        pairs = self._pairs[self._find_whole(made)]
        return bool(len(pairs) and self._are_reordered[pairs].all())

    def _find_share(self, read: _Difference, op: int, made: int) -> float:
        """Estimates the share, from 0 to 1, of a tensor's relative error that remains in the output of an op.

        It is the ratio of the norms of the tensor and the output, reduced where the op averages or where another
        summand makes up most of the output. It is NaN if a norm is not known.
        """
        norm, ratio = float(self._norm[made]), self._memory.ratio(made, read.tensor)
        share = read.norm / norm * self._find_factor(op, read.tensor)
        if self._averages[op]:
            share *= ratio
        elif self._adds[op]:
            share *= math.sqrt(max(1.0, ratio))  # broadcasting adds the tensor to several rows
        summand = int(self._summand[op])
        if summand in (-1, read.tensor):
            return float(np.minimum(1.0, share))
        of_summand = float(self._norm[summand]) * math.sqrt(self._memory.ratio(made, summand))
        return float(np.minimum(1.0, share)) * max(0.0, 1.0 - of_summand / norm)

    def _find_factor(self, op: int, tensor: int) -> float:
        """Returns the factor by which an additive op multiplies a tensor, such as `alpha` of an optimizer."""
        if not self._adds[op]:
            return 1.0
        slots = {slot for slot, read in self._reads_of(op) if read == tensor}
        arguments = json.loads(self._ops.read_args(op) or "{}")
        factors = [arguments.get(name) for slot, name in _FACTORS.items() if slot in slots]
        return max((abs(factor) for factor in factors if isinstance(factor, int | float)), default=1.0)
