"""Decides which of the tensors that differ made a difference, and which have inherited theirs."""

from dataclasses import dataclass

import numpy as np

from ...recording.statistics.moments import Numbers
from ..step.calls import Column, Rows
from .errors import Errors
from .inherited import Inherited
from .measured import Bools
from .noise import Noise

#: An op whose inputs are apart by noise alone may make so many times that of it.
_GAIN = 10.0

#: An output so many times farther apart than the inputs stands out.
STANDS_OUT = 10.0

#: What counts where it is known that two tensors differ, and not how far: more than any relative error.
_UNKNOWN = 4.0

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


def rank(errors: Errors, inherited: Inherited, noise: Noise) -> Ranking:
    """Returns which differences are more than noise, and how far each stands out from what its inputs were."""
    error = np.where(np.isinf(errors.error), _UNKNOWN, np.nan_to_num(errors.error, nan=0.0))
    given = np.where(np.isinf(inherited.error), _UNKNOWN, inherited.error)
    own = np.maximum(noise.local, errors.floor)
    allowed = own + _GAIN * np.minimum(given, noise.inherited)
    is_beyond = (error > allowed) & ~inherited.is_copy
    return Ranking(
        is_beyond=is_beyond,
        score=error / np.maximum(np.maximum(given, own), _SMALLEST),
        is_beyond_inputs=given > np.maximum(own, noise.inherited),
    )


def choose_first(ranking: Ranking, among: Bools | None = None) -> int | None:
    """Returns the pair that made the difference; None if nothing differs by more than noise.

    It is the first in time of those that stand out half as far as the farthest, in powers of ten. So a difference of a
    few times the noise does not hide one of a thousand times that comes later; and one of a thousand times stays the
    first where it is amplified later.
    """
    beyond = ranking.is_beyond if among is None else ranking.is_beyond & among
    rows = np.flatnonzero(beyond)
    if not len(rows):
        return None
    scores = np.maximum(ranking.score[rows], 1.0)
    return int(rows[scores >= np.sqrt(scores.max())][0])


def first_of_each(ranking: Ranking, step: Column, phase: Column) -> Rows:
    """Returns the first pair of each step and phase that differs by more than noise, as `choose_first` does."""
    rows = np.flatnonzero(ranking.is_beyond)
    keys = step[rows].astype(np.int64) * 8 + phase[rows]
    found = []
    order = np.argsort(keys, kind="stable")
    for some in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        scores = np.maximum(ranking.score[rows[some]], 1.0)
        if len(some):
            found.append(rows[some][scores >= np.sqrt(scores.max())][0])
    return np.sort(np.array(found, np.int64))
