"""Reads raw statistics from the table `values`, derives others from them, and merges them, without torch."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..arrow.arrays import from_numpy, to_numpy
from ..role import FINITE_ROLES, GRAD_INPUT, GRAD_OUTPUT, PARAMETER_GRAD, ROLES
from .known import TIER_1, names_of

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

#: The columns of the `values` table with raw statistics.
RAW = ("count", "min", "max", "sum", "sumsq", "nan_count", "inf_count")

#: The note for memory that was never written, as `torch.empty` returns it, which holds no numbers to measure.
NOTHING_WRITTEN = "not measured: nothing has been written to it yet"

#: The roles of tensors in which infinities are often intended, such as inputs and buffers.
_OF_MASKS = frozenset(ROLES).difference(FINITE_ROLES)

#: The statistics that are derived from the raw ones.
DERIVED = tuple(name for name in names_of(TIER_1) if name not in RAW)

#: Below this, squares or fourth powers may have been too small for a float64, so that a sum lacks them.
SMALLEST_SUM = 1e-290


def _derived(name: str) -> Any:
    """Returns a property of `Stats` that is computed as the column of `StatColumns` with this name."""
    return property(
        lambda stats: getattr(columns_of([stats]), name)[0].item(),
        doc=f"As `StatColumns.{name}`, of one tensor.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """The raw statistics of one tensor, or of several merged, and statistics that are derived from them.

    A derived statistic is NaN if it is not defined, such as the mean of no numbers or the standard deviation of one.
    """

    count: int = 0
    min: float | None = None  # NaN if one of the numbers is NaN; None if count is 0
    max: float | None = None
    sum: float = 0.0
    sumsq: float = 0.0  # sum of squares
    nan_count: int = 0
    inf_count: int = 0

    mean = _derived("mean")
    rms = _derived("rms")
    std = _derived("std")
    l2 = _derived("l2")
    abs_max = _derived("abs_max")
    nonfinite = _derived("nonfinite")


@dataclass(frozen=True, kw_only=True)
class StatColumns:
    """The raw statistics of many tensors, one a row, with derived statistics as columns."""

    count: Counts  # also 0 where nothing was measured
    min: Numbers  # NaN where null
    max: Numbers
    sum: Numbers  # NaN where nothing was measured; 0 for no numbers
    sumsq: Numbers
    nan_count: Counts
    inf_count: Counts

    @property
    def mean(self) -> Numbers:
        """The arithmetic mean."""
        return divide(self.sum, self.count)

    @property
    def rms(self) -> Numbers:
        """The root of the mean square."""
        return np.sqrt(divide(self.sumsq, self.count))

    @property
    def std(self) -> Numbers:
        """The standard deviation with Bessel's correction, as in `torch.std`; NaN for fewer than two numbers.

        `sumsq / n - mean**2` cancels if the numbers are nearly constant. So the variance is kept between the bounds
        that minimum and maximum set: at least `(max - min)**2 / (2 * n)` (J. von Szokefalvi Nagy, Jahresbericht der
        Deutschen Mathematiker-Vereinigung 27, 1918), at most `(max - mean) * (mean - min)` (R. Bhatia and C. Davis,
        American Mathematical Monthly 107, 2000). It is NaN if a sum is not finite.
        """
        n = self.count.astype(np.float64)
        with np.errstate(all="ignore"):
            extent = self.max - self.min
            mean = np.clip(self.mean, self.min, self.max)  # the mean has the rounding errors of its kernel
            lower = extent / n * (extent / 2)
            upper = (self.max - mean) * (mean - self.min)
            # The lower bound is applied last, because the upper bound has the error of the mean.
            variance = np.maximum(np.minimum(self.sumsq / n - mean * mean, upper), lower)
            std = np.where(extent == 0, 0, np.sqrt(variance * (n / (n - 1))))
        is_known = (np.isfinite(self.sum) & np.isfinite(self.sumsq)) | (extent == 0)
        return np.where((n >= 2) & is_known, std, np.nan)

    @property
    def l2(self) -> Numbers:
        """The root of the sum of squares; 0 for no numbers."""
        return np.sqrt(self.sumsq)

    @property
    def abs_max(self) -> Numbers:
        """The largest magnitude."""
        largest: Numbers = np.maximum(np.abs(self.min), np.abs(self.max))
        return largest

    @cached_property
    def nonfinite(self) -> Counts:
        """The number of elements that are NaN or infinite."""
        return self.nan_count + self.inf_count

    @property
    def nan_fraction(self) -> Numbers:
        """The fraction that is NaN."""
        return divide(self.nan_count, self.count)

    @property
    def inf_fraction(self) -> Numbers:
        """The fraction that is infinite."""
        return divide(self.inf_count, self.count)

    @property
    def crest(self) -> Numbers:
        """The crest factor: the largest magnitude over the root of the mean square."""
        with np.errstate(all="ignore"):
            crest = np.clip(self.abs_max / self.rms, 1, np.sqrt(self.count))
            is_known = np.isfinite(self.sumsq) & (self.sumsq > SMALLEST_SUM)
        return np.where(is_known, crest, np.nan)

    def take(self, rows: npt.NDArray[np.int64]) -> "StatColumns":
        """Returns the statistics of some of the tensors."""
        return StatColumns(**{name: getattr(self, name)[rows] for name in RAW})

    def merge(self, rows: npt.NDArray[np.int64] | slice = slice(None)) -> Stats:
        """Returns the statistics of all numbers in these rows together.

        Counts, minimum and maximum are exact. Sums are rounded once, so the order of the rows does not matter.
        """
        if isinstance(rows, slice):
            rows = np.arange(len(self.count))[rows]
        return self.merge_groups(rows, np.array([len(rows)]))[0] or Stats()

    def merge_groups(self, rows: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> list[Stats | None]:
        """Returns for each of several groups of rows what `merge` does, in 2 us a group and 0.2 us a row.

        Args:
            rows: the rows of all groups, concatenated.
            sizes: how many rows each group has; the result for a group without rows is None.
        """
        ends = np.cumsum(sizes)
        starts = (ends - sizes)[sizes > 0]
        is_filled = self.count[rows] > 0
        lowest = np.minimum.reduceat(np.where(is_filled, self.min[rows], np.inf), starts)
        highest = np.maximum.reduceat(np.where(is_filled, self.max[rows], -np.inf), starts)
        counts = (
            np.add.reduceat(part[rows], starts) for part in (self.count, self.nan_count, self.inf_count)
        )
        totals, squares = (np.where(is_filled, part[rows], 0).tolist() for part in (self.sum, self.sumsq))
        found = zip(*(column.tolist() for column in (lowest, highest, *counts)), strict=True)
        merged: list[Stats | None] = []
        for size, end in zip(sizes.tolist(), ends.tolist(), strict=True):
            if not size:
                merged.append(None)
                continue
            smallest, largest, count, nan_count, inf_count = next(found)
            merged.append(
                Stats(
                    count=count,
                    # A zero as minimum or maximum gets no sign, as the sign would depend on the order.
                    min=smallest + 0.0 if count else None,
                    max=largest + 0.0 if count else None,
                    sum=totals[end - 1] + 0.0 if size == 1 else add_up(totals[end - size : end]),
                    sumsq=squares[end - 1] + 0.0 if size == 1 else add_up(squares[end - size : end]),
                    nan_count=nan_count,
                    inf_count=inf_count,
                )
            )
        return merged


def merge(many: Iterable[Stats]) -> Stats:
    """Returns what `StatColumns.merge` does, in a tenth of the time for a few; without any, the count is 0."""
    merged = list(many)
    filled = [stats for stats in merged if stats.count]
    return Stats(
        count=sum([stats.count for stats in merged]),
        min=_find_extreme(min, [stats.min for stats in filled]),
        max=_find_extreme(max, [stats.max for stats in filled]),
        sum=add_up([stats.sum for stats in filled]),
        sumsq=add_up([stats.sumsq for stats in filled]),
        nan_count=sum([stats.nan_count for stats in merged]),
        inf_count=sum([stats.inf_count for stats in merged]),
    )


def _find_extreme(find: Callable[[list[float]], float], numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None and number == number]
    if len(known) < len(numbers):
        return math.nan
    return find(known) + 0.0 if known else None


def read_statistics(values: pa.Table) -> StatColumns:
    """Returns the raw statistics of rows of the `values` table."""
    count = to_numpy(values["count"])  # -1 where not measured
    numbers = {name: to_numpy(values[name], null=np.nan) for name in ("min", "max", "sum", "sumsq")}
    return StatColumns(
        count=np.maximum(count, 0),
        min=numbers["min"],
        max=numbers["max"],
        sum=np.where(count == 0, 0, numbers["sum"]),
        sumsq=np.where(count == 0, 0, numbers["sumsq"]),
        nan_count=to_numpy(values["nan_count"]),
        inf_count=to_numpy(values["inf_count"]),
    )


def nonfinite_rows(values: pa.Table, sites: pa.Table | None = None) -> npt.NDArray[np.int64]:
    """Returns the indices of the rows of modules' tensors with NaN or infinite elements.

    Args:
        values: the table, or some of its rows.
        sites: the table `sites`, if only NaN should count at sites where infinities are often intended.
    """
    batches = [offset + rows for offset, rows, _ in _scan_nonfinite(values, sites)]
    return np.concatenate(batches) if batches else np.empty(0, np.int64)


def holds_nonfinite(values: pa.Table, sites: pa.Table) -> bool:
    """Returns whether a tensor of a module is not finite, or any tensor has NaN, which is seldom intended.

    Gradients are left out, because they overflow in steps that a GradScaler skips.
    """
    gradients = sites_of_roles(sites, (GRAD_OUTPUT, GRAD_INPUT, PARAMETER_GRAD))
    kept = values.select(["step", "nan_count", "inf_count", "op_id", "site_id"])
    kept = kept.filter(from_numpy(~np.isin(to_numpy(kept["site_id"]), gradients)))
    return bool(to_numpy(kept["nan_count"]).any()) or len(nonfinite_rows(kept, sites)) > 0


def nonfinite_steps(values: pa.Table, sites: pa.Table | None = None) -> list[int]:
    """Returns the steps in which a tensor of a module has NaN or infinite elements, in order."""
    scanned = _scan_nonfinite(values, sites)
    return sorted({int(step) for _, rows, steps in scanned for step in np.unique(steps[rows])})


def _scan_nonfinite(
    values: pa.Table, sites: pa.Table | None
) -> Iterator[tuple[int, npt.NDArray[np.int64], Any]]:
    """Yields for each batch the index of its first row, its non-finite rows, and its column `step`.

    Rows of single ops are left out, because infinities there may be intended, such as the `-inf` of a mask.
    """
    offset, of_masks = 0, np.empty(0, np.int64) if sites is None else sites_of_roles(sites, _OF_MASKS)
    for batch in values.select(["step", "nan_count", "inf_count", "op_id", "site_id"]).to_batches():
        step, nan_count, inf_count = (to_numpy(column) for column in batch.columns[:3])
        rows = np.flatnonzero((nan_count | inf_count) > 0)
        if len(rows):
            rows = rows[to_numpy(batch.column("op_id"), null=-1)[rows] < 0]
            is_meant = np.isin(to_numpy(batch.column("site_id"))[rows], of_masks)
            rows = rows[~is_meant | (nan_count[rows] > 0)]
        yield offset, rows, step
        offset += batch.num_rows


def sites_of_roles(sites: pa.Table, roles: Collection[str]) -> npt.NDArray[Any]:
    """Returns the sites at which tensors of these roles are seen."""
    is_wanted = [np.empty(0, np.bool_)]
    for chunk in sites["role"].chunks:
        of_dictionary = [role in roles for role in chunk.dictionary.to_pylist()]
        is_wanted.append(np.array([*of_dictionary, False])[to_numpy(chunk.indices)])
    return np.asarray(to_numpy(sites["site_id"])[np.concatenate(is_wanted)])


_read_raw = attrgetter(*RAW)
_NO_ROWS: Sequence[tuple[Any, ...]] = [()] * len(RAW)


def columns_of(many: Sequence[Stats]) -> StatColumns:
    """Returns the statistics as columns, one tensor a row."""
    columns: dict[str, Any] = {
        name: np.array(column, np.int64 if name.endswith("count") else np.float64)  # as a float, None is NaN
        for name, column in zip(
            RAW, zip(*map(_read_raw, many), strict=True) if many else _NO_ROWS, strict=True
        )
    }
    return StatColumns(**columns)


def divide(numbers: npt.NDArray[Any], count: Counts) -> Numbers:
    """Returns the quotients without numpy's warnings; infinite or NaN where the count is 0."""
    with np.errstate(all="ignore"):
        quotient: Numbers = numbers / count
    return quotient


def add_up(numbers: Sequence[float]) -> float:
    """Returns the sum, rounded once. It is NaN for infinities of both signs, and infinite if no float can hold it."""
    if not all(map(math.isfinite, numbers)):
        return sum(number for number in numbers if not math.isfinite(number))
    try:
        return math.fsum(numbers)
    except OverflowError:  # maybe only a partial sum is too large, which depends on the order
        total = sum(map(Fraction, numbers), Fraction())
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf
