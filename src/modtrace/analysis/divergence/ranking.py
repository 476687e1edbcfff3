"""Decides which of the tensors that differ made a difference, and which have inherited theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Column, Rows, columns_at, join_columns
from .answer import ABSORBED, AMPLIFIED, EQUAL, GROWN, INHERITED, MADE, NOISE, SEEN, SOURCE, VERDICTS
from .errors import NOTHING, SAMPLES, STATISTICS, Errors
from .inherited import Inherited
from .noise import Noise

#: An op whose inputs are apart by noise alone may make so many times that of it.
_GAIN = 10.0

#: An output so many times farther apart than the inputs stands out.
STANDS_OUT = 10.0

#: By statistics it has to be so many times that: those of an input show between all and a hundredth of its distance. Of
#: 2,400 outputs of ops behind a planted fault or another seed, whole tensors show 5.5 times as the most, statistics 24.
_UNSURE = 10.0

#: An output whose inputs are apart by noise alone has a difference of its own from so many times the noise on.
IS_MADE = 4.0

#: Adaptive optimizers move elements whose gradients are zero but for rounding as far as others: so much of an update is
#: noise where its gradient is not equal bit by bit.
_OF_UPDATES = 0.02

#: What counts where it is known that two tensors differ, and not how far: more than any relative error.
_UNKNOWN = 4.0

#: Larger errors count as this: statistics give such of a tensor whose squares no float64 can hold.
_LARGEST = 1e12

_SMALLEST = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """What is said of each pair, in the order of execution."""

    is_beyond: Bools  # its difference is more than noise, and it may be blamed
    is_beyond_as_copy: Bools  # its difference is more than noise, and that of the op that returned the tensor
    score: Numbers  # how many times larger than what it has inherited, or than the noise of its own if that is more
    is_beyond_inputs: Bools  # its inputs are apart by more than noise
    least: Column  # the code in VERDICTS of EQUAL, NOISE or ABSORBED; -1 where nothing was compared
    is_over: Bools  # its difference is more than the noise of its own
    given: Numbers  # how far its inputs are apart
    noise: Numbers  # the noise of its own
    own: Numbers  # the same, and of updates what an optimizer makes of gradients that are noise
    is_estimated: Bools  # its difference comes from statistics or samples
    is_known: Bools  # its inputs were compared
    is_partial: Bools  # and not all that these were computed from
    is_source: Bools  # it has none
    #: It is more than noise would be if no summands cancelled.
    is_amplified: Bools
    #: Unequal bits came of equal ones, by hashes or whole tensors, however small the difference is.
    is_certain: Bools

    def dismiss(self, absorbed: Bools) -> "Ranking":
        """Returns the same without blame on these pairs, as nothing that follows from them differs."""
        return replace(
            self,
            is_beyond=self.is_beyond & ~absorbed,
            is_beyond_as_copy=self.is_beyond_as_copy & ~absorbed,
            is_over=self.is_over & ~absorbed,
            least=np.where(absorbed, VERDICTS.index(ABSORBED), self.least),
        )

    def find_verdicts(self, first: int | None) -> Column:
        """Returns the code in VERDICTS of what is said of each pair.

        What differs in front of the first pair that made a difference is rounding, which adds up. What differs behind
        it is a consequence, also where it is as little as that: who was given such inputs has made nothing by returning
        what is about as far apart, and has amplified them by returning what is many times as far apart.

        Args:
            first: the pair that made the difference, as `choose_first` returns it.
        """
        is_behind = np.arange(len(self.score)) > (len(self.score) if first is None else first)
        is_beyond = self.is_beyond | (is_behind & self.is_over)
        has_given = np.where(is_behind, self.given > self.own, self.is_beyond_inputs)
        is_unsure = is_behind & self.is_estimated & (self.given > 0)
        stands_out = self.is_beyond & (self.score >= np.where(is_unsure, STANDS_OUT * _UNSURE, STANDS_OUT))
        stands_out &= ~(is_behind & self.is_partial)
        if first is not None:
            stands_out[first] = True
        kind = np.where(self.is_known, VERDICTS.index(MADE), VERDICTS.index(SEEN))
        kind[has_given] = VERDICTS.index(AMPLIFIED)
        kind[has_given & (self.score < STANDS_OUT)] = VERDICTS.index(GROWN)
        kind[self.is_source & ~has_given] = VERDICTS.index(SOURCE)
        verdicts = np.where(is_beyond | self.is_beyond_as_copy, VERDICTS.index(INHERITED), self.least)
        return np.where(stands_out, kind, verdicts).astype(np.int8)


def rank(errors: Errors, inherited: Inherited, noise: Noise, are_judged: Bools) -> Ranking:
    """Returns which differences are more than noise, and how far each stands out from what its inputs were.

    Args:
        errors: the difference of each pair.
        inherited: those of their inputs.
        noise: what of the differences is noise.
        are_judged: the pairs that may be blamed.
    """
    error, given = _make_finite(errors.error), _make_finite(inherited.error) * noise.gain
    local = np.maximum(noise.local, errors.floor)
    moves_noise = inherited.is_of_optimizer & (given > 0) & (noise.inherited > 0)
    own = np.where(moves_noise, np.maximum(local, _OF_UPDATES), local)
    is_beyond = are_judged & ~inherited.is_copy & (error > own + _GAIN * np.minimum(given, noise.inherited))
    excused = np.maximum.accumulate(np.where(is_beyond | inherited.is_copy, 0.0, np.minimum(error, given)))
    # What was excused once, as a gradient that is zero but for rounding, excuses what follows from it.
    is_certain = (
        are_judged & errors.is_unequal & inherited.is_known & (inherited.error == 0) & ~inherited.is_copy
    )
    bound = np.maximum(noise.inherited, np.where(noise.inherited > 0, excused, 0.0))
    is_more = are_judged & (error > own + _GAIN * np.minimum(given, bound))
    return Ranking(
        is_beyond=is_more & ~inherited.is_copy,
        is_beyond_as_copy=is_more & inherited.is_copy,
        # Sketches do not resolve less than their floor: that counts as noise only where as much is.
        score=np.fmax(
            error / np.maximum(np.maximum(given, own), _SMALLEST),
            np.where(is_certain & (noise.local < errors.floor), IS_MADE, 0.0),
        ),
        is_beyond_inputs=given > np.maximum(own, bound),
        least=np.where(
            errors.is_by(NOTHING),
            -1,
            np.where(errors.are_equal(), VERDICTS.index(EQUAL), VERDICTS.index(NOISE)),
        ),
        is_over=error > local,
        noise=local,
        given=given,
        own=own,
        is_estimated=errors.is_by(STATISTICS) | errors.is_by(SAMPLES),
        is_known=inherited.is_known,
        is_partial=inherited.is_partial,
        is_source=inherited.is_source,
        is_amplified=are_judged & (error > _GAIN * np.maximum(noise.plain, local / noise.gain)),
        is_certain=is_certain,
    )


def _make_finite(error: Numbers) -> Numbers:
    """Returns errors that can be multiplied: 0 where none is known."""
    known = np.minimum(np.nan_to_num(error, nan=0.0), _LARGEST)
    return np.where(np.isinf(error), _UNKNOWN, known)


def merge_rankings(rankings: Sequence[Ranking], order: Rows) -> Ranking:
    """Returns what is said of several lists of pairs, of which all together are put in an order."""
    return Ranking(**columns_at(Ranking(**join_columns(rankings)), order))


def choose_first(ranking: Ranking) -> int | None:
    """Returns the pair that made the difference; None if nothing differs by more than noise.

    It is the first in time that stands out from inputs without a difference, or half as far as the farthest.
    Half is meant in powers of ten. So a difference of a few times the noise does not hide one of a thousand times that
    comes later; and one of a thousand times stays the first where it is amplified later.
    """
    rows = np.flatnonzero(ranking.is_beyond)
    if not len(rows):
        return None
    scores = np.maximum(ranking.score[rows], 1.0)
    is_made = ~ranking.is_beyond_inputs[rows] & (scores >= IS_MADE)
    return int(rows[is_made | (scores >= np.sqrt(scores.max()))][0])


def choose_certain(ranking: Ranking, are_results: Bools) -> tuple[int, int] | None:
    """Returns the pair with the first difference that is no chance, and the result that it has become large in.

    A difference below the noise is a place only where summands cancel behind it, so that a result shows much of it.

    Args:
        ranking: what is said of each pair, none of which made a difference beyond noise.
        are_results: which of them are what models return.
    """
    amplified = np.flatnonzero(are_results & ranking.is_amplified)
    certain = np.flatnonzero(ranking.is_certain)
    if not len(amplified) or not len(certain) or certain[0] >= amplified[0]:
        return None
    return int(certain[0]), int(amplified[0])


def first_of_each(verdicts: Column, step: Column, phase: Column) -> Rows:
    """Returns the pair of each step and phase that made a difference first, or else is the first with one."""
    rows = np.flatnonzero(verdicts >= VERDICTS.index(INHERITED))
    keys = step[rows].astype(np.int64) * 8 + phase[rows]
    order = np.lexsort((verdicts[rows] == VERDICTS.index(INHERITED), keys))
    return np.sort(rows[order[np.append(True, np.diff(keys[order]) != 0)[: len(rows)]]])
