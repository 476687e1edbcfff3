"""Computes medians and quartiles of numbers over several steps, and finds outliers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .columns import Bools, Column

_QUANTILES = np.array([0, 0.25, 0.5, 0.75, 1])


@dataclass(frozen=True, slots=True)
class Quartiles:
    """How a number differs between steps, as integers; steps in which it is not known are left out."""

    least: int
    low: int  # the first quartile
    median: int
    high: int  # the third quartile
    most: int

    @property
    def range(self) -> float | None:
        """The interquartile range as a part of the median; None if the median is 0."""
        return (self.high - self.low) / self.median if self.median else None


def find_quantiles(values: Column, known: Bools) -> Column:
    """Returns the smallest, the quartiles and the largest of each row of a matrix; 0 for a row without known values.

    Args:
        values: a row for each thing, a column for each step.
        known: whether each value counts.
    """
    if not values.shape[1]:
        return np.zeros((len(values), len(_QUANTILES)))
    known = np.broadcast_to(known, values.shape)
    ordered = np.sort(np.where(known, values, np.inf), axis=1)  # exact, as times and sizes are below 2**53
    count = known.sum(axis=1)[:, None]
    last = np.maximum(count - 1, 0)
    below = np.floor(last * _QUANTILES).astype(np.int64)
    low = np.take_along_axis(ordered, below, axis=1)
    high = np.take_along_axis(ordered, np.minimum(below + 1, last), axis=1)
    low, high = np.where(count > 0, low, 0), np.where(count > 0, high, 0)
    quantiles: Column = low + (high - low) * (last * _QUANTILES - below)
    return quantiles


def find_medians(values: Column, known: Bools) -> Column:
    """Returns the median of the known values in each row of a matrix; 0 for a row without any."""
    medians: Column = find_quantiles(values, known)[:, 2]
    return medians


def find_median(values: Column) -> int | None:
    """Returns the median of a column, rounded; None if all are -1, which are not known."""
    known = values[values >= 0]
    return int(np.rint(np.median(known))) if len(known) else None


def find_median_share(parts: Column, wholes: Column) -> float | None:
    """Returns the median of the shares that parts have of wholes; None if none of them is known."""
    known = (parts >= 0) & (wholes > 0)
    return float(np.median(parts[known] / wholes[known])) if known.any() else None


def find_quartiles(values: Column, known: Bools) -> list[Quartiles]:
    """Returns the quartiles of the known values in each row of a matrix."""
    return [Quartiles(*row) for row in np.rint(find_quantiles(values, known)).astype(np.int64).tolist()]


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A step that took, or needed, far more than most steps."""

    step: int
    times: float  # how many times the median
    name: str  # where most of the excess is
    phase: str | None  # None for what is in no phase


#: A step counts as an outlier from this many times the median on. Half as much again is common where machines are
#: shared, and the first steps, which take longer, are left out.
_OUTLYING = 2.0

#: It is also above the median by this many times what the first quartile is below it, which is much on a busy machine.
#: The third quartile is no measure: of few steps, outliers raise it.
_FAR_OUT = 6.0


def find_outliers(
    steps: Column, totals: Column, parts: Column, names: Sequence[tuple[str, str | None]]
) -> tuple[Outlier, ...]:
    """Returns those of several steps of which the total is at least twice the median, and far out: the largest first.

    Args:
        steps: the number of each step.
        totals: the total of each step.
        parts: what of the totals belongs to each name: a row for each name, a column for each step.
        names: the names, with a phase each.
    """
    median = float(np.median(totals)) if len(totals) > 1 else 0
    if not median or not names:
        return ()
    usual = median - float(np.quantile(totals, 0.25))
    at = np.flatnonzero(totals >= max(_OUTLYING * median, median + _FAR_OUT * usual))
    excess = parts[:, at] - np.median(parts, axis=1)[:, None]
    largest = excess.argmax(axis=0)
    outliers = [
        Outlier(step=step, times=times, name=names[part][0], phase=names[part][1])
        for step, times, part in zip(
            steps[at].tolist(), (totals[at] / median).tolist(), largest.tolist(), strict=True
        )
    ]
    return tuple(sorted(outliers, key=lambda outlier: -outlier.times))
