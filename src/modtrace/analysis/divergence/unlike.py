"""Finds pairs of rows that hold other tensors, and results that an op elsewhere in the other run has returned."""

import numpy as np

from ...recording.phase import OPTIMIZER, PHASES
from ...recording.role import OP_OUTPUT, OUTPUT
from ...recording.statistics.moments import Numbers, StatColumns
from ..alignment.calls import translate
from ..alignment.ops import PairedReads, number_names
from ..tables.columns import Bools, Rows, dictionary_codes, number_keys, ranges, take
from ..tables.measured import read_measured
from ..tables.run import RunTables
from ..tables.tensors import count_elements, number_sizes, read_sizes, sort_sizes
from .errors import find_errors
from .paired_run import PairedRun
from .ranking import IS_MADE


def are_beside(side: RunTables, rows: Rows, misfits: Rows, are_repeated: Bools) -> Bools:
    """Returns which rows are of an op or call whose first output is of another size in the other recording.

    Then the op was given something else. Of modules it is only known where they are called another number of times, as
    an LSTM that gets one step where the other gets all.
    """
    values = side.values
    maker = np.where(values.op >= 0, values.op, -2 - values.call)
    is_output = values.is_of(OP_OUTPUT, OUTPUT) & (maker != -1)
    firsts = misfits[(is_output & values.is_first)[misfits[:, 0]], 0]
    is_beside = is_output[rows] & np.isin(maker[rows], maker[firsts])
    return np.asarray(is_beside & ((values.op[rows] >= 0) | are_repeated))


def are_of_other_sizes(one: PairedRun, other: PairedRun, differ: Bools) -> Bools:
    """Returns which rows that differ are of ops of which all arguments have other sizes than in the second recording.

    They sum over other rows: a layer that is called for each half of a batch in one recording, and once in the other.
    """
    numel, numel_b = (
        count_elements(read_sizes(run.side.flow.tensors.table["shape"])).reshape(-1) for run in (one, other)
    )
    asked = np.flatnonzero(differ & (one.op >= 0) & (other.op >= 0))
    partner = np.full(len(one.side.ops.name), -1, np.int64)
    partner[one.op[asked]] = other.op[asked]
    flow, flow_b = one.side.flow, other.side.flow
    reads, there = PairedReads(one.side, other.side).find_all(partner)
    are_other = numel[flow.read[reads]] != numel_b[flow_b.read[there]]
    counts, others = np.zeros((2, len(partner) + 1), np.int64)
    np.add.at(counts, flow.reader[reads], 1)
    np.add.at(others, flow.reader[reads[are_other]], 1)
    return np.asarray(differ & ((counts > 0) & (others == counts))[one.op])


def are_unlike(
    one: PairedRun, other: PairedRun, partner: Rows, are_beyond: Bools, are_uncompared: Bools
) -> Bools:
    """Returns which rows that differ are of ops outside of modules that read what ops made that one recording lacks.

    Nothing tells that they are the same ops, as the `stack` of norms and the one of sums of squares are not. Nor are
    those that read what such ops made, and differ. They are left out only if something is compared that comes of them
    in one of the recordings (in the other, the program may have read it), and if no number that both programs read, and
    that differs, does.

    Args:
        one: a recording.
        other: the other one.
        partner: of each op of the first: the same op of the second; -1 for none.
        are_beyond: which pairs are apart by more than noise.
        are_uncompared: which pairs are not compared.
    """
    names = number_names(one.side, other.side)
    op, op_b = _find_outside(one), _find_outside(other)
    made, made_b = _name_read(one, names[0])[op], _name_read(other, names[1])[op_b]
    asked = np.flatnonzero(are_beyond & (op >= 0) & (op_b >= 0))
    found = asked[(made[asked] >= 0) & (made_b[asked] >= 0) & (made[asked] != made_b[asked])]
    flow, are_ops = one.side.flow, np.zeros(len(one.alone), bool)  # the last stands for no op
    makers = flow.tensors.producer[one.side.origin_of_read]
    while len(found) and not are_ops[op[found]].all():
        are_ops[op[found]] = True
        reads_one = np.zeros(len(are_ops), bool)
        reads_one[flow.reader[are_ops[makers]]] = True
        found = asked[are_ops[op[asked]] | reads_one[op[asked]]]
    is_left_out = np.isin(np.arange(len(op)), found)
    if not len(found):
        return is_left_out
    lead, lead_to_another = np.zeros((2, len(op)), bool)
    for run, own, reads_another in zip(
        (one, other), (op, op_b), _find_other_numbers(one, other, partner), strict=True
    ):
        are_asked, are_shown = np.zeros((2, len(run.alone)), bool)
        are_asked[own[is_left_out]] = True
        are_shown[run.maker[~(is_left_out | are_uncompared) & (run.maker >= 0)]] = True
        lead |= _lead_to(run.side, are_asked, are_shown & _make_numbers(run))[own]
        lead_to_another |= _lead_to(run.side, are_asked, reads_another)[own]
    return np.asarray(is_left_out & lead & ~lead_to_another)


def _find_other_numbers(one: PairedRun, other: PairedRun, partner: Rows) -> tuple[Bools, Bools]:
    """Returns by which ops, `item` for one, each program reads a number that differs from what the other reads."""
    is_asked = one.side.ops.are_named({"local_scalar_dense"})
    reads, reads_b = PairedReads(one.side, other.side).find_all(np.where(is_asked, partner, -1))
    tensor, tensor_b = one.side.flow.read[reads], other.side.flow.read[reads_b]
    row, row_b = one.side.value_of_tensor[tensor], other.side.value_of_tensor[tensor_b]
    known = np.flatnonzero((row >= 0) & (row_b >= 0))
    measured = read_measured(one.side.data, row[known]), read_measured(other.side.data, row_b[known])
    differ = known[find_errors(*measured).error > MOST_APART]
    found, found_b = np.zeros(len(one.alone), bool), np.zeros(len(other.alone), bool)
    found[one.side.flow.reader[reads[differ]]] = True
    found_b[other.side.flow.reader[reads_b[differ]]] = True
    return found, found_b


def _make_numbers(run: PairedRun) -> Bools:
    """Returns which ops return more than checks and counts, which are equal also of tensors that differ."""
    tensors, found = run.side.flow.tensors, np.zeros(len(run.alone), bool)
    found[tensors.producer[~tensors.is_whole & (tensors.producer >= 0)]] = True
    return found


def _lead_to(side: RunTables, ops: Bools, ends: Bools) -> Bools:
    """Returns which ops lead to some ends, of some ops and of those that read what they made; not through checks.

    Args:
        side: the recording.
        ops: the ops that are asked about.
        ends: the ops that they may lead to.
    """
    flow = side.flow
    makers: dict[int, list[int]] = {}  # of each op that was met: those whose output it reads
    waiting, found = np.flatnonzero(ops).tolist(), []
    while waiting:
        op = waiting.pop()
        if ends[op]:
            found.append(op)
            continue
        real = [each for each in flow.outputs[op].tolist() if not flow.tensors.is_whole[each]]
        for reader in {reader for tensor in real for reader in flow.readers[tensor].tolist()}:
            if reader not in makers:
                waiting.append(reader)
            makers.setdefault(reader, []).append(op)
    lead = np.zeros(len(ops), bool)
    while found:
        op = found.pop()
        if not lead[op]:
            lead[op] = True
            found.extend(makers.get(op, ()))
    return lead


def _find_outside(run: PairedRun) -> Rows:
    """Returns the op of each row, if it ran outside of modules and optimizers; else -1."""
    ops = run.side.ops
    is_outside = np.append((ops.call < 0) & (ops.phase != PHASES.index(OPTIMIZER)), False)
    return np.where(is_outside[run.op], run.op, -1)


def _name_read(run: PairedRun, name: Rows) -> Rows:
    """Returns for each op a number of the name of an op outside of modules that made what it reads, and has no partner.

    It is -1 where it reads none.
    """
    side, found = run.side, np.full(len(run.alone), -1, np.int64)
    makers = side.flow.tensors.producer[side.origin_of_read]
    is_one = run.alone[makers] & (np.append(side.ops.call, 0)[makers] < 0)
    np.maximum.at(found, side.flow.reader, np.where(is_one, take(name, makers), -1))
    return found


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
    stats, stats_b = values.stats.take(row), values_b.stats.take(row_b)
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
    stats = values.stats.take(found)
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
