"""Finds what ops read that is equal in both recordings, whichever ops have returned it."""

import numpy as np

from ...recording.arrow.arrays import from_numpy
from ...recording.phase import FORWARD, PHASES
from ...recording.role import OUTPUT
from ...recording.statistics.moments import Numbers, StatColumns, read_statistics
from ..alignment.calls import translate
from ..alignment.keys import number_keys
from ..alignment.paired_reads import PairedReads
from ..alignment.sizes import number_sizes, read_sizes, sort_sizes
from ..step.calls import Bools, Groups, Rows, ranges, take
from .errors import find_errors
from .measured import read_measured
from .paired_run import PairedRun
from .ranking import IS_MADE
from .run_tensors import find_tensors

#: What is so many times as far below 0 as the largest number is apart from it is a mask.
_MASKED = 1e3

#: Tensors that are farther apart than this are not taken for equal, whatever is noise.
_MOST_APART = 0.05

#: So many pairs of tensors are compared, the first ones.
_MOST_PAIRS = 10_000


def find_equal_reads(
    one: PairedRun, other: PairedRun, steps: Rows, partner: Rows, error: Numbers, noise: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns how far apart what is read is, where it is equal up to noise, and no pair of ops has returned that.

    Ops that only one recording has, or that are called alike, may lie between: all in front of it has come to the same
    then, however far apart what they returned is. Two ops that are a pair may read what is equal; what a module
    returned may be, for those who are outside of it; and what an op returned may be what another op has returned.
    Where neither recording has an op alone, all are pairs, and nothing is looked for.

    Args:
        one: a recording.
        other: the other one.
        steps: pairs of steps.
        partner: of each op of the first: the same op of the second; -1 for none.
        error: how far apart each pair is.
        noise: up to which that is rounding.

    Returns:
        The error of each read of the first recording, and of the second; NaN for all others.
    """
    runs = one, other
    found, found_b = (np.full(len(run.side.flow.read), np.nan) for run in runs)
    if not any(run.alone.any() for run in runs) or not (error > noise).any():
        return found, found_b
    with np.errstate(all="ignore"):
        elsewhere = _find_elsewhere(one, other, steps, error, noise)
        by_partners = _compare_arguments(one, other, partner, error, noise)
    for run, into, of_tensor, of_read in zip(runs, (found, found_b), elsewhere, by_partners, strict=True):
        for each in (of_read, _find_returned(run, error, noise), of_tensor[run.side.flow.read]):
            into[:] = np.where(np.isnan(into), each, into)
    return found, found_b


def _compare_arguments(
    one: PairedRun, other: PairedRun, partner: Rows, error: Numbers, noise: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns the error of what ops that are partners, and return what differs, read as the same argument."""
    side, side_b = one.side, other.side
    found, found_b = (np.full(len(each.flow.read), np.nan) for each in (side, side_b))
    asked = np.flatnonzero((error > noise) & (one.op >= 0))
    ops = one.op[asked]
    wanted = np.full(len(partner), -1, np.int64)
    wanted[ops] = partner[ops]
    reads, reads_b = PairedReads(side, side_b).find_all(wanted)
    row = side.value_of_tensor[side.origin_of_read[reads]]
    row_b = side_b.value_of_tensor[side_b.origin_of_read[reads_b]]
    of_pair = np.full(len(side.values.step), -1, np.int64)
    of_pair[one.rows] = other.rows
    shape, shape_b = number_sizes(*(read_sizes(each.flow.tensors.table["shape"]) for each in (side, side_b)))
    fits = (row >= 0) & (row_b >= 0) & (take(of_pair, row) != row_b)
    fits &= shape[side.flow.read[reads]] == shape_b[side_b.flow.read[reads_b]]
    at = np.flatnonzero(fits)[:_MOST_PAIRS]
    of_op = np.zeros(len(partner))
    np.maximum.at(of_op, ops, noise[asked])
    a, b = read_measured(side.data, row[at]), read_measured(side_b.data, row_b[at])
    apart = find_errors(a, b).error
    kept = (a.numel == b.numel) & ~(_are_masked(a.stats) | _are_masked(b.stats))
    kept &= apart <= np.minimum(IS_MADE * of_op[side.flow.reader[reads[at]]], _MOST_APART)
    found[reads[at[kept]]], found_b[reads_b[at[kept]]] = apart[kept], apart[kept]
    return found, found_b


def _find_returned(run: PairedRun, error: Numbers, noise: Numbers) -> Numbers:
    """Returns the error of each read, by an op outside of a module, of what that returned and is equal up to noise."""
    side, rows = run.side, run.rows
    values, flow, parent = side.values, side.flow, side.calls.calls.parent
    found = np.full(len(flow.read), np.nan)
    is_returned = values.is_of(OUTPUT, rows=rows) & (values.call[rows] >= 0)
    is_returned &= (values.phase[rows] == PHASES.index(FORWARD)) & (error <= IS_MADE * noise)
    differs, groups = (error > IS_MADE * noise) & (run.op >= 0), values.group[rows]
    at = np.flatnonzero(is_returned & np.isin(groups, groups[differs]))
    tensor = find_tensors(side, rows[at], np.zeros(len(at), bool))
    forward = side.ops.forward[flow.reader]
    reader_call = side.ops.call[np.where(forward >= 0, forward, flow.reader)]
    reads_of = Groups(flow.read, np.arange(len(flow.read)), len(flow.tensors))
    for pair, each in zip(at[tensor >= 0].tolist(), tensor[tensor >= 0].tolist(), strict=True):
        reads = reads_of[each]
        around, is_inside = reader_call[reads], np.zeros(len(reads), bool)
        while (around >= 0).any():
            is_inside |= around == values.call[rows[pair]]
            around = take(parent, around)
        found[reads[~is_inside]] = error[pair]
    return found


def _find_elsewhere(
    one: PairedRun, other: PairedRun, steps: Rows, error: Numbers, noise: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns how far each tensor is apart from what another op of the other recording has returned in the same phase.

    Only tensors are looked at that have no pair, or another one that differs. Of others it is NaN.
    """
    side, side_b = one.side, other.side
    found, found_b = (np.full(len(each.flow.tensors), np.nan) for each in (side, side_b))
    differs = error > IS_MADE * noise
    if not differs.any():
        return found, found_b
    row, row_b = _find_unsettled(one, differs), _find_unsettled(other, differs)
    step, step_b = translate(side.values.step[row], steps), side_b.values.step[row_b]
    sizes = number_sizes(sort_sizes(side.values.sizes[row]), sort_sizes(side_b.values.sizes[row_b]))
    phases = side.values.phase[row], side_b.values.phase[row_b]
    keys, keys_b = number_keys((step, step_b), phases, sizes)
    stats, stats_b = (
        read_statistics(each.values.table.take(from_numpy(of))) for each, of in ((side, row), (side_b, row_b))
    )
    least = min(IS_MADE * float(np.median(noise[differs])), _MOST_APART)
    order = np.lexsort((stats_b.l2, keys_b))
    at, there = _find_near(keys, stats.l2, keys_b[order], stats_b.l2[order], least).T
    there = order[there]
    for name in ("min", "max"):
        most = least * np.fmax(np.abs(stats.min[at]), np.abs(stats.max[at]))
        is_near = np.abs(getattr(stats, name)[at] - getattr(stats_b, name)[there]) <= most
        at, there = at[is_near], there[is_near]
    at, there = at[:_MOST_PAIRS], there[:_MOST_PAIRS]
    apart = find_errors(read_measured(side.data, row[at]), read_measured(side_b.data, row_b[there])).error
    kept = apart <= least
    found[side.tensor_of_value[row[at[kept]]]] = apart[kept]
    found_b[side_b.tensor_of_value[row_b[there[kept]]]] = apart[kept]
    return found, found_b


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
    """Returns which tensors have a mask of large negative numbers in them, beside which the others are nothing."""
    return np.asarray(-stats.min > _MASKED * np.abs(stats.max))


def _find_near(keys: Rows, sizes: Numbers, keys_b: Rows, sizes_b: Numbers, least: float) -> Rows:
    """Returns pairs (n, 2) of rows with equal keys, and sizes that are apart by no more than a share of these.

    Args:
        keys: of each row.
        sizes: of each row.
        keys_b: of each row of the other table, sorted.
        sizes_b: of each row of the other table, sorted among equal keys.
        least: the share.
    """
    found = [np.empty((0, 2), np.int64)]
    for key in np.intersect1d(keys, keys_b).tolist():
        at = np.flatnonzero(keys == key)
        begin, end = np.searchsorted(keys_b, [key, key + 1])
        low = begin + np.searchsorted(sizes_b[begin:end], sizes[at] * (1 - least))
        high = begin + np.searchsorted(sizes_b[begin:end], sizes[at] * (1 + least), side="right")
        found.append(np.stack([np.repeat(at, high - low), ranges(low, high - low)], axis=1))
    return np.concatenate(found)
