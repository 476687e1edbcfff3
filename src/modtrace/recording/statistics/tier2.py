"""Reads the columns of tier 2, and derives statistics from sums of magnitudes, zeros and exponent histograms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..arrow.arrays import from_numpy, to_numpy
from .known import SUMS, names_of
from .moments import RAW, SMALLEST_SUM, Counts, Numbers, StatColumns, divide, read_statistics
from .number_formats import to_format

BINS = 256

#: The columns of sums and counts, with the value that each has where it was not measured.
SUM_COLUMNS = {"sumabs": np.nan, "zero_count": -1, "sum4": np.nan}

#: The statistics that are derived from tier 2.
OF_TIER_2 = tuple(name for name in names_of(SUMS) if name not in SUM_COLUMNS)

#: The smallest magnitude of each bin, followed by the end of the last bin.
LOWER_EDGES: Numbers = np.array([0.0, *(2.0**exponent for exponent in range(-126, 129))])
UPPER_EDGES: Numbers = np.array([*LOWER_EDGES[1:], np.inf])

#: The bins that the smallest and the largest float64 would have.
_FIRST_OF_FLOAT64, _LAST_OF_FLOAT64 = 127 - 1074, 127 + 1023

#: The number of histogram rows that are read at once (8 MB).
_ROWS = 4096


class Bounds(NamedTuple):
    """Bounds on a number, which are equal if it is known exactly."""

    low: Numbers
    high: Numbers


@dataclass(frozen=True, kw_only=True)
class Tier2Columns:
    """The columns of tier 2 of many tensors, one a row, with derived statistics as columns.

    A derived statistic is NaN if it was not measured, is not defined or is unknown. Fractions are of all numbers,
    including those that are not finite.
    """

    stats: StatColumns  # the raw statistics of the same rows
    sumabs: Numbers  # NaN where not measured; infinite or NaN where the numbers are
    zero_count: Counts  # -1 where not measured
    sum4: Numbers
    argmax: Counts  # flat, row-major index; -1 where not measured, without elements, and in merged rows
    histogram: Counts  # [measured rows, 256]
    histogram_row: Counts  # index into `histogram`; -1 where not measured
    channel_max: pa.Array  # list<float>, null where not measured

    @property
    def is_measured(self) -> npt.NDArray[np.bool_]:
        """True for each row in which anything of tier 2 was measured."""
        measured: npt.NDArray[np.bool_] = self.zero_count >= 0
        return measured

    @property
    def mean_abs(self) -> Numbers:
        """The arithmetic mean of the magnitudes."""
        return divide(self.sumabs, self.stats.count)

    @property
    def zero_fraction(self) -> Numbers:
        """The fraction that is zero, of either sign."""
        return divide(np.where(self.is_measured, self.zero_count, np.nan), self.stats.count)

    @property
    def kurtosis(self) -> Numbers:
        """The mean fourth power over the squared mean square, about zero rather than about the mean.

        It is 1 if all magnitudes are equal, 3 for normal numbers around zero, and the count if only one number is not
        zero. So it also shows outliers in activations whose mean is far from zero (B. He et al., Understanding and
        Minimising Outlier Features in Neural Network Training, 2024, apply it to the norms of neurons).
        """
        n, squares = self.stats.count.astype(np.float64), self.stats.sumsq
        with np.errstate(all="ignore"):
            # The sums have the errors of their kernels.
            kurtosis = np.clip(n * (self.sum4 / squares / squares), 1, n)
            is_known = np.isfinite(squares) & np.isfinite(self.sum4) & (self.sum4 > SMALLEST_SUM)
        return np.where(is_known, kurtosis, np.nan)

    @property
    def dynamic_range(self) -> Bounds:
        """The number of bins, that is powers of two, between the smallest nonzero magnitude and the largest.

        It is exact except for numbers below 2^-126 or from 2^128 on, whose bins cover more than one power.
        """

        def measure(counts: Counts, rows: Counts) -> Numbers:
            filled = counts > 0
            first, last = filled.argmax(axis=1), BINS - 1 - filled[:, ::-1].argmax(axis=1)
            highest = np.where(last == BINS - 1, _LAST_OF_FLOAT64, last)
            lowest = np.where(first == 0, _FIRST_OF_FLOAT64, first)
            bounds = np.stack([last - first, highest - lowest]).astype(np.float64)
            return np.where(filled.any(axis=1), bounds, np.nan)

        return Bounds(*self._of_histograms(measure, 2))

    def quantile(self, p: float) -> Bounds:
        """Returns bounds, two powers of two, on the magnitude that a fraction `p` of the numbers does not exceed.

        Zeros are the smallest magnitudes and infinities the largest; NaN are left out. `sqrt(low * high)` is off by a
        factor of at most 1.41 if `low` is not zero.

        Raises:
            ValueError: `p` is not between 0 and 1.
        """
        if not 0 <= p <= 1:
            raise ValueError(f"p={p!r}: a quantile is asked for by a number from 0 to 1")

        def measure(counts: Counts, rows: Counts) -> Numbers:
            n = self.stats.count[rows] - self.stats.nan_count[rows]
            rank = np.clip(np.ceil(p * n), 1, n)
            up_to = self.zero_count[rows, None] + np.cumsum(counts, axis=1)
            at = (up_to < rank[:, None]).sum(axis=1)
            is_zero = rank <= self.zero_count[rows]
            low, high = np.append(LOWER_EDGES, np.inf)[at], np.append(UPPER_EDGES, np.inf)[at]
            high = np.fmax(low, np.fmin(high, self.stats.abs_max[rows]))
            return np.where(n > 0, np.where(is_zero, 0.0, np.stack([low, high])), np.nan)

        return Bounds(*self._of_histograms(measure, 2))

    def underflow_fraction(self, format: str) -> Numbers:
        """Returns the exact fraction that is not zero and below the smallest normal number of a format of `FORMATS`."""
        below = _first_bin_from(to_format(format).smallest_normal)
        return self._fraction(lambda counts, rows: counts[:, :below].sum(axis=1))

    def flushed_fraction(self, format: str) -> Numbers:
        """Returns the fraction that is not zero and below the smallest subnormal number of a format.

        Rounding to nearest turns numbers up to half of that into zero, and larger ones into the smallest subnormal. The
        fraction is NaN for float32 and bf16 if there are numbers below 2^-126, all of which share one bin.
        """
        smallest = to_format(format).smallest_subnormal
        below = _first_bin_from(smallest)
        if smallest >= LOWER_EDGES[1]:
            return self._fraction(lambda counts, rows: counts[:, :below].sum(axis=1))
        return self._fraction(lambda counts, rows: np.where(counts[:, 0] > 0, np.nan, 0))

    def overflow_fraction(self, format: str) -> Bounds:
        """Returns bounds on the fraction that is above the largest finite number of a format, including infinities.

        They are equal if minimum and maximum show that there is none, or if no number is between the largest number of
        the format and the powers of two around it.
        """
        largest = to_format(format).largest
        end = _first_bin_from(largest)

        def measure(counts: Counts, rows: Counts) -> tuple[Counts, Counts]:
            surely = counts[:, end:].sum(axis=1) + self.stats.inf_count[rows]
            near = counts[:, end - 1]
            ends = np.stack([self.stats.max[rows], -self.stats.min[rows]])  # meaningless if there is a NaN
            beyond = ((ends > largest) & (ends < LOWER_EDGES[end])).sum(axis=0)
            perhaps = np.where((ends <= largest).all(axis=0), 0, near)
            return surely + np.minimum(beyond, near), surely + perhaps

        return Bounds(*divide(self._of_histograms(measure, 2), self.stats.count))

    def _fraction(self, count: Callable[[Counts, Counts], Any]) -> Numbers:
        return divide(
            self._of_histograms(lambda counts, rows: count(counts, rows)[None], 1)[0], self.stats.count
        )

    def _of_histograms(self, measure: Callable[[Counts, Counts], Any], width: int) -> Numbers:
        """Calls `measure` with the histograms of some rows at a time, and their indices; other rows are NaN."""
        results = np.full((width, len(self.histogram_row)), np.nan)
        rows = np.flatnonzero(self.histogram_row >= 0)
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS]
            with np.errstate(all="ignore"):
                results[:, some] = measure(self.histogram[self.histogram_row[some]], some)
        return results


#: The columns of the `values` table that `read_tier2` reads.
TIER_2_COLUMNS = (*RAW, "sumabs", "zero_count", "sum4", "argmax", "histogram", "channel_max")


def read_tier2(values: pa.Table) -> Tier2Columns:
    """Returns the columns of tier 2 of rows of the `values` table."""
    histogram, row = _read_histograms(values["histogram"])
    return Tier2Columns(
        stats=read_statistics(values),
        sumabs=to_numpy(values["sumabs"], null=np.nan),
        zero_count=to_numpy(values["zero_count"]),
        sum4=to_numpy(values["sum4"], null=np.nan),
        argmax=to_numpy(values["argmax"]),
        histogram=histogram,
        histogram_row=row,
        channel_max=_in_one(values["channel_max"]),
    )


def read_sums(stats: StatColumns, sums: Mapping[str, Any]) -> Tier2Columns:
    """Returns the columns of tier 2 from `sumabs`, `zero_count` and `sum4` alone, without histograms and indices."""
    count = len(stats.count)
    return Tier2Columns(
        stats=stats,
        sumabs=sums["sumabs"],
        zero_count=sums["zero_count"],
        sum4=sums["sum4"],
        argmax=np.full(count, -1),
        histogram=np.empty((0, BINS), np.int64),
        histogram_row=np.full(count, -1),
        channel_max=pa.nulls(count, pa.list_(pa.float32())),
    )


def _read_histograms(column: pa.ChunkedArray | pa.Array) -> tuple[Counts, Counts]:
    """Returns the histograms, without a copy if they are adjacent, and the index of each row's histogram."""
    column = _in_one(column)
    is_whole = np.asarray(pc.equal(pc.list_value_length(column), BINS).fill_null(False))
    start = to_numpy(column.offsets)[:-1]
    if (start[is_whole] % BINS).any():  # the list column has other rows between them
        column = column.filter(from_numpy(is_whole))
        start = (np.cumsum(is_whole) - 1) * BINS + column.offset
    counts = to_numpy(column.values, null=0)
    return counts[: len(counts) // BINS * BINS].reshape(-1, BINS), np.where(is_whole, start // BINS, -1)


def _in_one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _first_bin_from(magnitude: float) -> int:
    """Returns the first bin that holds no magnitude below this one."""
    return int(np.searchsorted(LOWER_EDGES, magnitude))
