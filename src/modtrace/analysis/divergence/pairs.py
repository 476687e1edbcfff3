"""Compares the aligned tensors of two recordings: how far apart they are, and how much of that each has made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import NothingRecordedError
from ...recording.arrow.arrays import from_numpy
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import LEAF, OF_PARAMETERS, OP_OUTPUT, OUTPUT, PARAMETER
from ...recording.statistics.moments import Numbers
from ..alignment.align import align
from ..alignment.contract import Alignment, ModuleName
from ..alignment.sides import Side
from ..step.calls import Bools, Rows, column_of, take
from ..tables.op_rules import UNINITIALIZED
from .absorbed import AbsorbedDifferences
from .answer import ABSORBED, VERDICTS
from .cancellation import find_cancellation, find_gain_before
from .consequences import ComparedRun
from .decode import EPSILONS
from .errors import NOTHING, Errors, find_errors
from .inherited import Inherited, add_second, find_inherited, order_by_use
from .joined_errors import JoinedErrors, find_joined_errors
from .measured import ComparedRows, read_measured
from .no_common import explain_nothing
from .noise import MOST_NOISE, Noise, assume_noise, give_noise, measure_noise
from .ranking import Ranking, rank
from .reads import find_equal_reads
from .unlike import are_beside, are_of_other_sizes, are_unlike

_LATER = [PHASES.index(each) for each in (BACKWARD, OPTIMIZER)]


class ComparedSide(NamedTuple):
    """One of the two recordings."""

    side: Side
    #: Of each row of `values`: how far apart what it was computed from is because a recompute differs from its forward.
    given: Numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """All that was found out of each pair, in the order of use."""

    side: Side
    other: Side
    modules: Mapping[ModuleName, ModuleName]  # of the second recording, and those of the first that they are
    partner: Rows  # of each op of the first: the same op of the second; -1 for none
    alone: Bools  # of each op of the first: it computes something, and the second lacks it; the last stands for no op
    alone_b: Bools  # the same of the second recording
    a: ComparedRows
    b: ComparedRows
    errors: Errors
    inherited: Inherited
    noise: Noise
    ranking: Ranking
    misfits: Rows  # (n, 2): aligned rows of `values` with unequal numbers of elements, which are no pairs
    #: FIRST or SECOND: rows of `a` are of what this recording recomputed, and rows of `b` of its forward.
    recompute_of: str | None = None


def compare_pairs(
    one: ComparedSide,
    other: ComparedSide,
    alignment: Alignment,
    runs: Sequence[RecordingData],
    tolerance: float | None,
) -> Compared:
    """Returns what is found out of the pairs of an alignment.

    Args:
        one: a recording.
        other: another one, or the same.
        alignment: of both.
        runs: further runs of the configuration of the first, from which noise is measured.
        tolerance: the relative error that is noise; None: it is measured, or assumed.
    """
    side, joined = one.side, find_joined_errors(one.side.data, other.side.data, alignment)
    rows, rows_b, order, misfits = _choose_rows(one, other, alignment, joined)
    measured, measured_b = read_measured(side.data, rows), read_measured(other.side.data, rows_b)
    errors, is_joined = _compare(side, (measured, measured_b), alignment, joined, order)
    error = errors.error.copy()  # what is not compared may still be told to differ where it is read
    are_repeated = _are_repeated(side, other.side, rows, rows_b)
    is_beside = are_beside(side, rows, misfits, are_repeated)
    alone, alone_b = _find_alone(one, alignment.ops[:, 0]), _find_alone(other, alignment.ops[:, 1])
    if len(misfits) or (alone.any() and alone_b.any()):
        is_beside |= are_of_other_sizes((side, rows), (other.side, rows_b), errors.error > 0)
    errors.put_rows(NOTHING, np.flatnonzero(is_beside), np.nan, 0.0)
    partner = np.full(len(side.ops.name), -1, np.int64)
    partner[alignment.ops[:, 0]] = alignment.ops[:, 1]
    noise = _find_noise(one, other, measured, measured_b, is_joined, runs, tolerance)
    are_judged = _are_judged(side, other.side, rows, alignment)
    are_judged &= ~(_is_passed_on(side, rows, alone) | _is_passed_on(other.side, rows_b, alone_b))
    is_exchanged = _is_exchanged(side, rows, other.side, rows_b, partner)

    local = np.maximum(noise.local, errors.floor)
    of_reads = find_equal_reads(
        (side, rows), (other.side, rows_b), alignment.steps, partner, (alone, alone_b), errors.error, local
    )

    def inherit(absorbed: Bools) -> Inherited:
        found = _find_inherited((one, other), (rows, rows_b), error, absorbed, (alone, alone_b), of_reads)
        found.is_copy[is_exchanged] = False
        return found

    def leave_unlike(are_beyond: Bools) -> bool:
        both = (side, rows, alone), (other.side, rows_b, alone_b)
        makers = _find_makers(side, rows), _find_makers(other.side, rows_b)
        is_unlike = are_unlike(*both, are_beyond, makers, np.isnan(error))
        errors.put_rows(NOTHING, np.flatnonzero(is_unlike), np.nan, 0.0)
        error[is_unlike] = np.nan
        return bool(is_unlike.any())

    both = (
        ComparedRun(side, measured, are_model_outputs(side, rows), are_repeated, of_reads[0]),
        ComparedRun(other.side, measured_b, are_model_outputs(other.side, rows_b), are_repeated, of_reads[1]),
    )
    gain = np.maximum(find_gain_before(side, rows, alone), find_gain_before(other.side, rows_b, alone_b))
    inherited, ranking, noise = _judge(inherit, leave_unlike, errors, noise, gain, are_judged, both)
    return Compared(
        side=side,
        other=other.side,
        modules={there: here for here, there in alignment.modules},
        partner=partner,
        alone=alone,
        alone_b=alone_b,
        a=measured,
        b=measured_b,
        errors=errors,
        inherited=inherited,
        noise=noise,
        ranking=ranking,
        misfits=misfits,
    )


def _choose_rows(
    one: ComparedSide, other: ComparedSide, alignment: Alignment, joined: JoinedErrors
) -> tuple[Rows, Rows, Rows, Rows]:
    """Returns the pairs of rows of `values` that are compared, in the order of use, and those of unequal sizes.

    Returns:
        the rows of the first recording, those of the second, the position of each among the aligned pairs and then
        those that are joined, and the pairs with unequal numbers of elements, as `Compared.misfits`.
    """
    pairs = alignment.values
    every, every_b = np.concatenate([pairs, np.stack([joined.rows_a, joined.rows_b], axis=1)]).T
    kept = ~(is_uninitialized(one, every) | _is_unread(one, every) | _is_unread(other, every_b))
    numel, numel_b = (column_of(each.side.data.table("values"), "numel") for each in (one, other))
    is_misfit = numel[pairs[:, 0]] != numel_b[pairs[:, 1]]
    kept[: len(pairs)] &= ~is_misfit
    order = np.flatnonzero(kept)
    order = order[order_by_use(one.side, every[order])]
    return every[order], every_b[order], order, pairs[is_misfit]


def _compare(
    side: Side,
    measured: tuple[ComparedRows, ComparedRows],
    alignment: Alignment,
    joined: JoinedErrors,
    order: Rows,
) -> tuple[Errors, Bools]:
    """Returns how far pairs are apart, and which are of a part and a whole; for arguments see `_choose_rows`."""
    permuted = np.concatenate([alignment.permuted, np.full(len(joined), -1)])[order]
    errors = find_errors(*measured, permuted, alignment.axes, _may_be_turned(side, measured[0].rows))
    is_joined = order >= len(alignment.values)
    for name in ("error", "floor", "metric"):
        getattr(errors, name)[is_joined] = getattr(joined, name)[order[is_joined] - len(alignment.values)]
    return errors, is_joined


def _judge(
    inherit: Callable[[Bools], Inherited],
    leave_unlike: Callable[[Bools], bool],
    errors: Errors,
    noise: Noise,
    gain: Numbers,
    are_judged: Bools,
    runs: Sequence[ComparedRun],
) -> tuple[Inherited, Ranking, Noise]:
    """Returns what each pair has inherited, what is said of it, and the noise: what is absorbed excuses nothing else.

    Args:
        inherit: returns what the pairs have inherited, if these come to nothing.
        leave_unlike: leaves out which of the pairs that may be blamed are none, and returns whether any is.
        errors: how far each pair is apart.
        noise: what of that is noise.
        gain: how many times larger it is by what was computed between pairs.
        are_judged: the pairs that may be blamed.
        runs: the two recordings.
    """
    absorbed = np.zeros(len(errors), bool)
    inherited = inherit(absorbed)
    through = inherited.through, inherited.through_b
    epsilons = [_find_epsilons_of_ops(run.side, ops) for run, ops in zip(runs, through, strict=True)]
    noise = noise.add_rounding(np.maximum(*epsilons)).multiply(gain)
    ranking = rank(errors, inherited, noise, are_judged)
    if leave_unlike(ranking.is_beyond):
        inherited = inherit(absorbed)
        ranking = rank(errors, inherited, noise, are_judged)
    found = AbsorbedDifferences(runs, errors)
    ranking = found.dismiss(ranking)
    absorbed = ranking.least == VERDICTS.index(ABSORBED)
    if not absorbed.any():
        return inherited, ranking, noise
    inherited = inherit(absorbed)
    again = rank(errors, inherited, noise, are_judged).dismiss(absorbed)
    return inherited, found.dismiss(again), noise


def _find_epsilons_of_ops(side: Side, ops: Rows) -> Numbers:
    """Returns eps of the dtype of what each of some ops returned first; 0 for none."""
    distinct, which = np.unique(ops, return_inverse=True)
    first = take(side.flow.first_returned, distinct)
    dtypes = side.flow.tensors.table["dtype"].take(from_numpy(first[first >= 0])).to_pylist()
    found = np.zeros(len(distinct))
    found[first >= 0] = [EPSILONS.get(each, 0.0) for each in dtypes]
    return found[which.reshape(-1)]


def _are_repeated(side: Side, other: Side, rows: Rows, rows_b: Rows) -> Bools:
    """Returns which pairs are of modules that are called another number of times in the other recording."""
    calls = np.append(_count_calls(side), 0)[side.values.place[rows]]
    return np.asarray(calls != np.append(_count_calls(other), 0)[other.values.place[rows_b]])


def _count_calls(side: Side) -> Rows:
    """Returns how often the module of each place is called in forward."""
    calls = side.calls
    is_forward = calls.kept & (calls.calls.phase == PHASES.index(FORWARD)) & (calls.place >= 0)
    return np.bincount(calls.place[is_forward], minlength=len(side.names))


def _find_noise(
    one: ComparedSide,
    other: ComparedSide,
    a: ComparedRows,
    b: ComparedRows,
    is_joined: Bools,
    runs: Sequence[RecordingData],
    tolerance: float | None,
) -> Noise:
    """Returns the noise that is given, or that further runs show, or that is assumed without any."""
    if tolerance is not None:
        return give_noise(tolerance, len(a.rows))
    ones = find_cancellation(one.side, a.rows, a)
    others = find_cancellation(other.side, b.rows, b)
    # What cancels in one recording alone is a difference; in a part, and not in the whole, it is none.
    cancellation = np.where(is_joined, np.maximum(ones, others), np.minimum(ones, others))
    if runs:
        return measure_noise([_find_levels(one.side.data, run, a.rows) for run in runs], cancellation)
    # Of the size of a parameter, gradients that are noise alone leave less.
    is_parameter = one.side.values.is_of(PARAMETER, rows=a.rows)
    return assume_noise(a, b, cancellation, np.where(is_parameter, 1.0, MOST_NOISE))


def is_uninitialized(run: ComparedSide, rows: Rows) -> Bools:
    """Returns which rows are of memory that an op has made and nobody written, as that of `empty`."""
    values, is_one = run.side.values, run.side.ops.are_named(UNINITIALIZED)
    op = values.op[rows]
    return np.asarray((op >= 0) & values.is_of(OP_OUTPUT, rows=rows) & np.append(is_one, False)[op])


def _find_alone(run: ComparedSide, paired: Rows) -> Bools:
    is_alone = np.append(~run.side.ops.is_plain, False)
    is_alone[paired] = False
    return is_alone


def _find_inherited(
    runs: tuple[ComparedSide, ComparedSide],
    rows: tuple[Rows, Rows],
    error: Numbers,
    absorbed: Bools,
    alone: tuple[Bools, Bools],
    of_reads: tuple[Numbers, Numbers],
) -> Inherited:
    (one, other), side = runs, runs[0].side
    found = find_inherited(side, rows[0], error, absorbed, alone[0][:-1], of_reads[0])
    if alone[1].any():
        second = find_inherited(other.side, rows[1], error, absorbed, alone[1][:-1], of_reads[1])
        is_op = side.values.is_of(OP_OUTPUT, rows=rows[0]) & ~np.isnan(error)
        found = add_second(found, second, is_op)
    np.maximum(found.error, np.maximum(one.given[rows[0]], other.given[rows[1]]), out=found.error)
    return found


def _may_be_turned(side: Side, rows: Rows) -> Bools:
    """Returns which rows are of weights, and of what ops of backward and optimizers make of these."""
    values = side.values
    is_later = (values.op[rows] >= 0) & np.isin(values.phase[rows], _LATER)
    return np.asarray(is_later | values.is_of(*OF_PARAMETERS, rows=rows))


def _are_judged(side: Side, other: Side, rows: Rows, alignment: Alignment) -> Bools:
    """Returns which rows may be blamed: of an optimizer that runs other ops in the other recording, its ops may not."""
    in_optimizer = PHASES.index(OPTIMIZER)
    unpaired = ((side, alignment.missing.ops), (other, alignment.extra.ops))
    is_other = any((each.ops.phase[ops.rows] == in_optimizer).any() for each, ops in unpaired)
    is_op = (side.values.op[rows] >= 0) & (side.values.phase[rows] == in_optimizer)
    return np.asarray(~(is_op & is_other))


def _is_passed_on(side: Side, rows: Rows, alone: Bools) -> Bools:
    """Returns which rows are outputs of modules that computed nothing: an op outside of the call returned the tensor.

    Where that is not known, as no op that returned it was measured, a module has computed what it returned. Where only
    one recording has the op, the output shows what that has made.
    """
    values, calls = side.values, side.calls.calls
    op, own = _find_makers(side, rows), values.call[rows]
    around = take(side.ops.call, np.maximum(op, -1))
    is_passed_on = values.is_of(OUTPUT, rows=rows) & (own >= 0) & (op >= -1) & ~values.is_of_op[rows]
    is_passed_on &= ~alone[np.maximum(op, -1)]
    while (is_passed_on & (around >= 0)).any():
        is_passed_on &= around != own
        around = take(calls.parent, around)
    return np.asarray(is_passed_on)


def are_model_outputs(side: Side, rows: Rows) -> Bools:
    """Returns which rows of `values` are of what outermost calls returned in forward."""
    values, call = side.values, side.values.call[rows]
    is_output = values.is_of(OUTPUT, rows=rows) & (values.phase[rows] == PHASES.index(FORWARD)) & (call >= 0)
    return np.asarray(is_output & (take(side.calls.outermost, call) == call))


def _is_exchanged(side: Side, rows: Rows, other: Side, rows_b: Rows, partner: Rows) -> Bools:
    """Returns which rows are of results of another op than in the second recording, as if slots were exchanged."""
    theirs = take(partner, np.maximum(_find_makers(side, rows), -1))
    makers_b = _find_makers(other, rows_b)
    is_exchanged: Bools = (theirs >= 0) & (makers_b >= 0) & (theirs != makers_b)
    return are_model_outputs(side, rows) & is_exchanged


def _find_makers(side: Side, rows: Rows) -> Rows:
    """Returns the op that returned the tensor of each row; -1 for a leaf, -2 where no op that did was measured."""
    values = side.values
    maker = np.full(int(values.group.max(initial=-1)) + 1, -2, np.int64)
    leaves = np.flatnonzero(values.is_of(LEAF))
    outputs = np.flatnonzero(values.is_of(OP_OUTPUT) & (values.op >= 0))
    maker[values.group[leaves]], maker[values.group[outputs]] = -1, values.op[outputs]
    return np.asarray(maker[values.group[rows]])


def _is_unread(run: ComparedSide, rows: Rows) -> Bools:
    """Returns which rows were made before a step's first call, and nothing that follows reads them."""
    is_unread = run.side.find_unread(run.side.ops.is_preparing)
    return np.append(is_unread, False)[run.side.values.op[rows]]


def _find_levels(a: RecordingData, run: RecordingData, rows: Rows) -> Numbers:
    """Returns the error of each row of `a` against a further run of the same; NaN where that has no such tensor."""
    alignment = align(a, run)
    pairs = alignment.values
    if not len(pairs):
        raise NothingRecordedError(explain_nothing(a, run, alignment))
    errors = find_errors(read_measured(a, pairs[:, 0]), read_measured(run, pairs[:, 1]))
    of_row = np.full(a.table("values").num_rows, np.nan)
    of_row[pairs[:, 0]] = errors.error
    return of_row[rows]
