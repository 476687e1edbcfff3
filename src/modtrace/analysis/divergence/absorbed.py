"""Finds differences that are gone again in all that both runs compute from them, as those of another order of sums."""

from collections.abc import Sequence

import numpy as np

from ...recording.role import OP_OUTPUT
from ...recording.statistics.moments import Numbers
from ..alignment.sides import Side
from ..step.calls import Bools, Rows
from ..tables.op_flow import OpFlow
from ..tables.op_rules import OVERWRITES, SHAPES_ONLY
from .ranking import Ranking, choose_first

#: What is computed from a difference is equal again if it is apart by so many times the noise of its own at most,
_OF_NOISE = 4.0
#: or so many times what the inputs of the difference were apart by,
_OF_GIVEN = 10.0
#: and the difference is so many times as large: what a large summand hides becomes smaller by less.
_DROP = 30.0

#: So many tensors are looked at for all differences together. Those that were not followed to their end stay.
_MOST_TENSORS = 200_000


def dismiss_absorbed(ranking: Ranking, error: Numbers, sides: Sequence[tuple[Side, Rows]]) -> Ranking:
    """Returns a ranking without blame on differences from which both runs go on to compute what is equal.

    A difference stays if it, or what was computed from it and differs too, comes to an end: what no op reads, what an
    outermost call returns, and what the program reads. What was not compared may differ.

    Args:
        ranking: what is said of each pair.
        error: how far each is apart; NaN where nothing was compared.
        sides: the two recordings, and the row of `values` of each pair.
    """
    if not ranking.is_beyond.any() or not all(len(side.flow.read) for side, _ in sides):
        return ranking
    paths = [_Paths(side, rows, ranking, error) for side, rows in sides]
    candidates = ranking.is_beyond & ~ranking.is_beyond_inputs
    for path in paths:
        candidates &= path.has_tensor
    is_absorbed = np.zeros(len(error), bool)
    for at in np.flatnonzero(candidates).tolist():
        if not is_absorbed[at]:
            is_absorbed[_follow(paths, at)] = True
    ranking = ranking.dismiss(is_absorbed)
    while (first := choose_first(ranking)) is not None:
        gone = _follow(paths, first)
        if not len(gone):
            break
        ranking = ranking.dismiss(np.isin(np.arange(len(error)), gone))
    return ranking


def _follow(paths: Sequence["_Paths"], pair: int) -> Rows:
    """Returns all pairs through which a difference goes until it is gone in both runs; none if it is not."""
    found = [path.follow(pair) for path in paths]
    return np.concatenate(found) if all(map(len, found)) else np.empty(0, np.int64)


class _Paths:
    """What one run has computed from each tensor."""

    def __init__(self, side: Side, rows: Rows, ranking: Ranking, error: Numbers) -> None:
        flow, group = side.flow, side.values.group
        self._ranking, self._error = ranking, error
        outputs = np.flatnonzero(side.values.is_of(OP_OUTPUT))
        of_group = np.full(int(group.max(initial=-1)) + 1, -1, np.int64)
        of_group[group[outputs]] = side.find_tensors(outputs)
        self._tensor = of_group[group[rows]]
        self._pairs, self._pairs_of = _sort_by(self._tensor, np.arange(len(rows)), len(flow.tensors))
        counts = flow.find_reads_of_values(side.ops.are_named(OVERWRITES))
        counts &= ~side.ops.are_named(SHAPES_ONLY)[flow.reader]
        self._readers, self._readers_of = _sort_by(flow.read[counts], flow.reader[counts], len(flow.tensors))
        self._producer, self._is_idle = flow.tensors.producer, _find_idle(flow)
        made = np.flatnonzero((self._producer >= 0) & ~side.is_internal & ~self._is_idle)
        self._outputs, self._outputs_of = _sort_by(self._producer[made], made, len(flow.op_id))
        self._is_end = np.bincount(flow.read[counts], minlength=len(flow.tensors)) == 0
        self._is_end &= ~side.is_internal  # of an op that has run without its backward
        self._is_end[flow.returned.tensor] = True
        self._left = _MOST_TENSORS

    @property
    def has_tensor(self) -> Bools:
        """Which pairs are of a tensor that an op has returned."""
        return np.asarray(self._tensor >= 0)

    def follow(self, pair: int) -> Rows:
        """Returns the pairs through which a difference goes until it is gone, itself first; none if it is not."""
        tensor = int(self._tensor[pair])
        if tensor < 0:
            return np.empty(0, np.int64)
        most, given = float(self._error[pair]) / _DROP, float(self._ranking.given[pair])
        waiting = self._find_outputs(int(self._producer[tensor])) if self._is_idle[tensor] else [tensor]
        seen = {tensor, *waiting}
        while waiting:
            tensor = waiting.pop()
            self._left -= 1
            if self._is_end[tensor] or self._left < 0:
                return np.empty(0, np.int64)
            for op in self._readers[self._readers_of[tensor] : self._readers_of[tensor + 1]].tolist():
                outputs = self._find_outputs(op)
                if not outputs:
                    return np.empty(0, np.int64)
                differing = [made for made in outputs if not self._is_equal(made, given, most)]
                waiting += [made for made in differing if made not in seen]
                seen.update(differing)
        return np.concatenate([self._find_pairs(tensor) for tensor in sorted(seen)])

    def _find_outputs(self, op: int) -> list[int]:
        found: list[int] = self._outputs[self._outputs_of[op] : self._outputs_of[op + 1]].tolist()
        return found

    def _find_pairs(self, tensor: int) -> Rows:
        return self._pairs[self._pairs_of[tensor] : self._pairs_of[tensor + 1]]

    def _is_equal(self, tensor: int, given: float, most: float) -> bool:
        """Returns whether a tensor was compared, and is apart by less than what the difference would leave."""
        pairs = self._find_pairs(tensor)
        limit = np.minimum(np.maximum(_OF_NOISE * self._ranking.noise[pairs], _OF_GIVEN * given), most)
        return bool(len(pairs) and (self._error[pairs] <= limit).all())


def _find_idle(flow: OpFlow) -> Bools:
    """Returns the tensors that no op reads, while their op returned the same memory in another form that is read.

    An op in place returns what it was given, and the whole tensor of which that is a part.
    """
    width = len(flow.tensors.slots) + 1
    _, output = np.unique(flow.tensors.producer * width + flow.tensors.slot, return_inverse=True)
    is_read = np.zeros(len(flow.tensors), bool)
    is_read[np.concatenate([flow.read, flow.returned.tensor])] = True
    has_read = np.zeros(len(flow.tensors), bool)
    has_read[output[is_read]] = True
    return np.asarray(~is_read & has_read[output] & (flow.tensors.producer >= 0))


def _sort_by(keys: Rows, rows: Rows, size: int) -> tuple[Rows, Rows]:
    """Returns the rows in the order of their keys, and where those of each key begin."""
    order = np.argsort(keys, kind="stable")
    return rows[order], np.searchsorted(keys[order], np.arange(size + 1))
