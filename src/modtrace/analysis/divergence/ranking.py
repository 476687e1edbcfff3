"""Ranks the compared pairs: which made a difference, by their errors, the errors of their inputs, and noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Column, Rows, columns_at, join_columns
from .answer import ABSORBED, AMPLIFIED, EQUAL, GROWN, INHERITED, MADE, NOISE, SEEN, SOURCE, VERDICTS
from .errors import NOTHING, SAMPLES, STATISTICS, Errors
from .noise import Noise
from .pair_inputs import PairInputs

#: The factor by which an op may enlarge the noise of its inputs.
_GAIN = 10.0

#: The least ratio of the errors of output and inputs that stands out.
STANDS_OUT = 10.0

#: By statistics the ratio has to be larger by this: those of an input show between all and a hundredth of its error. Of
#: 2,400 outputs of ops behind a planted fault or another seed, whole tensors show 5.5 times as the most, statistics 24.
_UNSURE = 10.0

#: The least ratio of error and noise at which an output, whose inputs differ by noise at most, has made a difference.
IS_MADE = 4.0

#: The share of an update that is noise where its gradient is not equal bit by bit: adaptive optimizers move elements
#: whose gradients are zero but for rounding as far as others.
_OF_UPDATES = 0.02

#: The error of two tensors that are known to differ, and not how far: more than any relative error.
_UNKNOWN = 4.0

#: The largest error that counts: statistics give larger ones of a tensor whose squares no float64 can hold.
_LARGEST = 1e12

_SMALLEST = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """What is concluded of each pair, in the order of use."""

    is_beyond: Bools  # its difference is more than noise, and it may be blamed
    is_beyond_as_copy: Bools  # its difference is more than noise, and that of the op that returned the tensor
    score: Numbers  # its error over that of its inputs, or over the noise of its own if that is more
    is_beyond_inputs: Bools  # its inputs differ by more than noise
    least: Column  # the code in VERDICTS of EQUAL, NOISE or ABSORBED; -1 where nothing was compared
    is_over_noise: Bools  # its difference is more than the noise of its own
    input_error: Numbers  # the error of its inputs
    noise: Numbers  # the noise of its own
    own: Numbers  # the same, and of updates what an optimizer makes of gradients that are noise
    is_estimated: Bools  # its difference comes from statistics or samples
    is_known: Bools  # its inputs were compared
    is_partial: Bools  # not all that its inputs were computed from was compared
    is_source: Bools  # it was not computed, and has no inputs
    is_amplified: Bools  # its difference is more than noise would be if no summands cancelled
    is_certain: Bools  # its bits differ and those of its inputs do not, by hashes or whole tensors

    def dismiss(self, absorbed: Bools) -> "Ranking":
        """Returns the same without blame on these pairs, as nothing that follows from them differs."""
        return replace(
            self,
            is_beyond=self.is_beyond & ~absorbed,
            is_beyond_as_copy=self.is_beyond_as_copy & ~absorbed,
            is_over_noise=self.is_over_noise & ~absorbed,
            least=np.where(absorbed, VERDICTS.index(ABSORBED), self.least),
        )

    def find_verdicts(self, first: int | None) -> Column:
        """Returns the code in VERDICTS for each pair.

        What differs before the first pair that made a difference is rounding, which adds up. What differs behind it is
        a consequence, however small: an op with such inputs has made nothing if its output has about their error, and
        has amplified them if its output has many times that.

        Args:
            first: the pair that made the difference, as `choose_first` returns it.
        """
        is_behind = np.arange(len(self.score)) > (len(self.score) if first is None else first)
        is_beyond = self.is_beyond | (is_behind & self.is_over_noise)
        inputs_differ = np.where(is_behind, self.input_error > self.own, self.is_beyond_inputs)
        is_unsure = is_behind & self.is_estimated & (self.input_error > 0)
        stands_out = self.is_beyond & (self.score >= np.where(is_unsure, STANDS_OUT * _UNSURE, STANDS_OUT))
        stands_out &= ~(is_behind & self.is_partial)
        if first is not None:
            stands_out[first] = True
        kind = np.where(self.is_known, VERDICTS.index(MADE), VERDICTS.index(SEEN))
        kind[inputs_differ] = VERDICTS.index(AMPLIFIED)
        kind[inputs_differ & (self.score < STANDS_OUT)] = VERDICTS.index(GROWN)
        kind[self.is_source & ~inputs_differ] = VERDICTS.index(SOURCE)
        verdicts = np.where(is_beyond | self.is_beyond_as_copy, VERDICTS.index(INHERITED), self.least)
        return np.where(stands_out, kind, verdicts).astype(np.int8)


def rank(errors: Errors, inputs: PairInputs, noise: Noise, may_be_blamed: Bools) -> Ranking:
    """Returns which differences are more than noise, and how far each stands out from those of its inputs."""
    error, input_error = _make_finite(errors.error), _make_finite(inputs.error) * noise.gain
    local = np.maximum(noise.local, errors.floor)
    moves_noise = inputs.is_of_optimizer & (input_error > 0) & (noise.accumulated > 0)
    own = np.where(moves_noise, np.maximum(local, _OF_UPDATES), local)
    is_beyond = (
        may_be_blamed & ~inputs.is_copy & (error > own + _GAIN * np.minimum(input_error, noise.accumulated))
    )
    excused = np.maximum.accumulate(np.where(is_beyond | inputs.is_copy, 0.0, np.minimum(error, input_error)))
    is_certain = may_be_blamed & errors.is_unequal & inputs.is_known & (inputs.error == 0) & ~inputs.is_copy
    # What was excused once, as a gradient that is zero but for rounding, excuses what follows from it.
    bound = np.maximum(noise.accumulated, np.where(noise.accumulated > 0, excused, 0.0))
    is_more = may_be_blamed & (error > own + _GAIN * np.minimum(input_error, bound))
    return Ranking(
        is_beyond=is_more & ~inputs.is_copy,
        is_beyond_as_copy=is_more & inputs.is_copy,
        # Sketches do not resolve less than their floor: that counts as noise only where as much is.
        score=np.fmax(
            error / np.maximum(np.maximum(input_error, own), _SMALLEST),
            np.where(is_certain & (noise.local < errors.floor), IS_MADE, 0.0),
        ),
        is_beyond_inputs=input_error > np.maximum(own, bound),
        least=np.where(
            errors.is_by(NOTHING),
            -1,
            np.where(errors.are_equal(), VERDICTS.index(EQUAL), VERDICTS.index(NOISE)),
        ),
        is_over_noise=error > local,
        noise=local,
        input_error=input_error,
        own=own,
        is_estimated=errors.is_by(STATISTICS) | errors.is_by(SAMPLES),
        is_known=inputs.is_known,
        is_partial=inputs.is_partial,
        is_source=inputs.is_source,
        is_amplified=may_be_blamed & (error > _GAIN * np.maximum(noise.uncancelled, local / noise.gain)),
        is_certain=is_certain,
    )


def _make_finite(error: Numbers) -> Numbers:
    """Returns errors that can be multiplied: 0 where none is known."""
    known = np.minimum(np.nan_to_num(error, nan=0.0), _LARGEST)
    return np.where(np.isinf(error), _UNKNOWN, known)


def merge_rankings(rankings: Sequence[Ranking], order: Rows) -> Ranking:
    """Returns the rankings of several lists of pairs as one, in the given order of all pairs."""
    return Ranking(**columns_at(Ranking(**join_columns(rankings)), order))


def choose_first(ranking: Ranking) -> int | None:
    """Returns the pair that made the difference; None if nothing differs by more than noise.

    A score is how many times the noise an error is. The first pair is returned of those whose inputs do not differ, and
    of those whose score is at least the square root of the largest. So a difference of a few times the noise does not
    hide a later one of a thousand times, and one of a thousand times is returned though it is amplified to a million
    times later.
    """
    rows = np.flatnonzero(ranking.is_beyond)
    if not len(rows):
        return None
    scores = np.maximum(ranking.score[rows], 1.0)
    is_made = ~ranking.is_beyond_inputs[rows] & (scores >= IS_MADE)
    return int(rows[is_made | (scores >= np.sqrt(scores.max()))][0])


def choose_cancelling(ranking: Ranking, are_results: Bools) -> tuple[int, int] | None:
    """Returns the first pair whose bits differ while those of its inputs do not, and the result that shows it enlarged.

    A difference below the noise is blamed only where summands cancel behind it, so that a result shows much of it.

    Args:
        ranking: of pairs, none of which made a difference beyond noise.
        are_results: which of them are what models return.
    """
    amplified = np.flatnonzero(are_results & ranking.is_amplified)
    certain = np.flatnonzero(ranking.is_certain)
    if not len(amplified) or not len(certain) or certain[0] >= amplified[0]:
        return None
    return int(certain[0]), int(amplified[0])


def first_of_each(verdicts: Column, step: Column, phase: Column) -> Rows:
    """Returns the pair of each step and phase that made a difference first, or else the first that has one."""
    rows = np.flatnonzero(verdicts >= VERDICTS.index(INHERITED))
    keys = step[rows].astype(np.int64) * 8 + phase[rows]
    order = np.lexsort((verdicts[rows] == VERDICTS.index(INHERITED), keys))
    return np.sort(rows[order[np.append(True, np.diff(keys[order]) != 0)[: len(rows)]]])
