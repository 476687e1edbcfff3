"""Ranks the compared pairs by their errors, their inputs' errors and noise, to find which made a difference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Column, Rows, columns_at, join_columns
from .answer import ABSORBED, AMPLIFIED, EQUAL, GROWN, INHERITED, MADE, NOISE, SEEN, SOURCE, VERDICTS
from .errors import NOTHING, SAMPLES, STATISTICS, Errors
from .noise import Noise
from .pair_inputs import PairInputs

#: An op may enlarge the noise of its inputs by this factor.
_GAIN = 10.0

#: An output stands out if its error is at least this multiple of its inputs' error.
STANDS_OUT = 10.0

#: Errors by statistics must stand out by this much more, as statistics may show only a hundredth of an input's error.
#: Of 2,400 outputs of ops after a planted fault or another seed, whole tensors show a ratio of 5.5 at most, statistics
#: 24.
_UNSURE = 10.0

#: An output whose inputs differ only by noise has made a difference if its error is at least this multiple of noise.
IS_MADE = 4.0

#: The share of an update that is noise if its gradient is not equal in every bit: adaptive optimizers move elements
#: with gradients that are zero but for rounding as far as others.
_OF_UPDATES = 0.02

#: The error of two tensors that differ by an unknown amount, which exceeds any relative error.
_UNKNOWN = 4.0

#: The largest error that counts; statistics give larger ones for tensors whose squares overflow a float64.
_LARGEST = 1e12

_SMALLEST = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """The conclusions for each pair, in the order of use."""

    is_beyond: Bools  # whether its difference exceeds noise and it may be blamed
    is_beyond_as_copy: Bools  # whether it is a copy of an op's output whose difference exceeds noise
    score: Numbers  # its error divided by that of its inputs, or by its own noise if that is larger
    is_beyond_inputs: Bools  # whether its inputs differ by more than noise
    least: Column  # the code in VERDICTS of EQUAL, NOISE or ABSORBED; -1 where nothing was compared
    is_over_noise: Bools  # whether its difference exceeds the noise of its own op
    input_error: Numbers  # the error of its inputs
    noise: Numbers  # the noise of its own op
    own: Numbers  # `noise`, for updates including what an optimizer makes of noise in gradients
    is_estimated: Bools  # whether its error comes from statistics or samples
    is_known: Bools  # whether all its inputs were compared
    is_partial: Bools  # whether its inputs also depend on tensors that were not compared
    is_source: Bools  # whether it was not computed, so that it has no inputs
    is_amplified: Bools  # whether its difference exceeds what noise would be if no summands cancelled
    is_certain: Bools  # whether its bits differ, and those of its inputs do not, by hashes or whole tensors

    def dismiss(self, absorbed: Bools) -> "Ranking":
        """Returns this ranking without blame on the given absorbed pairs."""
        return replace(
            self,
            is_beyond=self.is_beyond & ~absorbed,
            is_beyond_as_copy=self.is_beyond_as_copy & ~absorbed,
            is_over_noise=self.is_over_noise & ~absorbed,
            least=np.where(absorbed, VERDICTS.index(ABSORBED), self.least),
        )

    def find_verdicts(self, first: int | None) -> Column:
        """Returns for each pair the code of its verdict in VERDICTS.

        A difference before the first pair that made one is rounding, which adds up. Any difference after it is a
        consequence: an op with unequal inputs has made nothing if its output has about their error, and has amplified
        them if its output has many times their error.

        Args:
            first: the pair that made the difference, as returned by `choose_first`.
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
    """Returns the ranking: which differences exceed noise, and how far they stand out from their inputs'."""
    error, input_error = _make_finite(errors.error), _make_finite(inputs.error) * noise.gain
    local = np.maximum(noise.local, errors.floor)
    moves_noise = inputs.is_of_optimizer & (input_error > 0) & (noise.accumulated > 0)
    own = np.where(moves_noise, np.maximum(local, _OF_UPDATES), local)
    is_beyond = (
        may_be_blamed & ~inputs.is_copy & (error > own + _GAIN * np.minimum(input_error, noise.accumulated))
    )
    excused = np.maximum.accumulate(np.where(is_beyond | inputs.is_copy, 0.0, np.minimum(error, input_error)))
    is_certain = may_be_blamed & errors.is_unequal & inputs.is_known & (inputs.error == 0) & ~inputs.is_copy
    # A difference that was excused once, as in a gradient that is zero but for rounding, excuses its consequences.
    bound = np.maximum(noise.accumulated, np.where(noise.accumulated > 0, excused, 0.0))
    # Of single elements of parameters that an optimizer has moved, statistics show less than they lead to.
    is_estimated = errors.is_by(STATISTICS) | errors.is_by(SAMPLES)
    is_moved = inputs.is_source & (input_error > 0) & ~is_beyond
    moved = np.maximum.accumulate(np.where(is_moved, error, 0.0))
    excusable = np.maximum(
        np.minimum(input_error, bound), np.where(is_estimated & (input_error > 0), moved, 0.0)
    )
    is_more = may_be_blamed & (error > own + _GAIN * excusable)
    return Ranking(
        is_beyond=is_more & ~inputs.is_copy,
        is_beyond_as_copy=is_more & inputs.is_copy,
        # Sketches cannot show errors below their floor, so the floor counts as noise only where noise is as large.
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
        is_estimated=is_estimated,
        is_known=inputs.is_known,
        is_partial=inputs.is_partial,
        is_source=inputs.is_source,
        is_amplified=may_be_blamed & (error > _GAIN * np.maximum(noise.uncancelled, local / noise.gain)),
        is_certain=is_certain,
    )


def _make_finite(error: Numbers) -> Numbers:
    """Returns errors as finite numbers; 0 where the error is not known."""
    known = np.minimum(np.nan_to_num(error, nan=0.0), _LARGEST)
    return np.where(np.isinf(error), _UNKNOWN, known)


def merge_rankings(rankings: Sequence[Ranking], order: Rows) -> Ranking:
    """Returns several rankings merged into one, in the given order of all pairs."""
    return Ranking(**columns_at(Ranking(**join_columns(rankings)), order))


def choose_first(ranking: Ranking) -> int | None:
    """Returns the pair that made the difference; None if no difference exceeds noise.

    Candidates are pairs with equal inputs, and pairs whose score is at least the square root of the largest score. The
    first candidate is returned. So a difference of a few times the noise does not hide a later one of a thousand times,
    and one of a thousand times is returned even if it is amplified to a million times later.
    """
    rows = np.flatnonzero(ranking.is_beyond)
    if not len(rows):
        return None
    scores = np.maximum(ranking.score[rows], 1.0)
    is_made = ~ranking.is_beyond_inputs[rows] & (scores >= IS_MADE)
    return int(rows[is_made | (scores >= np.sqrt(scores.max()))][0])


def find_made_before(ranking: Ranking, first: int) -> Rows:
    """Returns the pairs before one that differ by more than noise, although all that they come of is equal."""
    is_made = ranking.is_beyond & ranking.is_known & (ranking.input_error == 0) & ~ranking.is_source
    return np.flatnonzero(is_made[:first])


def choose_cancelling(ranking: Ranking, are_results: Bools) -> tuple[int, int] | None:
    """Returns the first pair with unequal bits and equal inputs, and the result of the model that shows it enlarged.

    A difference below noise is blamed only if summands cancel after it, so that a result shows much of it.

    Args:
        ranking: a ranking in which no pair made a difference beyond noise.
        are_results: which pairs are outputs of models.
    """
    amplified = np.flatnonzero(are_results & ranking.is_amplified)
    certain = np.flatnonzero(ranking.is_certain)
    if not len(amplified) or not len(certain) or certain[0] >= amplified[0]:
        return None
    return int(certain[0]), int(amplified[0])


def first_of_each(verdicts: Column, step: Column, phase: Column) -> Rows:
    """Returns for each step and phase the first pair that made a difference, or else the first that inherited one."""
    rows = np.flatnonzero(verdicts >= VERDICTS.index(INHERITED))
    keys = step[rows].astype(np.int64) * 8 + phase[rows]
    order = np.lexsort((verdicts[rows] == VERDICTS.index(INHERITED), keys))
    return np.sort(rows[order[np.append(True, np.diff(keys[order]) != 0)[: len(rows)]]])
