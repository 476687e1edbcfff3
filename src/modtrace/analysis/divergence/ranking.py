"""Decides which of the tensors that differ made a difference, and which have inherited theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from ...recording.statistics.moments import Numbers
from ..step.calls import Bools, Column, Rows
from .errors import Errors
from .inherited import Inherited
from .noise import Noise

#: An op whose inputs are apart by noise alone may make so many times that of it.
_GAIN = 10.0

#: An output so many times farther apart than the inputs stands out.
STANDS_OUT = 10.0

#: An output whose inputs are apart by noise alone has a difference of its own from so many times the noise on.
_IS_MADE = 4.0

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

    is_beyond: Bools  # its difference is more than noise
    score: Numbers  # how many times larger than what it has inherited, or than the noise of its own if that is more
    is_beyond_inputs: Bools  # its inputs are apart by more than noise

    def stands_out(self) -> Bools:
        """Returns which pairs made a difference rather than inherit one."""
        return np.asarray(self.is_beyond & (self.score >= STANDS_OUT))


def rank(errors: Errors, inherited: Inherited, noise: Noise, are_judged: Bools) -> Ranking:
    """Returns which differences are more than noise, and how far each stands out from what its inputs were.

    Args:
        errors: the difference of each pair.
        inherited: those of their inputs.
        noise: what of the differences is noise.
        are_judged: the pairs that may be blamed.
    """
    error, given = _make_finite(errors.error), _make_finite(inherited.error) * noise.gain
    own = np.maximum(noise.local, errors.floor)
    own = np.where(
        inherited.is_update & (given > 0) & (noise.inherited > 0), np.maximum(own, _OF_UPDATES), own
    )
    can_differ = are_judged & ~inherited.is_copy
    is_beyond = can_differ & (error > own + _GAIN * np.minimum(given, noise.inherited))
    excused = np.maximum.accumulate(np.where(is_beyond | inherited.is_copy, 0.0, np.minimum(error, given)))
    # What was excused once, as a gradient that is zero but for rounding, excuses what follows from it.
    bound = np.maximum(noise.inherited, np.where(noise.inherited > 0, excused, 0.0))
    is_beyond = can_differ & (error > own + _GAIN * np.minimum(given, bound))
    return Ranking(
        is_beyond=is_beyond,
        score=error / np.maximum(np.maximum(given, own), _SMALLEST),
        is_beyond_inputs=given > np.maximum(own, bound),
    )


def _make_finite(error: Numbers) -> Numbers:
    """Returns errors that can be multiplied: 0 where none is known."""
    known = np.minimum(np.nan_to_num(error, nan=0.0), _LARGEST)
    return np.where(np.isinf(error), _UNKNOWN, known)


def merge_rankings(rankings: Sequence[Ranking], order: Rows) -> Ranking:
    """Returns what is said of several lists of pairs, of which all together are put in an order."""
    columns = {
        each.name: np.concatenate([getattr(one, each.name) for one in rankings])[order]
        for each in fields(Ranking)
    }
    return Ranking(**columns)


def choose_first(ranking: Ranking) -> int | None:
    """Returns the pair that made the difference; None if nothing differs by more than noise."""
    return _first_among(ranking, np.flatnonzero(ranking.is_beyond))


def first_of_each(ranking: Ranking, step: Column, phase: Column) -> Rows:
    """Returns the first pair of each step and phase that differs by more than noise, as `choose_first` does."""
    rows = np.flatnonzero(ranking.is_beyond)
    keys = step[rows].astype(np.int64) * 8 + phase[rows]
    order = np.argsort(keys, kind="stable")
    parts = np.split(rows[order], np.flatnonzero(np.diff(keys[order])) + 1)
    found = (_first_among(ranking, part) for part in parts)
    return np.sort(np.array([each for each in found if each is not None], np.int64))


def _first_among(ranking: Ranking, rows: Rows) -> int | None:
    """Returns the first in time that stands out from inputs without a difference, or half as far as the farthest.

    Half is meant in powers of ten. So a difference of a few times the noise does not hide one of a thousand times that
    comes later; and one of a thousand times stays the first where it is amplified later.
    """
    if not len(rows):
        return None
    scores = np.maximum(ranking.score[rows], 1.0)
    is_made = ~ranking.is_beyond_inputs[rows] & (scores >= _IS_MADE)
    return int(rows[is_made | (scores >= np.sqrt(scores.max()))][0])
