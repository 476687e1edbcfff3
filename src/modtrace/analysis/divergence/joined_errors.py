"""Tells how far parts of a tensor, such as three projections, are from the whole tensor of the other recording."""

from dataclasses import dataclass

import numpy as np

from ...errors import RecordingError
from ...recording.protocols import RecordingData
from ...recording.statistics.moments import RAW, Numbers, StatColumns
from ..alignment.contract import Alignment
from ..tables.columns import Rows
from .decode import to_numbers
from .errors import METRICS, NONFINITE, NOTHING, STATISTICS, TENSORS, Errors, compare_statistics
from .measured import ComparedRows, read_measured
from .tensor_metrics import coarser_dtype, compare_numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedErrors(Errors):
    """The differences of pairs of a part and the whole."""

    rows_a: Rows
    rows_b: Rows


def find_joined_errors(a: RecordingData, b: RecordingData, alignment: Alignment) -> JoinedErrors:
    """Returns the errors of all parts: by whole tensors each its own, by statistics all parts of one whole together."""
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
        mine = np.flatnonzero(is_in_a == in_a)
        if len(mine):
            whole, part = (one, other) if in_a else (other, one)
            error, floor = _compare_together(whole, part, mine, joined.whole[mine])
            errors.put_rows(STATISTICS, mine, error, floor)
    errors.metric[np.isnan(errors.error)] = METRICS.index(NOTHING)
    errors.metric[np.isinf(errors.error)] = METRICS.index(NONFINITE)
    for at in np.flatnonzero(one.has_tensor & other.has_tensor).tolist():
        found = _compare_tensors(alignment, one, other, at)
        if found is not None:
            errors.put_rows(TENSORS, np.array([at]), found, 0.0)
    return JoinedErrors(rows_a=rows_a, rows_b=rows_b, **vars(errors))


def _compare_together(
    whole: ComparedRows, part: ComparedRows, mine: Rows, number: Rows
) -> tuple[Numbers, Numbers]:
    """Returns the error of each part: that of all parts of its whole together.

    It is infinite if they have not the same numbers of NaN and infinities, and NaN if one of them was not measured.
    """
    starts = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
    reduce = dict.fromkeys(RAW, np.add) | {"min": np.fmin, "max": np.fmax}
    merged = StatColumns(
        **{name: each.reduceat(getattr(part.stats, name)[mine], starts) for name, each in reduce.items()}
    )
    of_whole = whole.stats.take(mine[starts])
    error, floor = compare_statistics(of_whole, merged)
    is_finite_alike = (merged.nan_count == of_whole.nan_count) & (merged.inf_count == of_whole.inf_count)
    is_known = np.logical_and.reduceat((whole.is_measured & part.is_measured)[mine], starts)
    error = np.where(is_finite_alike, error, np.inf)
    error = np.where(is_known & (merged.count == of_whole.count), error, np.nan)
    which = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(mine))))
    return error[which], floor[which]


def _compare_tensors(alignment: Alignment, one: ComparedRows, other: ComparedRows, at: int) -> float | None:
    joined = alignment.joined
    whole, part = (one, other) if joined.whole_in_a[at] else (other, one)
    try:
        raw_whole, raw_part = whole.tensor(at), part.tensor(at)
    except RecordingError:
        return None
    numbers, own = to_numbers(raw_whole), to_numbers(raw_part)
    if numbers is None or own is None:
        return None
    if joined.permuted[at] >= 0:
        axes = alignment.axes[joined.permuted[at]]
        own = own.transpose([*axes, *range(len(axes), own.ndim)])
    dimension, offset = int(joined.dimension[at]), int(joined.offset[at])
    if dimension >= own.ndim or numbers.ndim != own.ndim:
        return None
    piece = np.take(
        numbers, np.arange(offset, min(offset + own.shape[dimension], numbers.shape[dimension])), dimension
    )
    if piece.shape != own.shape:
        return None
    return compare_numbers(piece, own, coarser_dtype(raw_whole.dtype, raw_part.dtype)).relative_l2
