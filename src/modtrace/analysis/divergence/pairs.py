"""Compares the aligned tensors of two recordings: how far apart they are, and how much of that each has made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import NothingRecordedError
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import OF_PARAMETERS, OP_OUTPUT, PARAMETER
from ...recording.statistics.moments import Numbers
from ..alignment.align import align_tables, read_both
from ..alignment.contract import Alignment
from ..tables.columns import Bools, Rows, take
from ..tables.measured import ComparedRows, read_measured
from ..tables.op_rules import UNINITIALIZED
from ..tables.placement import ModuleName
from ..tables.run import RunTables
from .absorbed import AbsorbedDifferences
from .answer import ABSORBED, VERDICTS
from .consequences import ComparedRun
from .errors import NOTHING, Errors, JoinedErrors, find_errors, find_joined_errors
from .inherited import Inherited, add_second, find_inherited, order_by_use
from .names import explain_nothing
from .noise import (
    MOST_NOISE,
    Noise,
    assume_noise,
    find_cancellation,
    find_gain_before,
    give_noise,
    measure_noise,
)
from .paired_run import PairedRun, find_alone
from .ranking import Ranking, rank
from .tensor_metrics import EPSILONS
from .unlike import are_beside, are_of_other_sizes, are_unlike, find_elsewhere

_LATER = [PHASES.index(each) for each in (BACKWARD, OPTIMIZER)]


class ComparedSide(NamedTuple):
    """One of the two recordings."""

    side: RunTables
    #: Of each row of `values`: how far apart what it was computed from is because a recompute differs from its forward.
    given: Numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """All that was found out of each pair, in the order of use."""

    side: RunTables
    other: RunTables
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

    @property
    def are_results(self) -> Bools:
        """Which pairs are of what outermost calls returned in forward."""
        return PairedRun(side=self.side, rows=self.a.rows, alone=self.alone).are_results


def compare_pairs(
    one: ComparedSide,
    other: ComparedSide,
    alignment: Alignment,
    further: Sequence[RecordingData],
    tolerance: float | None,
) -> Compared:
    """Returns what is found out of the pairs of an alignment.

    Args:
        one: a recording.
        other: another one, or the same.
        alignment: of both.
        further: runs of the configuration of the first, from which noise is measured.
        tolerance: the relative error that is noise; None: it is measured, or assumed.
    """
    side, joined = one.side, find_joined_errors(one.side.data, other.side.data, alignment)
    rows, rows_b, order, misfits = _choose_rows(one, other, alignment, joined)
    runs = (
        PairedRun(side=side, rows=rows, alone=find_alone(side, alignment.ops[:, 0])),
        PairedRun(side=other.side, rows=rows_b, alone=find_alone(other.side, alignment.ops[:, 1])),
    )
    measured = read_measured(side.data, rows), read_measured(other.side.data, rows_b)
    errors, is_joined = _compare(side, measured, alignment, joined, order)
    error = errors.error.copy()  # what is not compared may still be told to differ where it is read
    are_repeated = _are_repeated(side, other.side, rows, rows_b)
    _leave_out(errors, are_beside(side, rows, misfits, are_repeated))
    if len(misfits) or all(run.alone.any() for run in runs):
        _leave_out(errors, are_of_other_sizes(*runs, error > 0))
    partner = np.full(len(side.ops.name), -1, np.int64)
    partner[alignment.ops[:, 0]] = alignment.ops[:, 1]
    noise = _find_noise(one, other, measured, is_joined, further, tolerance)
    local = np.maximum(noise.local, errors.floor)
    elsewhere = find_elsewhere(*runs, alignment.steps, errors.error, local)
    is_exchanged = _is_exchanged(*runs, partner)

    def inherit(absorbed: Bools) -> Inherited:
        found = _find_inherited(runs, (one.given, other.given), error, absorbed, elsewhere)
        found.is_copy[is_exchanged] = False
        return found

    def leave_unlike(are_beyond: Bools) -> bool:
        is_unlike = are_unlike(*runs, partner, are_beyond, np.isnan(error))
        _leave_out(errors, is_unlike)
        error[is_unlike] = np.nan
        return bool(is_unlike.any())

    inherited, ranking, noise = _judge(
        inherit,
        leave_unlike,
        errors,
        noise,
        np.maximum(*map(find_gain_before, runs)),
        _are_judged(runs, alignment),
        [
            ComparedRun(run, each, are_repeated, known)
            for run, each, known in zip(runs, measured, elsewhere, strict=True)
        ],
    )
    return Compared(
        side=side,
        other=other.side,
        modules={there: here for here, there in alignment.modules},
        partner=partner,
        alone=runs[0].alone,
        alone_b=runs[1].alone,
        a=measured[0],
        b=measured[1],
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
    is_misfit = one.side.values.numel[pairs[:, 0]] != other.side.values.numel[pairs[:, 1]]
    kept[: len(pairs)] &= ~is_misfit
    order = np.flatnonzero(kept)
    order = order[order_by_use(one.side, every[order])]
    return every[order], every_b[order], order, pairs[is_misfit]


def _leave_out(errors: Errors, are_left: Bools) -> None:
    """Takes pairs for not compared."""
    errors.put_rows(NOTHING, np.flatnonzero(are_left), np.nan, 0.0)


def _compare(
    side: RunTables,
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
    epsilons = [_find_epsilons_of_ops(run.paired.side, ops) for run, ops in zip(runs, through, strict=True)]
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


def _find_epsilons_of_ops(side: RunTables, ops: Rows) -> Numbers:
    """Returns eps of the dtype of what each of some ops returned first; 0 for none."""
    code, dtypes = side.flow.tensors.dtype
    epsilons = np.array([*(EPSILONS.get(dtype, 0.0) for dtype in dtypes), 0.0])
    return epsilons[take(code, take(side.flow.first_returned, ops))]


def _are_repeated(side: RunTables, other: RunTables, rows: Rows, rows_b: Rows) -> Bools:
    """Returns which pairs are of modules that are called another number of times in the other recording."""
    calls = np.append(_count_calls(side), 0)[side.values.place[rows]]
    return np.asarray(calls != np.append(_count_calls(other), 0)[other.values.place[rows_b]])


def _count_calls(side: RunTables) -> Rows:
    """Returns how often the module of each place is called in forward."""
    calls = side.calls
    is_forward = calls.kept & (calls.calls.phase == PHASES.index(FORWARD)) & (calls.place >= 0)
    return np.bincount(calls.place[is_forward], minlength=len(side.names))


def _find_noise(
    one: ComparedSide,
    other: ComparedSide,
    measured: tuple[ComparedRows, ComparedRows],
    is_joined: Bools,
    further: Sequence[RecordingData],
    tolerance: float | None,
) -> Noise:
    """Returns the noise that is given, or that further runs show, or that is assumed without any."""
    a, b = measured
    if tolerance is not None:
        return give_noise(tolerance, len(a.rows))
    ones = find_cancellation(one.side, a.rows, a)
    others = find_cancellation(other.side, b.rows, b)
    # What cancels in one recording alone is a difference; in a part, and not in the whole, it is none.
    cancellation = np.where(is_joined, np.maximum(ones, others), np.minimum(ones, others))
    if further:
        return measure_noise([_find_levels(one.side.data, run, a.rows) for run in further], cancellation)
    # Of the size of a parameter, gradients that are noise alone leave less.
    is_parameter = one.side.values.is_of(PARAMETER, rows=a.rows)
    return assume_noise(a, b, cancellation, np.where(is_parameter, 1.0, MOST_NOISE))


def is_uninitialized(run: ComparedSide, rows: Rows) -> Bools:
    """Returns which rows are of memory that an op has made and nobody written, as that of `empty`."""
    values, is_one = run.side.values, run.side.ops.are_named(UNINITIALIZED)
    op = values.op[rows]
    return np.asarray((op >= 0) & values.is_of(OP_OUTPUT, rows=rows) & np.append(is_one, False)[op])


def _find_inherited(
    runs: tuple[PairedRun, PairedRun],
    given: tuple[Numbers, Numbers],
    error: Numbers,
    absorbed: Bools,
    elsewhere: tuple[Numbers, Numbers],
) -> Inherited:
    """Returns what each pair has inherited, in either recording; `given` are as in `ComparedSide`."""
    (one, other), side = runs, runs[0].side
    found = find_inherited(side, one.rows, error, absorbed, one.alone[:-1], elsewhere[0])
    if other.alone.any():
        second = find_inherited(other.side, other.rows, error, absorbed, other.alone[:-1], elsewhere[1])
        found = add_second(found, second, (one.op >= 0) & ~np.isnan(error))
    np.maximum(found.error, np.maximum(given[0][one.rows], given[1][other.rows]), out=found.error)
    return found


def _may_be_turned(side: RunTables, rows: Rows) -> Bools:
    """Returns which rows are of weights, and of what ops of backward and optimizers make of these."""
    values = side.values
    is_later = (values.op[rows] >= 0) & np.isin(values.phase[rows], _LATER)
    return np.asarray(is_later | values.is_of(*OF_PARAMETERS, rows=rows))


def _are_judged(runs: tuple[PairedRun, PairedRun], alignment: Alignment) -> Bools:
    """Returns which pairs may be blamed.

    They are not what modules pass on, nor of the ops of an optimizer that runs other ops in the other recording.
    """
    in_optimizer = PHASES.index(OPTIMIZER)
    unpaired = zip(runs, (alignment.missing.ops, alignment.extra.ops), strict=True)
    is_other = any((run.side.ops.phase[ops.rows] == in_optimizer).any() for run, ops in unpaired)
    values, rows = runs[0].side.values, runs[0].rows
    is_op = (values.op[rows] >= 0) & (values.phase[rows] == in_optimizer)
    return np.asarray(~(is_op & is_other | runs[0].is_passed_on | runs[1].is_passed_on))


def _is_exchanged(one: PairedRun, other: PairedRun, partner: Rows) -> Bools:
    """Returns which rows are of results of another op than in the second recording, as if slots were exchanged."""
    theirs = take(partner, np.maximum(one.maker, -1))
    return np.asarray(one.are_results & (theirs >= 0) & (other.maker >= 0) & (theirs != other.maker))


def _is_unread(run: ComparedSide, rows: Rows) -> Bools:
    """Returns which rows were made before a step's first call, and nothing that follows reads them."""
    is_unread = run.side.find_unread(run.side.ops.is_preparing)
    return np.append(is_unread, False)[run.side.values.op[rows]]


def _find_levels(a: RecordingData, run: RecordingData, rows: Rows) -> Numbers:
    """Returns the error of each row of `a` against a further run of the same; NaN where that has no such tensor."""
    side, other, steps = read_both(a, run)
    alignment = align_tables(side, other, steps)
    pairs = alignment.values
    if not len(pairs):
        raise NothingRecordedError(explain_nothing(side, other, alignment))
    errors = find_errors(read_measured(a, pairs[:, 0]), read_measured(run, pairs[:, 1]))
    of_row = np.full(len(side.values.step), np.nan)
    of_row[pairs[:, 0]] = errors.error
    return of_row[rows]
