"""Follows a difference through the ops of one run that read it, until it is gone or comes to an end."""

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

#: A difference is gone in what is computed from it if less than this share of what would be left of it is there.
_GONE = 0.1

#: The largest number of tensors that are followed from a check, to find whether anything is computed from it.
_MOST_OF_SUMMARY = 64

#: The largest number of ops that are followed back from an op, to find whether it reads another difference.
_MOST_BEFORE = 64

#: The arguments by which ops that add multiply what they read as another.
_FACTORS = {"other": "alpha", "tensor1": "value", "tensor2": "value", "end": "weight"}

#: The largest number of tensors that are followed for a ranking. Differences that were not followed to their end stay.
_MOST_TENSORS = 200_000


class _Difference(NamedTuple):
    """A tensor that differs."""

    tensor: int
    error: float  # of a tensor without partner: the error of what it was computed from
    norm: float  # its L2 norm, or the largest that it may have; NaN where that is not known


class Consequences:
    """What one run has computed from each tensor."""

    def __init__(
        self,
        run: PairedRun,
        elsewhere: Numbers,
        are_repeated: Bools,
        ranking: Ranking,
        errors: Errors,
        norm: Numbers,
    ) -> None:
        """Follows nothing yet; for arguments see `AbsorbedDifferences`. `norm` is the larger norm of each pair."""
        tables, rows = run.tables, run.rows
        flow = tables.flow
        self._noise, self._error = ranking.noise, errors.error
        #: The least error that is seen: statistics show none that is as small as the noise.
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
        self._differing: dict[int, set[int]] = {}  # what an op reads and differs, once it is asked for
        self._leads_to_end: set[int] = set()  # what was compared, and a difference of which comes to an end
        self.begin()

    def begin(self) -> None:
        """Begins with another ranking: nothing was followed or left out."""
        self._left = _MOST_TENSORS
        self.first_left_out: float = math.inf  # the first pair of what ops returned that were left out

    def is_ignored(self, pair: int) -> bool:
        """Returns whether the caller of a module that is called another number of times ignores a pair's tensor."""
        tensor = int(self._tensor[pair])
        return tensor >= 0 and all(self._is_ignored[alias] for alias in self._find_aliases(tensor))

    def follow(self, pair: int, with_others: bool) -> Rows:
        """Returns the pairs through which a difference goes until it is gone, itself first; none if it is not gone.

        It is gone where all that comes of it is equal in both runs but for noise. What the caller of a module ignores
        may differ, as long as something else that comes of the difference is equal.

        Args:
            pair: the difference.
            with_others: whether to follow it through ops that also read a difference of another origin.
        """
        tensor = int(self._tensor[pair])
        if tensor < 0:
            return np.empty(0, np.int64)
        first = _Difference(tensor, float(self._error[pair]), float(self._norm[tensor]))
        # In the order of the ops that made them: what each op reads is known before the op is followed.
        waiting = [(-1, first._replace(tensor=alias)) for alias in self._find_aliases(tensor)]
        seen, is_gone, is_unsure = {tensor, *(alias.tensor for _, alias in waiting)}, False, False
        left_out: set[int] = set()  # what ops return that read another difference
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
            if any(not len(self._outputs[op]) for op in readers):  # the program has got what it computes
                return self._remember_end(tensor, comes_from)
            for reader, made in [(op, made) for op in readers for made in self._outputs[op].tolist()]:
                if made in seen:
                    continue
                if self._is_gone(difference, reader, made):
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
        """Returns no pairs, and remembers which tensors that were compared lead to this one."""
        before: int | None = tensor
        while before is not None:
            if len(self._pairs[before]):
                self._leads_to_end.add(before)
            before = comes_from.get(before)
        return np.empty(0, np.int64)

    def _is_result_equal(self, tensor: int) -> bool:
        """Returns whether a tensor differs where its op returned it, and not where the model did."""
        pairs = self._pairs[tensor]
        is_result, most = self._are_results[pairs], IS_MADE * self._noise[pairs]
        differs, is_noise = self._error[pairs] > most, self._error[pairs] <= most  # NaN is neither
        is_equal = is_result.any() and is_noise[is_result].all() and differs.any()
        return bool(is_equal and not self._memory.stays[tensor])

    def _shows_all(self, read: int, made: int) -> bool:
        """Returns whether an output is no count, check or single number that only the program reads.

        Such an output may be equal for tensors that differ.
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
        """Yields the tensors, among those that an op reads, that differ by more than noise.

        Where a tensor was not compared, those that the op behind it reads take its place.
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
        """Returns a tensor, and the others that its op returned at the same slot: the same memory in other forms.

        One that nobody reads is left out where others are read.
        """
        outputs = self._outputs[self._producer[tensor]]
        return outputs[self._slot[outputs] == self._slot[tensor]].tolist() or [tensor]

    def _find_whole(self, tensor: int) -> int:
        """Returns a tensor if it was compared, and else one that was, of which it may be a part: of the same output."""
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
        """Returns whether an output was compared, and its error is less than what the difference would leave.

        A large summand, or a large tensor beside it, hides a difference that stays. So the difference of what was read
        is measured by the norm of the output, and must be more than what was measured there can miss. An op in place
        may write to a part of the memory that differs.
        """
        made = self._find_whole(made)
        pairs = self._pairs[made]
        if self._are_results[pairs].any():
            pairs = pairs[self._are_results[pairs]]
        if not len(pairs) or self._memory.is_part_written(read.tensor, made):
            return False
        error, seen = self._error[pairs], self._resolution[pairs]
        if not self._norm[made]:  # both are 0: nothing is left
            return not error.any()
        # What is not finite, or differs by an unknown error, leaves something whatever its norm is.
        left = read.error if math.isinf(read.error) else read.error * self._find_share(read, op, made)
        is_noise = error <= IS_MADE * self._noise[pairs]
        return bool(left > 0 and (is_noise & (np.maximum(error, seen) <= _GONE * left)).all())

    def _find_share(self, read: _Difference, op: int, made: int) -> float:
        """Estimates how much of a tensor's relative error is left in an output of an op that reads it, from 0 to 1.

        It is the ratio of the norms of what is read and what is made, less where the op averages or where another
        summand is most of the output. NaN if a norm is not known.
        """
        norm, ratio = float(self._norm[made]), self._memory.ratio(made, read.tensor)
        share = read.norm / norm * self._find_factor(op, read.tensor)
        if self._averages[op]:
            share *= ratio
        elif self._adds[op]:
            share *= math.sqrt(max(1.0, ratio))  # it is added to several rows
        summand = int(self._summand[op])
        if summand in (-1, read.tensor):
            return float(np.minimum(1.0, share))
        of_summand = float(self._norm[summand]) * math.sqrt(self._memory.ratio(made, summand))
        return float(np.minimum(1.0, share)) * max(0.0, 1.0 - of_summand / norm)

    def _find_factor(self, op: int, tensor: int) -> float:
        """Returns the factor by which an op multiplies a tensor before it adds it, as `alpha` of an optimizer."""
        if not self._adds[op]:
            return 1.0
        slots = {slot for slot, read in self._reads_of(op) if read == tensor}
        arguments = json.loads(self._ops.read_args(op) or "{}")
        factors = [arguments.get(name) for slot, name in _FACTORS.items() if slot in slots]
        return max((abs(factor) for factor in factors if isinstance(factor, int | float)), default=1.0)
