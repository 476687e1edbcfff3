"""Finds absorbed differences, which are gone in everything that both runs compute from the differing tensors."""

from collections.abc import Iterator

import numpy as np

from ...recording.phase import BACKWARD, OPTIMIZER, PHASES
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
        self._may_be_reordered = ~_are_behind_forward(runs[0])  # as `Consequences.begin` takes it
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
        is_forward = ~_are_behind_forward(self._runs[0])
        ranking = self._dismiss_all(ranking, is_forward)
        is_behind = self._are_behind_absorbed(ranking)
        ranking = ranking.dismiss(ranking.is_beyond & is_behind & self._find_reordered(ranking))
        if not (ranking.is_beyond & is_behind).any():
            return ranking
        return self._dismiss_all(ranking, is_forward | is_behind)

    def _dismiss_all(self, ranking: Ranking, may_be_reordered: Bools) -> Ranking:
        """Returns a ranking without blame on absorbed differences; see `Consequences.begin`."""
        self._may_be_reordered = may_be_reordered
        for consequences in self._consequences.values():
            consequences.begin(may_be_reordered)
        whole = self._dismiss(ranking, np.ones(len(ranking.score), bool), with_others=True)
        if (first := choose_first(whole)) is None:
            return whole
        step = self._runs[0].tables.values.step[self._runs[0].rows]
        without = self._dismiss(whole, step == step[first], with_others=False)
        first = choose_first(without)
        left_out = min(consequences.first_left_out for consequences in self._consequences.values())
        return without if first is not None and left_out > first else whole

    def _are_behind_absorbed(self, ranking: Ranking) -> Bools:
        """Returns which pairs of backward or an optimizer are of modules in which forward absorbed a difference.

        An absorbed output with its elements in another order has a gradient in that order, with the same numbers.
        """
        values, rows = self._runs[0].tables.values, self._runs[0].rows
        keys = values.place[rows].astype(np.int64) << 32 | values.step[rows].astype(np.int64)
        is_behind = _are_behind_forward(self._runs[0])
        is_absorbed = (ranking.least == VERDICTS.index(ABSORBED)) & ~is_behind
        return np.asarray(is_behind & np.isin(keys, keys[is_absorbed]))

    def _find_reordered(self, ranking: Ranking) -> Bools:
        """Returns which unequal pairs of backward or an optimizer seem to have the same numbers in another order."""
        stats, stats_b = (run.measured.stats for run in self._runs)
        is_reordered = _are_behind_forward(self._runs[0]) & (stats.min < stats.max)
        is_reordered &= self._errors.error > IS_MADE * ranking.noise
        with np.errstate(invalid="ignore"):
            most = IS_MADE * ranking.noise * np.fmax(np.abs(stats.min), np.abs(stats.max))
            for name in ("min", "max", "mean", "rms"):
                is_reordered &= np.abs(getattr(stats, name) - getattr(stats_b, name)) <= most
        return is_reordered

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
                    run,
                    self._elsewhere[number],
                    self._are_repeated,
                    self._find_reordered(ranking),
                    ranking,
                    self._errors,
                    norm,
                )
                self._consequences[number].begin(self._may_be_reordered)
            if not self._consequences[number].is_ignored(pair):
                is_ignored = False
                yield self._consequences[number]
        if is_ignored:
            yield from self._consequences.values()


def _are_behind_forward(run: PairedRun) -> Bools:
    """Returns which pairs are of backward or an optimizer."""
    return np.isin(run.tables.values.phase[run.rows], [PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)])
