"""Finds absorbed differences, which are gone in everything that both runs compute from the differing tensors."""

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
    """Finds pairs that differ although everything that both runs compute from them is equal."""

    def __init__(
        self,
        runs: tuple[PairedRun, PairedRun],
        errors: Errors,
        elsewhere: tuple[Numbers, Numbers],
        are_repeated: Bools,
    ) -> None:
        """Starts without following any difference.

        Args:
            runs: the two recordings.
            errors: the error of each pair.
            elsewhere: the error of each tensor of both recordings, as `find_elsewhere` returns it.
            are_repeated: which pairs are of modules that the other recording calls a different number of times.
        """
        self._runs, self._errors = runs, errors
        self._elsewhere, self._are_repeated = elsewhere, are_repeated
        #: The consequences in the first (0) and second run (1), each built when it is first needed.
        self._consequences: dict[int, Consequences] = {}

    def dismiss(self, ranking: Ranking) -> Ranking:
        """Returns a ranking in which absorbed differences are not blamed.

        A difference is not absorbed if it, or an unequal tensor computed from it, reaches an end: a tensor that no op
        reads, an output of an outermost call, a number that the program reads, or memory that outlives the step.
        Tensors that were not compared may differ. Ops that read several differences are not followed if what they
        return comes after the tensor that is then blamed, which explains it.

        Args:
            ranking: the ranking of the pairs; each call must be given the same noise.
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
        """Returns a ranking in which gradients of absorbed outputs are not blamed if they only have another order.

        An absorbed output with its elements in another order has a gradient in that order, with the same numbers.
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
        """Returns a ranking in which absorbed differences among some pairs are not blamed; see `Consequences.follow`.

        After these, each pair that would be blamed next is followed, until one is not absorbed.
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
        """Returns the pairs through which a difference passes until it is gone in both runs; none if it is not gone.

        A tensor that a module's caller ignores in one run, such as the last state of an LSTM, is followed in the other.
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
