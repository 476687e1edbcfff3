"""Computes the errors of paired rows of `values`, each by the best measurement that both tensors have."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...errors import RecordingError
from ...recording.protocols import RecordingData
from ...recording.statistics.fingerprints import SKETCH_FLOOR, sketch_distances
from ...recording.statistics.moments import RAW, Counts, Numbers, StatColumns
from ...recording.statistics.number_formats import to_float64
from ..alignment.contract import Alignment
from ..tables.columns import Bools, Column, Rows, number_codes
from ..tables.measured import ComparedRows, read_measured
from .tensor_metrics import (
    TensorDifference,
    coarser_dtype,
    compare_numbers,
    compare_tensors,
    distances,
)

# What an error is computed from, best first.
TENSORS = "tensors"  # whole tensors, element by element
HASHES = "hashes"  # equal hashes give 0; unequal ones an infinite error if nothing else was measured
SKETCHES = "sketches"  # an estimate of the distance from sketches
SAMPLES = "samples"  # the sampled elements
STATISTICS = "statistics"  # min, max, mean and root mean square
SHAPES = "shapes"  # unequal numbers of elements
NONFINITE = "nonfinite"  # unequal numbers of NaN or infinite elements
NOTHING = "nothing"  # no measurement that both tensors have
METRICS = (TENSORS, HASHES, SKETCHES, SAMPLES, STATISTICS, SHAPES, NONFINITE, NOTHING)

#: The true distance is within this factor of the sketches' estimate in 95 % of cases (docs/fingerprints.md).
SKETCH_FACTOR = 1.2

#: The largest relative difference of sums over one tensor by kernels with other thread counts or strides.
_SUM_FLOOR = 2e-6

#: A square matrix measured by sketches counts as the transpose of another one if their error by sketches is above the
#: first number, and that by statistics, which transposing does not change, is below the second.
#: By whole tensors it counts as such if transposing reduces the error to less than the first number times itself.
_FAR, _NEAR = 0.1, 1e-3

#: The number of sketches that are read at once (16 MB).
_ROWS = 32_768


@dataclass(frozen=True, kw_only=True, eq=False)
class Errors:
    """The difference of each pair relative to the larger of the two norms; 0 for equal tensors."""

    error: Numbers  # infinite where the tensors differ by an unknown amount
    floor: Numbers  # the smallest error that the measurement can show
    metric: Column  # what the error was computed from, as codes of METRICS
    is_unequal: Bools  # whether hashes or whole tensors show that at least one bit differs
    details: dict[int, TensorDifference] = field(default_factory=dict)  # by pair, for whole tensors

    @classmethod
    def unknown(cls, count: int) -> "Errors":
        """Returns the errors of pairs before any is compared: NaN."""
        return cls(
            error=np.full(count, np.nan),
            floor=np.zeros(count),
            metric=np.full(count, METRICS.index(NOTHING), np.int8),
            is_unequal=np.zeros(count, bool),
        )

    def __len__(self) -> int:
        return len(self.error)

    def is_by(self, metric: str) -> Bools:
        """Returns which errors were computed from a metric."""
        return np.asarray(self.metric == METRICS.index(metric))

    def are_equal(self) -> Bools:
        """Returns which pairs are equal, as far as their measurements show."""
        return np.asarray((self.error == 0) & ~self.is_unequal)

    def find_open(self, where: Bools) -> Rows:
        """Returns the pairs, among those of a mask, that have no error yet."""
        return np.flatnonzero(where & np.isnan(self.error))

    def fill(self, metric: str, where: Bools, error: float) -> None:
        """Sets the error of the pairs, among those of a mask, that have no error yet."""
        self.set(metric, self.find_open(where), error, 0.0)

    def set(self, metric: str, rows: Rows, error: Numbers | float, floor: Numbers | float) -> None:
        """Sets the errors of pairs, with the metric and the floor."""
        self.error[rows], self.floor[rows] = error, floor
        self.metric[rows] = METRICS.index(metric)


def find_errors(
    a: ComparedRows,
    b: ComparedRows,
    permuted: Rows | None = None,
    axes: Sequence[tuple[int, ...]] = (),
    may_be_turned: Bools | None = None,
) -> Errors:
    """Returns the errors between the rows of `a` and the rows of `b` at the same positions.

    Args:
        a: the measurements of rows of one recording.
        b: the measurements of as many rows of another recording, or of the same.
        permuted: for each pair the index in `axes` of how to permute the dimensions of `b`; -1 for not at all.
        axes: permutations, as `transpose` of numpy takes them.
        may_be_turned: which pairs may be transposes of each other, which square shapes do not show.
    """
    permuted = np.full(len(a), -1) if permuted is None else permuted
    exchanged, square = _find_turned(a, b, np.zeros(len(a), bool) if may_be_turned is None else may_be_turned)
    turned = (permuted >= 0) | exchanged
    errors = Errors.unknown(len(a))
    same_size = a.numel == b.numel
    same_dtype = np.equal(*number_codes((a.dtypes, a.dtype), (b.dtypes, b.dtype)))
    both_hashes = a.has_hash & b.has_hash & same_size & same_dtype & ~turned
    errors.is_unequal[both_hashes & (a.hash != b.hash)] = True
    errors.fill(HASHES, both_hashes & (a.hash == b.hash), 0.0)
    both = a.is_measured & b.is_measured
    errors.fill(SHAPES, ~same_size, np.inf)
    for pair in errors.find_open(a.has_tensor & b.has_tensor).tolist():
        order = axes[permuted[pair]] if permuted[pair] >= 0 else (1, 0) if exchanged[pair] else None
        _set_tensors(errors, a, b, pair, order, is_square=bool(square[pair]))
    counts_differ = (a.stats.nan_count != b.stats.nan_count) | (a.stats.inf_count != b.stats.inf_count)
    errors.fill(NONFINITE, both & counts_differ, np.inf)
    error, floor = compare_statistics(a.stats, b.stats)
    _set_sketches(errors, a, b, errors.find_open(a.has_sketch & b.has_sketch & ~turned))
    are_turned = np.flatnonzero(
        square & both & errors.is_by(SKETCHES) & (errors.error > _FAR) & (error < _NEAR)
    )
    errors.set(STATISTICS, are_turned, error[are_turned], floor[are_turned])
    for pair in errors.find_open(a.has_sample & b.has_sample & ~turned).tolist():
        _set_sample(errors, a, b, pair)
    rows = errors.find_open(both)
    errors.set(STATISTICS, rows, error[rows], floor[rows])
    errors.fill(HASHES, both_hashes, np.inf)
    return errors


def _find_turned(a: ComparedRows, b: ComparedRows, wanted: Bools) -> tuple[Bools, Bools]:
    """Returns which wanted pairs are matrices with exchanged numbers of rows and columns, and which are square."""
    (is_matrix, rows, columns), (is_other, rows_b, columns_b) = a.matrices(), b.matrices()
    are_exchanged = wanted & is_matrix & is_other & (rows == columns_b) & (columns == rows_b)
    are_exchanged &= np.minimum(rows, columns) > 1
    return are_exchanged & (rows != columns), are_exchanged & (rows == columns)


def _set_tensors(
    errors: Errors,
    a: ComparedRows,
    b: ComparedRows,
    pair: int,
    axes: tuple[int, ...] | None,
    *,
    is_square: bool,
) -> None:
    try:
        difference = compare_tensors(a.tensor(pair), b.tensor(pair), axes=axes)
        if is_square and difference is not None and difference.relative_l2 > _FAR:
            turned = compare_tensors(a.tensor(pair), b.tensor(pair), axes=(1, 0))
            if turned is not None and turned.relative_l2 < _FAR * difference.relative_l2:
                difference = turned
    except RecordingError:  # the tensor was dropped or its file is cut, so other measurements are compared
        return
    if difference is None:
        return
    errors.details[pair] = difference
    errors.is_unequal[pair] = difference.largest > 0
    errors.set(TENSORS, np.array([pair]), difference.relative_l2, 0.0)


def _set_sketches(errors: Errors, a: ComparedRows, b: ComparedRows, rows: Rows) -> None:
    for start in range(0, len(rows), _ROWS):
        some = rows[start : start + _ROWS]
        first, second = a.sketches(some), b.sketches(some)
        one, other = a.stats.take(some), b.stats.take(some)
        with np.errstate(all="ignore"):
            distance = sketch_distances(first, second, one.count, other.mean - one.mean)
            norm = np.fmax(one.l2, other.l2)
            of_sketches = np.fmax(np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1))
            norm = np.where(np.isfinite(norm) & (norm > 0), norm, of_sketches)
            error = np.where(distance == 0, 0.0, distance / norm)
        known = np.isfinite(error)
        errors.set(SKETCHES, some[known], error[known], SKETCH_FLOOR)


def _set_sample(errors: Errors, a: ComparedRows, b: ComparedRows, pair: int) -> None:
    first, second = a.sample(pair), b.sample(pair)
    if len(first) != len(second) or not len(first):
        return
    with np.errstate(all="ignore"):
        distance = np.sqrt(np.mean(distances(first, second) ** 2))
        error = 0.0 if not distance else distance / max(_rms(first), _rms(second))
    if np.isfinite(error):
        of_statistics = compare_statistics(*(rows.stats.take(np.array([pair])) for rows in (a, b)))[0][0]
        errors.set(SAMPLES, np.array([pair]), np.fmax(error, of_statistics), _SUM_FLOOR)


def _rms(numbers: Numbers) -> float:
    return float(np.sqrt(np.mean(numbers[np.isfinite(numbers)] ** 2))) if len(numbers) else 0.0


def compare_statistics(a: StatColumns, b: StatColumns) -> tuple[Numbers, Numbers]:
    """Returns the largest relative difference of minimum, maximum, mean and root mean square, and the floor of it.

    Most changes of a tensor change its extremes, which are exact, while sums are rounded and average out changes of
    either sign. An extreme is rounded to its own magnitude, which may be several times the root mean square, so the
    difference is taken relative to that magnitude.
    """
    with np.errstate(all="ignore"):
        size = np.fmax(a.rms, b.rms)
        low, high = (
            distances(one, other) / np.fmax(size, np.fmax(np.abs(one), np.abs(other)))
            for one, other in ((a.min, b.min), (a.max, b.max))
        )
        exact = np.fmax(low, high)
        summed = np.fmax(distances(a.mean, b.mean), distances(a.rms, b.rms)) / size
    exact, summed = (np.where(np.isnan(part), 0.0, part) for part in (exact, summed))
    is_empty: Counts = a.count == 0
    error = np.where(is_empty, 0.0, np.fmax(exact, summed))
    return error, np.where(error > exact, _SUM_FLOOR, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedErrors(Errors):
    """The errors of pairs of a part and its whole."""

    rows_a: Rows
    rows_b: Rows


def find_joined_errors(a: RecordingData, b: RecordingData, alignment: Alignment) -> JoinedErrors:
    """Returns the errors of all parts: by whole tensors for each, by statistics for all parts of a whole together."""
    joined = alignment.joined
    if not len(joined):
        none = np.empty(0, np.int64)
        return JoinedErrors(rows_a=none, rows_b=none, **vars(Errors.unknown(0)))
    is_in_a = joined.whole_in_a.astype(bool)
    rows_a = np.where(is_in_a, joined.whole, joined.part)
    rows_b = np.where(is_in_a, joined.part, joined.whole)
    one, other = read_measured(a, rows_a), read_measured(b, rows_b)
    errors = Errors.unknown(len(joined))
    for in_a in (False, True):
        parts = np.flatnonzero(is_in_a == in_a)
        if len(parts):
            whole, part = (one, other) if in_a else (other, one)
            error, floor = _compare_together(whole, part, parts, joined.whole[parts])
            errors.set(STATISTICS, parts, error, floor)
    errors.metric[np.isnan(errors.error)] = METRICS.index(NOTHING)
    errors.metric[np.isinf(errors.error)] = METRICS.index(NONFINITE)
    for pair in np.flatnonzero(one.has_tensor & other.has_tensor).tolist():
        part_error = _compare_tensors(alignment, one, other, pair)
        if part_error is not None:
            errors.set(TENSORS, np.array([pair]), part_error, 0.0)
    return JoinedErrors(rows_a=rows_a, rows_b=rows_b, **vars(errors))


def _compare_together(
    whole: ComparedRows, part: ComparedRows, parts: Rows, number: Rows
) -> tuple[Numbers, Numbers]:
    """Returns for each part the error and the floor of all parts of its whole together.

    The error is infinite if the numbers of NaN and infinities differ, and NaN if a part was not measured.
    """
    starts = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
    reduce = dict.fromkeys(RAW, np.add) | {"min": np.fmin, "max": np.fmax}
    merged = StatColumns(
        **{name: add.reduceat(getattr(part.stats, name)[parts], starts) for name, add in reduce.items()}
    )
    of_whole = whole.stats.take(parts[starts])
    error, floor = compare_statistics(of_whole, merged)
    is_finite_alike = (merged.nan_count == of_whole.nan_count) & (merged.inf_count == of_whole.inf_count)
    is_known = np.logical_and.reduceat((whole.is_measured & part.is_measured)[parts], starts)
    error = np.where(is_finite_alike, error, np.inf)
    error = np.where(is_known & (merged.count == of_whole.count), error, np.nan)
    which = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(parts))))
    return error[which], floor[which]


def _compare_tensors(alignment: Alignment, one: ComparedRows, other: ComparedRows, pair: int) -> float | None:
    joined = alignment.joined
    whole, part = (one, other) if joined.whole_in_a[pair] else (other, one)
    try:
        raw_whole, raw_part = whole.tensor(pair), part.tensor(pair)
    except RecordingError:
        return None
    numbers, own = to_float64(raw_whole), to_float64(raw_part)
    if numbers is None or own is None:
        return None
    if joined.permuted[pair] >= 0:
        axes = alignment.axes[joined.permuted[pair]]
        own = own.transpose([*axes, *range(len(axes), own.ndim)])
    dimension, offset = int(joined.dimension[pair]), int(joined.offset[pair])
    if dimension >= own.ndim or numbers.ndim != own.ndim:
        return None
    piece = np.take(
        numbers, np.arange(offset, min(offset + own.shape[dimension], numbers.shape[dimension])), dimension
    )
    if piece.shape != own.shape:
        return None
    return compare_numbers(piece, own, coarser_dtype(raw_whole.dtype, raw_part.dtype)).relative_l2
