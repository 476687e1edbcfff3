"""Finds differences that are gone again in all that both runs compute from them, as those of another order of sums."""

from collections.abc import Iterator

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Rows
from .answer import ABSORBED, VERDICTS
from .consequences import Consequences
from .errors import Errors
from .paired_run import PairedRun
from .ranking import IS_MADE, Ranking, choose_first


class AbsorbedDifferences:
    """Finds differences from which both runs go on to compute what is equal."""

    def __init__(
        self,
        runs: tuple[PairedRun, PairedRun],
        errors: Errors,
        elsewhere: tuple[Numbers, Numbers],
        are_repeated: Bools,
    ) -> None:
        """Follows nothing yet.

        Args:
            runs: the two recordings.
            errors: the error of each pair.
            elsewhere: of each tensor of both, as `find_elsewhere` returns it.
            are_repeated: the pairs whose modules are called another number of times in the other recording.
        """
        self._runs, self._errors = runs, errors
        self._elsewhere, self._are_repeated = elsewhere, are_repeated
        #: Of the first or the second run, once they are asked for.
        self._consequences: dict[int, Consequences] = {}

    def dismiss(self, ranking: Ranking) -> Ranking:
        """Returns a ranking without blame on differences that come to nothing.

        A difference stays if it, or what was computed from it and differs too, comes to an end: what no op reads, what
        an outermost call returns, what the program reads, and what is left in memory that outlives the step. What was
        not compared may differ. Ops that read several differences are left out of the ways of each if what they return
        stands behind what is blamed then, and is explained by that.

        Args:
            ranking: of the pairs; the noise is the same at each call.
        """
        if not ranking.is_beyond.any() or not all(len(run.tables.flow.read) for run in self._runs):
            return ranking
        return self._dismiss_gradients(self._dismiss_all(ranking))

    def _dismiss_all(self, ranking: Ranking) -> Ranking:
        for consequences in self._consequences.values():
            consequences.begin()
        whole = self._dismiss(ranking, np.ones(len(ranking.score), bool), with_others=True)
        if (first := choose_first(whole)) is None:
            return whole
        step = self._runs[0].tables.values.step[self._runs[0].rows]
        without = self._dismiss(whole, step == step[first], with_others=False)
        first = choose_first(without)
        left_out = min(consequences.first_left_out for consequences in self._consequences.values())
        return without if first is not None and left_out > first else whole

    def _dismiss_gradients(self, ranking: Ranking) -> Ranking:
        """Returns a ranking without blame on gradients in another order, as what the ops of forward returned was.

        Where that came to nothing, the gradients have the order of it: they hold the same numbers.
        """
        run = self._runs[0]
        is_absorbed = np.zeros(len(run.is_unpaired), bool)
        is_absorbed[run.op[ranking.least == VERDICTS.index(ABSORBED)]] = True
        is_absorbed[-1] = False
        gradients = ranking.is_beyond & is_absorbed[np.append(run.tables.ops.forward, -1)[run.op]]
        pairs = np.flatnonzero(gradients)
        stats, stats_b = (paired.measured.stats.take(pairs) for paired in self._runs)
        most = IS_MADE * ranking.noise[pairs] * np.fmax(np.abs(stats.min), np.abs(stats.max))
        gradients[pairs] = stats.min < stats.max
        for name in ("min", "max", "mean", "rms"):
            gradients[pairs] &= np.abs(getattr(stats, name) - getattr(stats_b, name)) <= most
        return ranking.dismiss(gradients)

    def _dismiss(self, ranking: Ranking, among: Bools, *, with_others: bool) -> Ranking:
        """Returns a ranking without blame on what of some pairs comes to nothing; see `Consequences.follow`.

        Then those are followed that would be blamed, until one stays.
        """
        is_absorbed = np.zeros(len(ranking.score), bool)
        for pair in np.flatnonzero(ranking.is_beyond & ~ranking.is_beyond_inputs & among).tolist():
            if not is_absorbed[pair]:
                is_absorbed[self._follow(ranking, pair, with_others)] = True
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
        gone: list[set[int]] = []
        for consequences in self._choose_runs(ranking, pair):
            passed = consequences.follow(pair, with_others)
            if not len(passed):
                return passed
            gone.append({*passed.tolist()})
        return np.array(sorted(set.intersection(*gone) | {pair}), np.int64)

    def _choose_runs(self, ranking: Ranking, pair: int) -> Iterator[Consequences]:
        is_ignored = True
        for number, run in enumerate(self._runs):
            if number not in self._consequences:
                norm = np.fmax(*(paired.measured.stats.l2 for paired in self._runs))
                self._consequences[number] = Consequences(
                    run, self._elsewhere[number], self._are_repeated, ranking, self._errors, norm
                )
            if not self._consequences[number].is_ignored(pair):
                is_ignored = False
                yield self._consequences[number]
        if is_ignored:
            yield from self._consequences.values()
