"""Finds differences that are gone again in all that both runs compute from them, as those of another order of sums."""

from collections.abc import Iterator, Sequence

import numpy as np

from ..tables.columns import Bools, Rows
from .answer import ABSORBED, VERDICTS
from .consequences import ComparedRun, Consequences
from .errors import Errors
from .ranking import IS_MADE, Ranking, choose_first


class AbsorbedDifferences:
    """Finds differences from which both runs go on to compute what is equal."""

    def __init__(self, runs: Sequence[ComparedRun], errors: Errors) -> None:
        """Looks at nothing yet.

        Args:
            runs: the two recordings.
            errors: how far each pair is apart.
        """
        self._runs, self._errors = runs, errors
        self._known: dict[int, Consequences] = {}

    def dismiss(self, ranking: Ranking) -> Ranking:
        """Returns a ranking without blame on differences that come to nothing.

        A difference stays if it, or what was computed from it and differs too, comes to an end: what no op reads, what
        an outermost call returns, what the program reads, and what is left in memory that outlives the step. What was
        not compared may differ. Ops that read several differences are left out of the ways of each if what they return
        stands behind what is blamed then, and is explained by that.

        Args:
            ranking: what is said of each pair; the noise is the same at each call.
        """
        if not ranking.is_beyond.any() or not all(len(run.paired.side.flow.read) for run in self._runs):
            return ranking
        return self._dismiss_gradients(self._dismiss_all(ranking))

    def _dismiss_all(self, ranking: Ranking) -> Ranking:
        for path in self._known.values():
            path.begin()
        whole = self._dismiss(ranking, np.ones(len(ranking.score), bool), with_others=True)
        if (first := choose_first(whole)) is None:
            return whole
        run = self._runs[0].paired
        step = run.side.values.step[run.rows]
        without = self._dismiss(whole, step == step[first], with_others=False)
        first, left_out = choose_first(without), min(path.first_left_out for path in self._known.values())
        return without if first is not None and left_out > first else whole

    def _dismiss_gradients(self, ranking: Ranking) -> Ranking:
        """Returns a ranking without blame on gradients in another order, as what the ops of forward returned was.

        Where that came to nothing, the gradients have the order of it: they hold the same numbers.
        """
        run = self._runs[0].paired
        op = run.op
        is_absorbed = np.zeros(len(run.side.ops.name) + 1, bool)
        is_absorbed[op[ranking.least == VERDICTS.index(ABSORBED)]] = True
        is_absorbed[-1] = False
        at = np.flatnonzero(ranking.is_beyond & is_absorbed[np.append(run.side.ops.forward, -1)[op]])
        one, other = (each.measured.stats.take(at) for each in self._runs)
        size = np.fmax(np.abs(one.min), np.abs(one.max))
        apart = [np.abs(getattr(one, name) - getattr(other, name)) for name in ("min", "max", "mean", "rms")]
        is_same = (np.array(apart) <= IS_MADE * ranking.noise[at] * size).all(axis=0) & (one.min < one.max)
        return ranking.dismiss(np.isin(np.arange(len(op)), at[is_same]))

    def _dismiss(self, ranking: Ranking, among: Bools, *, with_others: bool) -> Ranking:
        """Returns a ranking without blame on what of some pairs comes to nothing; see `Consequences.follow`.

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
        for path in self._choose_runs(ranking, pair):
            passed = path.follow(pair, with_others)
            if not len(passed):
                return passed
            found.append({*passed.tolist()})
        return np.array(sorted(set.intersection(*found) | {pair}), np.int64)

    def _choose_runs(self, ranking: Ranking, pair: int) -> Iterator[Consequences]:
        is_ignored = True
        for number in range(2):
            path = self._consequences_of(ranking, number)
            if not path.is_ignored(pair):
                is_ignored = False
                yield path
        if is_ignored:
            yield from self._known.values()

    def _consequences_of(self, ranking: Ranking, number: int) -> Consequences:
        """Returns what the first or the second run has computed, which is read when it is asked for."""
        if number not in self._known:
            size = np.fmax(*(run.measured.stats.l2 for run in self._runs))
            self._known[number] = Consequences(self._runs[number], ranking, self._errors, size)
        return self._known[number]
