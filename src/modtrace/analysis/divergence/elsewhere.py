"""Finds what an op returned that another op of the other recording has returned as well."""

import numpy as np

from ...recording.arrow.arrays import from_numpy
from ...recording.statistics.moments import Numbers, StatColumns, read_statistics
from ..alignment.calls import translate
from ..alignment.contents import number_sizes, sort_sizes
from ..tables.columns import Bools, Rows, dictionary_codes, number_keys, ranges
from .errors import find_errors
from .measured import read_measured
from .paired_run import PairedRun
from .ranking import IS_MADE

#: What is so many times as far below 0 as the largest number is apart from it is a mask.
_MASKED = 1e3

#: What is farther apart than this is not taken for equal, whatever is noise.
MOST_APART = 0.05

#: So many pairs of tensors are compared, the first ones, of so many with norms that are near.
_MOST_PAIRS = 10_000
_MOST_NEAR = 1_000_000


def find_elsewhere(
    one: PairedRun, other: PairedRun, steps: Rows, error: Numbers, noise: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns how far each tensor is apart from what another op of the other recording has returned in the same phase.

    All in front of it has come to the same then, however far apart what was returned on the way is: by ops that only
    one recording has, or by others that are called alike. Only tensors are looked at that have no pair, or one that
    differs. Where neither recording has an op alone, all are pairs, and nothing is looked for.

    Args:
        one: a recording.
        other: the other one.
        steps: pairs of steps.
        error: how far apart each pair is.
        noise: up to which that is rounding.

    Returns:
        The error of each tensor of the first recording, and of the second; NaN where there is no such tensor.
    """
    found, found_b = (np.full(len(run.side.flow.tensors), np.nan) for run in (one, other))
    differs = error > IS_MADE * noise
    if not differs.any() or not (one.alone.any() or other.alone.any()):
        return found, found_b
    with np.errstate(all="ignore"):
        rows, rows_b, apart = _find_equal(one, other, steps, differs, noise)
    kept = ~_are_exchanged(one, other, rows, rows_b)
    found[one.side.tensor_of_value[rows[kept]]] = apart[kept]
    found_b[other.side.tensor_of_value[rows_b[kept]]] = apart[kept]
    return found, found_b


def _find_equal(
    one: PairedRun, other: PairedRun, steps: Rows, differs: Bools, noise: Numbers
) -> tuple[Rows, Rows, Numbers]:
    """Returns rows of both recordings that hold the same up to noise, and how far apart they are."""
    row, row_b = _find_unsettled(one, differs), _find_unsettled(other, differs)
    values, values_b = one.side.values, other.side.values
    stats, stats_b = (
        read_statistics(each.table.take(from_numpy(of))) for each, of in ((values, row), (values_b, row_b))
    )
    noises, noises_b = _find_noises(one, row, noise), _find_noises(other, row_b, noise)
    keys, keys_b = number_keys(
        (translate(values.step[row], steps), values_b.step[row_b]),
        (values.phase[row], values_b.phase[row_b]),
        number_sizes(sort_sizes(values.sizes[row]), sort_sizes(values_b.sizes[row_b])),
    )
    most = max(noises.max(initial=0.0), noises_b.max(initial=0.0))
    at, there = _find_near((keys, stats.l2), (keys_b, stats_b.l2), float(most)).T
    level = np.fmax(noises[at], noises_b[there])
    size = level * np.fmax(np.abs(stats.min[at]), np.abs(stats.max[at]))
    is_near = np.abs(stats.l2[at] - stats_b.l2[there]) <= level * stats.l2[at]
    for name in ("min", "max"):
        is_near &= np.abs(getattr(stats, name)[at] - getattr(stats_b, name)[there]) <= size
    first = np.flatnonzero(is_near)[np.argsort(row[at[is_near]], kind="stable")][:_MOST_PAIRS]
    rows, rows_b = row[at[first]], row_b[there[first]]
    apart = find_errors(read_measured(one.side.data, rows), read_measured(other.side.data, rows_b)).error
    kept = apart <= level[first]
    return rows[kept], rows_b[kept], apart[kept]


def _find_unsettled(run: PairedRun, differs: Bools) -> Rows:
    """Returns rows of `values` of what ops returned that has no pair, or one that differs.

    Constants are left out, and whole numbers and masks: those of other tensors may have equal statistics.
    """
    values, tensor = run.side.values, run.side.tensor_of_value
    is_settled = np.zeros(len(values.step), bool)
    is_settled[run.rows] = True
    is_settled[run.rows[differs]] = False
    found = np.flatnonzero((tensor >= 0) & ~is_settled)
    found = found[~run.side.flow.tensors.is_whole[tensor[found]]]
    stats = read_statistics(values.table.take(from_numpy(found)))
    return found[np.isfinite(stats.l2) & (stats.min < stats.max) & ~_are_masked(stats)]


def _are_masked(stats: StatColumns) -> Bools:
    """Returns which tensors have large negative numbers in them, as of a mask, beside which the others are nothing."""
    return np.asarray(-stats.min > _MASKED * np.abs(stats.max))


def _find_noises(run: PairedRun, rows: Rows, noise: Numbers) -> Numbers:
    """Returns up to which each of some rows of `values` is apart by rounding: as the pairs of its dtype mostly are."""
    code, dtypes = dictionary_codes(run.side.values.table["dtype"])
    of_dtype = np.zeros(len(dtypes) + 1)
    for each in np.unique(code[run.rows]).tolist():
        of_dtype[each] = np.median(noise[code[run.rows] == each])
    return np.minimum(of_dtype[code[rows]], MOST_APART)


def _find_near(one: tuple[Rows, Numbers], other: tuple[Rows, Numbers], share: float) -> Rows:
    """Returns pairs (n, 2) of rows with equal keys, and norms that are apart by no more than a share of these.

    Args:
        one: keys and norms of the rows of one table.
        other: those of the other.
        share: how far apart norms may be.
    """
    orders = [np.lexsort((norms, keys)) for keys, norms in (one, other)]
    (keys, norms), (keys_b, norms_b) = (
        (each[0][order], each[1][order]) for each, order in zip((one, other), orders, strict=True)
    )
    found, count = [np.empty((0, 2), np.int64)], 0
    for key in np.intersect1d(keys, keys_b).tolist():
        (at, end), (begin, stop) = (np.searchsorted(each, [key, key + 1]) for each in (keys, keys_b))
        low = begin + np.searchsorted(norms_b[begin:stop], norms[at:end] * (1 - share))
        high = begin + np.searchsorted(norms_b[begin:stop], norms[at:end] * (1 + share), side="right")
        found.append(np.stack([np.repeat(np.arange(at, end), high - low), ranges(low, high - low)], axis=1))
        if (count := count + len(found[-1])) > _MOST_NEAR:
            break
    pairs = np.concatenate(found)
    return np.stack([orders[0][pairs[:, 0]], orders[1][pairs[:, 1]]], axis=1)


def _are_exchanged(one: PairedRun, other: PairedRun, rows: Rows, rows_b: Rows) -> Bools:
    """Returns which equal rows have pairs that are equal crosswise: each op has returned what the other should have."""
    partner, back = (
        np.full(len(run.side.values.step) + 1, -1, np.int64) for run in (one, other)
    )  # the last for rows without a pair
    partner[one.rows], back[other.rows] = other.rows, one.rows
    width = len(back)
    crossed = back[rows_b] * width + partner[rows]
    return np.asarray((partner[rows] >= 0) & (back[rows_b] >= 0) & np.isin(crossed, rows * width + rows_b))
