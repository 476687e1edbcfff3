"""Finds pairs whose two tensors are unlike, and outputs that equal those of another op in the other run."""

import numpy as np

from ...recording.phase import OPTIMIZER, PHASES
from ...recording.role import OP_OUTPUT, OUTPUT
from ...recording.statistics.moments import Numbers
from ..alignment.both import translate
from ..alignment.ops import PairedReads, number_names
from ..tables.columns import Bools, Rows, dictionary_codes, number_keys, ranges, take
from ..tables.measured import read_measured
from ..tables.tensors import number_sizes, sort_sizes
from .errors import find_errors
from .paired_run import PairedRun
from .ranking import IS_MADE


def have_resized_first_output(run: PairedRun, resized: Rows, are_repeated: Bools) -> Bools:
    """Returns which pairs are of an op or call whose first output has another size in the other recording.

    Such an op was given another input. For modules this is certain only if the number of calls differs
    (`are_repeated`), as for an LSTM that is given single steps in one run and all steps at once in the other.
    """
    values, rows = run.tables.values, run.rows
    maker = np.where(values.op >= 0, values.op, -2 - values.call)
    is_output = values.is_of(OP_OUTPUT, OUTPUT) & (maker != -1)
    firsts = resized[(is_output & values.is_first)[resized[:, 0]], 0]
    is_beside = is_output[rows] & np.isin(maker[rows], maker[firsts])
    return np.asarray(is_beside & ((values.op[rows] >= 0) | are_repeated))


def have_resized_arguments(a: PairedRun, b: PairedRun, differ: Bools) -> Bools:
    """Returns which unequal pairs are of ops whose arguments all have other sizes in the second recording.

    Such ops sum over other rows, as in a layer that one recording calls for each half of a batch. An op whose output
    has another size on one rank, too, returns a part of what is compared.
    """
    flow, flow_b = a.tables.flow, b.tables.flow
    of_ops = np.flatnonzero(differ & (a.op >= 0) & (b.op >= 0))
    partner = np.full(len(a.tables.ops.name), -1, np.int64)
    partner[a.op[of_ops]] = b.op[of_ops]
    reads, reads_b = PairedReads(a.tables, b.tables).find_all(partner)
    are_resized = flow.tensors.numel[flow.read[reads]] != flow_b.tensors.numel[flow_b.read[reads_b]]
    counts, resized = np.zeros((2, len(partner) + 1), np.int64)
    np.add.at(counts, flow.reader[reads], 1)
    np.add.at(resized, flow.reader[reads[are_resized]], 1)
    made, made_b = a.tables.tensor_of_value[a.rows], b.tables.tensor_of_value[b.rows]
    size, size_b = take(flow.tensors.numel, made), take(flow_b.tensors.numel, made_b)
    is_part = (made >= 0) & (made_b >= 0) & (size != size_b)
    return np.asarray(differ & ~is_part & ((counts > 0) & (resized == counts))[a.op])


def are_of_unlike_ops(
    a: PairedRun, b: PairedRun, partner: Rows, are_beyond: Bools, are_uncompared: Bools
) -> Bools:
    """Returns which unequal pairs are of ops outside of modules that read outputs of unpaired ops.

    Such ops may not correspond: a `stack` of norms is not one of sums of squares. The same holds for ops that read
    their outputs and differ. They are left out only if something computed from them is compared in one of the
    recordings (the program of the other may have read it), and no unequal number that both programs read depends on
    them.

    Args:
        a: one recording, with its rows of the pairs.
        b: the other recording.
        partner: for each op of the first recording its partner in the second; -1 for none.
        are_beyond: which pairs differ by more than noise.
        are_uncompared: which pairs were not compared.
    """
    names, names_b = number_names(a.tables, b.tables)
    op, op_b = _find_outside(a), _find_outside(b)
    maker, maker_b = _name_unpaired_makers(a, names)[op], _name_unpaired_makers(b, names_b)[op_b]
    outside = np.flatnonzero(are_beyond & (op >= 0) & (op_b >= 0))
    pairs = outside[(maker[outside] >= 0) & (maker_b[outside] >= 0) & (maker[outside] != maker_b[outside])]
    flow, is_unlike = a.tables.flow, np.zeros(len(a.is_unpaired), bool)  # the last element stands for no op
    makers = flow.tensors.producer[a.tables.origin_of_read]
    while len(pairs) and not is_unlike[op[pairs]].all():
        is_unlike[op[pairs]] = True
        reads_unlike = np.zeros(len(is_unlike), bool)
        reads_unlike[flow.reader[is_unlike[makers]]] = True
        pairs = outside[is_unlike[op[outside]] | reads_unlike[op[outside]]]
    is_left_out = np.isin(np.arange(len(op)), pairs)
    if not len(pairs):
        return is_left_out
    lead, lead_to_other_number = np.zeros((2, len(op)), bool)
    other_numbers = _find_other_numbers(a, b, partner)
    for run, own, reads_other_number in zip((a, b), (op, op_b), other_numbers, strict=True):
        is_start, is_compared = np.zeros((2, len(run.is_unpaired)), bool)
        is_start[own[is_left_out]] = True
        is_compared[run.maker[~(is_left_out | are_uncompared) & (run.maker >= 0)]] = True
        lead |= _lead_to(run, is_start, is_compared & _return_real_numbers(run))[own]
        lead_to_other_number |= _lead_to(run, is_start, reads_other_number)[own]
    return np.asarray(is_left_out & lead & ~lead_to_other_number)


def _find_other_numbers(a: PairedRun, b: PairedRun, partner: Rows) -> tuple[Bools, Bools]:
    """Returns the ops, such as `item`, by which each program reads a number that differs from the other's."""
    is_read = a.tables.ops.are_named({"local_scalar_dense"})
    reads, reads_b = PairedReads(a.tables, b.tables).find_all(np.where(is_read, partner, -1))
    row = a.tables.value_of_tensor[a.tables.flow.read[reads]]
    row_b = b.tables.value_of_tensor[b.tables.flow.read[reads_b]]
    known = np.flatnonzero((row >= 0) & (row_b >= 0))
    measured = read_measured(a.tables.data, row[known]), read_measured(b.tables.data, row_b[known])
    differ = known[find_errors(*measured).error > MOST_APART]
    by_op, by_op_b = np.zeros(len(a.is_unpaired), bool), np.zeros(len(b.is_unpaired), bool)
    by_op[a.tables.flow.reader[reads[differ]]] = True
    by_op_b[b.tables.flow.reader[reads_b[differ]]] = True
    return by_op, by_op_b


def _return_real_numbers(run: PairedRun) -> Bools:
    """Returns which ops return more than checks and counts, which may be equal even if tensors differ."""
    tensors, is_real = run.tables.flow.tensors, np.zeros(len(run.is_unpaired), bool)
    is_real[tensors.producer[~tensors.is_whole & (tensors.producer >= 0)]] = True
    return is_real


def _lead_to(run: PairedRun, starts: Bools, ends: Bools) -> Bools:
    """Returns which of `starts`, and of the ops that read from these, lead to one of `ends` without passing a check."""
    flow = run.tables.flow
    makers: dict[int, list[int]] = {}  # for each op that was reached, the ops whose outputs it reads
    waiting, lead_back = np.flatnonzero(starts).tolist(), []
    while waiting:
        op = waiting.pop()
        if ends[op]:
            lead_back.append(op)
            continue
        real = [made for made in flow.outputs[op].tolist() if not flow.tensors.is_whole[made]]
        for reader in {reader for made in real for reader in flow.readers[made].tolist()}:
            if reader not in makers:
                waiting.append(reader)
            makers.setdefault(reader, []).append(op)
    lead = np.zeros(len(ends), bool)
    while lead_back:
        op = lead_back.pop()
        if not lead[op]:
            lead[op] = True
            lead_back.extend(makers.get(op, ()))
    return lead


def _find_outside(run: PairedRun) -> Rows:
    """Returns the op of each row if it ran outside of modules and optimizers; -1 otherwise."""
    ops = run.tables.ops
    is_outside = np.append((ops.call < 0) & (ops.phase != PHASES.index(OPTIMIZER)), False)
    return np.where(is_outside[run.op], run.op, -1)


def _name_unpaired_makers(run: PairedRun, name: Rows) -> Rows:
    """Returns for each op the name's number of an unpaired op outside of modules whose output it reads; or -1."""
    tables, of_op = run.tables, np.full(len(run.is_unpaired), -1, np.int64)
    makers = tables.flow.tensors.producer[tables.origin_of_read]
    is_outside = run.is_unpaired[makers] & (np.append(tables.ops.call, 0)[makers] < 0)
    np.maximum.at(of_op, tables.flow.reader, np.where(is_outside, take(name, makers), -1))
    return of_op


#: A tensor whose minimum and maximum have at least this ratio counts as a mask.
_MASKED = 1e3

#: Tensors with a larger error do not count as equal, however large the noise is.
MOST_APART = 0.05

#: The largest number of pairs of tensors that are compared, and of pairs with similar norms.
_MOST_PAIRS = 10_000
_MOST_NEAR = 1_000_000


def find_elsewhere(
    a: PairedRun, b: PairedRun, steps: Rows, error: Numbers, noise: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns the error of each tensor against an equal one that another op of the other recording returned.

    Everything before such a tensor had the same result in both runs, whatever the errors on the way are: by unpaired
    ops, or by other ones that have the same names. Only tensors without pair, or with an unequal one, are compared.
    Without unpaired ops all tensors have pairs, and nothing is compared.

    Args:
        a: one recording, with its rows of the pairs.
        b: the other recording.
        steps: pairs of steps.
        error: the error of each pair.
        noise: the noise of each pair.

    Returns:
        The error of each tensor of the first recording, and of the second; NaN for tensors without an equal one.
    """
    elsewhere, elsewhere_b = (np.full(len(run.tables.flow.tensors), np.nan) for run in (a, b))
    differs = error > IS_MADE * noise
    if not differs.any() or not (a.is_unpaired.any() or b.is_unpaired.any()):
        return elsewhere, elsewhere_b
    with np.errstate(all="ignore"):
        rows, rows_b, errors = _find_equal(a, b, steps, differs, noise)
    kept = ~_are_exchanged(a, b, rows, rows_b)
    elsewhere[a.tables.tensor_of_value[rows[kept]]] = errors[kept]
    elsewhere_b[b.tables.tensor_of_value[rows_b[kept]]] = errors[kept]
    return elsewhere, elsewhere_b


def _find_equal(
    a: PairedRun, b: PairedRun, steps: Rows, differs: Bools, noise: Numbers
) -> tuple[Rows, Rows, Numbers]:
    """Returns rows of both recordings that are equal up to noise, and their errors."""
    rows, rows_b = _find_unequal_outputs(a, differs), _find_unequal_outputs(b, differs)
    values, values_b = a.tables.values, b.tables.values
    stats, stats_b = values.read_stats().take(rows), values_b.read_stats().take(rows_b)
    noises, noises_b = _find_noises(a, rows, noise), _find_noises(b, rows_b, noise)
    keys, keys_b = number_keys(
        (translate(values.step[rows], steps), values_b.step[rows_b]),
        (values.phase[rows], values_b.phase[rows_b]),
        number_sizes(sort_sizes(values.sizes[rows]), sort_sizes(values_b.sizes[rows_b])),
    )
    most = max(noises.max(initial=0.0), noises_b.max(initial=0.0))
    near, near_b = _find_near((keys, stats.l2), (keys_b, stats_b.l2), float(most)).T
    level = np.fmax(noises[near], noises_b[near_b])
    size = level * np.fmax(np.abs(stats.min[near]), np.abs(stats.max[near]))
    is_near = np.abs(stats.l2[near] - stats_b.l2[near_b]) <= level * stats.l2[near]
    for name in ("min", "max"):
        is_near &= np.abs(getattr(stats, name)[near] - getattr(stats_b, name)[near_b]) <= size
    first = np.flatnonzero(is_near)[np.argsort(rows[near[is_near]], kind="stable")][:_MOST_PAIRS]
    rows, rows_b = rows[near[first]], rows_b[near_b[first]]
    error = find_errors(read_measured(a.tables.data, rows), read_measured(b.tables.data, rows_b)).error
    kept = error <= level[first]
    return rows[kept], rows_b[kept], error[kept]


def _find_unequal_outputs(run: PairedRun, differs: Bools) -> Rows:
    """Returns rows of `values` of outputs of ops that have no pair, or an unequal one.

    Constants, integers and masks are left out, because the statistics of unlike ones may be equal.
    """
    tensor = run.tables.tensor_of_value
    is_equal = np.zeros(len(tensor), bool)
    is_equal[run.rows] = True
    is_equal[run.rows[differs]] = False
    rows = np.flatnonzero((tensor >= 0) & ~is_equal)
    rows = rows[~run.tables.flow.tensors.is_whole[tensor[rows]]]
    stats = run.tables.values.read_stats().take(rows)
    is_mask = -stats.min > _MASKED * np.abs(stats.max)
    return rows[np.isfinite(stats.l2) & (stats.min < stats.max) & ~is_mask]


def _find_noises(run: PairedRun, rows: Rows, noise: Numbers) -> Numbers:
    """Returns the noise of rows of `values`: the median over the pairs of their dtype."""
    code, dtypes = dictionary_codes(run.tables.values.table["dtype"])
    of_dtype = np.zeros(len(dtypes) + 1)
    for dtype in np.unique(code[run.rows]).tolist():
        of_dtype[dtype] = np.median(noise[code[run.rows] == dtype])
    return np.minimum(of_dtype[code[rows]], MOST_APART)


def _find_near(a: tuple[Rows, Numbers], b: tuple[Rows, Numbers], share: float) -> Rows:
    """Returns pairs (n, 2) of rows of two tables with equal keys, whose norms differ by `share` at most.

    Args:
        a: the keys and norms of the rows of one table.
        b: the keys and norms of the rows of the other table.
        share: the largest relative difference of norms.
    """
    order, order_b = (np.lexsort((norms, keys)) for keys, norms in (a, b))
    keys, norms, keys_b, norms_b = a[0][order], a[1][order], b[0][order_b], b[1][order_b]
    pairs, count = [np.empty((0, 2), np.int64)], 0
    for key in np.intersect1d(keys, keys_b).tolist():
        (begin, end), (begin_b, end_b) = (
            np.searchsorted(sorted_keys, [key, key + 1]) for sorted_keys in (keys, keys_b)
        )
        low = begin_b + np.searchsorted(norms_b[begin_b:end_b], norms[begin:end] * (1 - share))
        high = begin_b + np.searchsorted(norms_b[begin_b:end_b], norms[begin:end] * (1 + share), side="right")
        pairs.append(
            np.stack([np.repeat(np.arange(begin, end), high - low), ranges(low, high - low)], axis=1)
        )
        if (count := count + len(pairs[-1])) > _MOST_NEAR:
            break
    near = np.concatenate(pairs)
    return np.stack([order[near[:, 0]], order_b[near[:, 1]]], axis=1)


def _are_exchanged(a: PairedRun, b: PairedRun, rows: Rows, rows_b: Rows) -> Bools:
    """Returns which equal rows have pairs that are equal crosswise: each op returned what the other should have."""
    partner, partner_b = (np.full(len(run.tables.values.step) + 1, -1, np.int64) for run in (a, b))
    partner[a.rows], partner_b[b.rows] = b.rows, a.rows
    width = len(partner_b)
    crossed = partner_b[rows_b] * width + partner[rows]
    return np.asarray(
        (partner[rows] >= 0) & (partner_b[rows_b] >= 0) & np.isin(crossed, rows * width + rows_b)
    )
