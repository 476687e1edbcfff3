"""Compares the aligned tensors of two recordings: computes each pair's error, its inputs' error, and its rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import NothingRecordedError
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import OF_PARAMETERS, PARAMETER
from ...recording.statistics.moments import Numbers
from ..alignment.align import align_tables, read_both
from ..alignment.contract import REASONS, Alignment, Unpaired
from ..tables.columns import Bools, Rows, number_codes, number_texts, take
from ..tables.measured import read_measured
from ..tables.op_rules import MOVES
from ..tables.placement import ModuleName
from ..tables.run import RunTables
from .absorbed import AbsorbedDifferences
from .answer import ABSORBED, FIRST, VERDICTS
from .errors import NOTHING, STATISTICS, Errors, JoinedErrors, find_errors, find_joined_errors
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
from .pair_inputs import PairInputs, find_inputs_in_both, order_by_use
from .paired_run import PairedRun, find_unpaired_ops, is_uninitialized, records_ops
from .ranking import Ranking, rank
from .tensor_metrics import EPSILONS
from .unlike import are_of_unlike_ops, find_elsewhere, have_resized_arguments, have_resized_first_output


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedPairs:
    """All that was computed for each pair, in the order of use."""

    a: PairedRun
    b: PairedRun
    modules: Mapping[ModuleName, ModuleName]  # from modules of the second to those of the first
    partner: Rows  # for each op of the first recording its partner in the second; -1 for none
    errors: Errors
    inputs: PairInputs
    noise: Noise
    ranking: Ranking
    resized: Rows  # (n, 2): aligned rows of `values` that are no pairs, as element counts differ
    other_mesh: bool  # as in `ComparableRuns`
    #: FIRST or SECOND: the recording in which rows of `a` are of a recompute, and rows of `b` of its forward.
    recompute_of: str | None = None

    def run(self, name: str) -> PairedRun:
        """Returns the run that is called FIRST or SECOND."""
        return self.a if name == FIRST else self.b


def compare_pairs(
    a: RunTables,
    b: RunTables,
    alignment: Alignment,
    further: Sequence[RecordingData],
    tolerance: float | None,
    recompute_errors: tuple[Numbers, Numbers],
    other_mesh: bool,
) -> ComparedPairs:
    """Returns the compared pairs of an alignment.

    Args:
        a: the tables of one recording.
        b: the tables of another one, or of the same.
        alignment: which rows of both correspond.
        further: runs with the configuration of the first, from which noise is measured.
        tolerance: the relative error that counts as noise; None to measure or assume it.
        recompute_errors: for each row of `values` of both, the error of its inputs that is due to a recompute that
            differs from its forward.
        other_mesh: as in `ComparableRuns`.
    """
    joined = find_joined_errors(a.data, b.data, alignment)
    rows, rows_b, order, resized = _choose_rows(a, b, alignment, joined)
    have_ops = records_ops(a) and records_ops(b)
    has_unpaired = have_ops and not other_mesh  # for another mesh of ranks, wrappers run ops of their own
    are_unpaired = (
        find_unpaired_ops(tables, np.append(ops, _list_around(tables, unpaired)), unpaired.modules)
        & has_unpaired
        for tables, ops, unpaired in zip(
            (a, b), alignment.ops.T, (alignment.missing, alignment.extra), strict=True
        )
    )
    run, run_b = (
        PairedRun(tables=tables, rows=paired, is_unpaired=is_unpaired, have_ops=have_ops)
        for tables, paired, is_unpaired in zip((a, b), (rows, rows_b), are_unpaired, strict=True)
    )
    runs = run, run_b
    errors = _find_errors(runs, alignment, joined, order)
    noise = _find_noise(runs, order >= len(alignment.values), further, tolerance)
    recompute_error = np.maximum(recompute_errors[0][rows], recompute_errors[1][rows_b])
    judge = _Judge(runs, alignment, errors, recompute_error, noise, resized)
    inputs, ranking, noise = judge.judge()
    return ComparedPairs(
        a=runs[0],
        b=runs[1],
        modules={name_b: name for name, name_b in alignment.modules},
        partner=judge.partner,
        errors=errors,
        inputs=inputs,
        noise=noise,
        ranking=ranking,
        resized=resized,
        other_mesh=other_mesh,
    )


def _list_around(tables: RunTables, unpaired: Unpaired) -> Rows:
    """Returns the ops around a model that only one recording calls with micro-batches: those of the loss, say.

    Both recordings have them, though none is the partner of another.
    """
    ops = unpaired.ops.rows[unpaired.ops.reason == REASONS.index("joined")]
    return np.asarray(ops[tables.ops.call[ops] < 0])


def _choose_rows(
    a: RunTables, b: RunTables, alignment: Alignment, joined: JoinedErrors
) -> tuple[Rows, Rows, Rows, Rows]:
    """Returns the rows of `values` that are compared, in the order of use, and the pairs of unequal sizes.

    Returns:
        the rows of the first recording, those of the second, the position of each pair among the aligned pairs followed
        by the joined ones, and the pairs with unequal numbers of elements, as in `ComparedPairs.resized`.
    """
    pairs = alignment.values
    rows, rows_b = np.concatenate([pairs, np.stack([joined.rows_a, joined.rows_b], axis=1)]).T
    is_kept = ~(is_uninitialized(a, rows) | _is_unread(a, rows) | _is_unread(b, rows_b))
    is_resized = a.values.numel[pairs[:, 0]] != b.values.numel[pairs[:, 1]]
    is_kept[: len(pairs)] &= ~is_resized
    order = np.flatnonzero(is_kept)
    order = order[order_by_use(a, rows[order])]
    return rows[order], rows_b[order], order, pairs[is_resized]


def _is_unread(tables: RunTables, rows: Rows) -> Bools:
    """Returns which rows were computed before a step's first call and are read by nothing afterwards."""
    is_unread = tables.find_unread(tables.ops.is_preparing)
    return np.append(is_unread, False)[tables.values.op[rows]]


def _find_errors(
    runs: tuple[PairedRun, PairedRun], alignment: Alignment, joined: JoinedErrors, order: Rows
) -> Errors:
    """Returns the errors of the pairs at some positions among the aligned pairs followed by the joined ones."""
    values, rows = runs[0].tables.values, runs[0].rows
    permuted = np.concatenate([alignment.permuted, np.full(len(joined), -1)])[order]
    # Only weights, and what backward and optimizers make of them, may be transposed.
    is_later = np.isin(values.phase[rows], [PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)])
    may_be_turned = (values.op[rows] >= 0) & is_later | values.is_of(*OF_PARAMETERS, rows=rows)
    may_be_turned &= ~_are_read_alike(*runs)
    errors = find_errors(runs[0].measured, runs[1].measured, permuted, alignment.axes, may_be_turned)
    of_joined = order - len(alignment.values)
    for name in ("error", "floor", "metric"):
        getattr(errors, name)[of_joined >= 0] = getattr(joined, name)[of_joined[of_joined >= 0]]
    return errors


def _are_read_alike(run: PairedRun, run_b: PairedRun) -> Bools:
    """Returns which pairs are parameters of modules of one type that are first read by ops of one name.

    Such modules store their weights alike, so that a square weight in the other layout is a difference.
    """
    one, other = run.tables, run_b.tables
    types = number_texts([name.type for name in one.names], [name.type for name in other.names])
    ops = number_codes((one.ops.names, one.ops.name), (other.ops.names, other.ops.name))
    is_parameter = one.values.is_of(PARAMETER, rows=run.rows)
    alike = [
        (first >= 0) & (first == second)
        for first, second in (
            (take(types[0], one.values.home[run.rows]), take(types[1], other.values.home[run_b.rows])),
            (take(ops[0], one.values.op[run.rows]), take(ops[1], other.values.op[run_b.rows])),
        )
    ]
    return np.asarray(is_parameter & alike[0] & alike[1])


def _find_noise(
    runs: tuple[PairedRun, PairedRun],
    is_joined: Bools,
    further: Sequence[RecordingData],
    tolerance: float | None,
) -> Noise:
    """Returns the noise of each pair: the tolerance, if there is one; or what further runs of `a` differ by; or else an
    assumption from dtypes and lengths of sums.
    """
    run, run_b = runs
    if tolerance is not None:
        return give_noise(tolerance, len(run.rows))
    factor, factor_b = map(find_cancellation, runs)
    # Cancellation in only one recording is a difference, but in a part it does not show in the whole.
    cancellation = np.where(is_joined, np.maximum(factor, factor_b), np.minimum(factor, factor_b))
    if further:
        levels = [_find_levels(run.tables.data, further_run, run.rows) for further_run in further]
        return measure_noise(levels, cancellation)
    # A parameter's noise is at most its own size: updates from gradients of mere noise change only a part of that.
    is_parameter = run.tables.values.is_of(PARAMETER, rows=run.rows)
    most = np.where(is_parameter, 1.0, MOST_NOISE)
    return assume_noise(run.measured, run_b.measured, cancellation, most)


def _find_levels(a: RecordingData, further: RecordingData, rows: Rows) -> Numbers:
    """Returns the error of each row of `a` against a further run; NaN where that has no such tensor."""
    tables, tables_b, steps = read_both(a, further)
    alignment = align_tables(tables, tables_b, steps)
    pairs = alignment.values
    if not len(pairs):
        raise NothingRecordedError(explain_nothing(tables, tables_b, alignment))
    of_row = np.full(len(tables.values.step), np.nan)
    measured, measured_b = read_measured(a, pairs[:, 0]), read_measured(further, pairs[:, 1])
    of_row[pairs[:, 0]] = find_errors(measured, measured_b).error
    return of_row[rows]


class _Judge:
    """Ranks pairs. Absorbed pairs excuse no others, so inputs are computed again without them."""

    def __init__(
        self,
        runs: tuple[PairedRun, PairedRun],
        alignment: Alignment,
        errors: Errors,
        recompute_error: Numbers,
        noise: Noise,
        resized: Rows,
    ) -> None:
        """Clears in `errors` the pairs whose two tensors are unlike.

        Args:
            runs: the two recordings.
            alignment: which rows of both correspond.
            errors: the error of each pair.
            recompute_error: for each pair, the error of its inputs that is due to a recompute.
            noise: the noise of each pair.
            resized: the rows in `ComparedPairs.resized`.
        """
        run, run_b = runs
        self._runs, self._errors, self._noise = runs, errors, noise
        self._recompute_error = recompute_error
        # Cleared pairs may still show how far apart the inputs of others are.
        self._error = errors.error.copy()
        self._are_repeated = _are_repeated(*runs)
        self._leave_out(have_resized_first_output(run, resized, self._are_repeated))
        if len(resized) or (run.is_unpaired.any() and run_b.is_unpaired.any()):
            self._leave_out(have_resized_arguments(*runs, self._error > 0))
        self.partner = np.full(len(run.tables.ops.name), -1, np.int64)
        self.partner[alignment.ops[:, 0]] = alignment.ops[:, 1]
        level = np.maximum(noise.local, errors.floor)
        self._elsewhere = find_elsewhere(*runs, alignment.steps, errors.error, level)
        self._may_be_blamed = _may_be_blamed(runs, alignment)
        self._only_moves = np.append(run.tables.ops.are_named(MOVES), False)[run.tables.values.op[run.rows]]
        # These are results of another op in the second recording, as if slots were exchanged.
        partner = take(self.partner, np.maximum(run.maker, -1))
        self._is_exchanged = run.are_results & (partner >= 0) & (run_b.maker >= 0) & (partner != run_b.maker)

    def judge(self) -> tuple[PairInputs, Ranking, Noise]:
        """Returns the inputs of each pair, its rank, and the noise including that of ops between pairs."""
        absorbed = np.zeros(len(self._errors), bool)
        inputs = self._find_inputs(absorbed)
        through = inputs.through, inputs.through_b
        epsilons = [_find_epsilons(run.tables, ops) for run, ops in zip(self._runs, through, strict=True)]
        gain = np.maximum(*map(find_gain_before, self._runs))
        noise = self._noise = self._noise.add_rounding(np.maximum(*epsilons), gain)
        ranking = self._rank(inputs)
        is_unlike = are_of_unlike_ops(*self._runs, self.partner, ranking.is_beyond, np.isnan(self._error))
        if is_unlike.any():
            self._leave_out(is_unlike)
            self._error[is_unlike] = np.nan
            inputs = self._find_inputs(absorbed)
            ranking = self._rank(inputs)
        differences = AbsorbedDifferences(self._runs, self._errors, self._elsewhere, self._are_repeated)
        ranking = differences.dismiss(ranking)
        absorbed = ranking.least == VERDICTS.index(ABSORBED)
        if not absorbed.any():
            return inputs, ranking, noise
        inputs = self._find_inputs(absorbed)
        return inputs, differences.dismiss(self._rank(inputs).dismiss(absorbed)), noise

    def _leave_out(self, are_left_out: Bools) -> None:
        self._errors.set(NOTHING, np.flatnonzero(are_left_out), np.nan, 0.0)

    def _find_inputs(self, absorbed: Bools) -> PairInputs:
        inputs = find_inputs_in_both(self._runs, self._error, absorbed, self._elsewhere)
        np.maximum(inputs.error, self._recompute_error, out=inputs.error)
        inputs.is_copy[self._is_exchanged] = False
        return inputs

    def _rank(self, inputs: PairInputs) -> Ranking:
        # An op that only moves numbers may choose those that differ most, which statistics of its inputs do not show.
        level = np.maximum(self._noise.local, self._errors.floor)
        differ_more = self._errors.is_by(STATISTICS) & (inputs.error > level)
        may_be_blamed = self._may_be_blamed & ~(self._only_moves & differ_more)
        return rank(self._errors, inputs, self._noise, may_be_blamed)


def _find_epsilons(tables: RunTables, ops: Rows) -> Numbers:
    """Returns eps of the dtype of each op's first output; 0 for no op."""
    code, dtypes = tables.flow.tensors.dtype
    epsilons = np.array([*(EPSILONS.get(dtype, 0.0) for dtype in dtypes), 0.0])
    return epsilons[take(code, take(tables.flow.first_returned, ops))]


def _are_repeated(a: PairedRun, b: PairedRun) -> Bools:
    """Returns which pairs are of modules that the other recording calls a different number of times."""
    calls, calls_b = (
        np.append(_count_calls(run.tables), 0)[run.tables.values.place[run.rows]] for run in (a, b)
    )
    return np.asarray(calls != calls_b)


def _count_calls(tables: RunTables) -> Rows:
    """Returns how often the module at each place is called in forward."""
    calls = tables.calls
    is_forward = calls.kept & (calls.phase == PHASES.index(FORWARD)) & (calls.place >= 0)
    return np.bincount(calls.place[is_forward], minlength=len(tables.names))


def _may_be_blamed(runs: tuple[PairedRun, PairedRun], alignment: Alignment) -> Bools:
    """Returns which pairs may be blamed for a difference.

    Outputs that a module only passes on may not be, unless it computes them in the other run by an op that is missing
    here, nor those of optimizers that run other ops in the other run.
    """
    in_optimizer = PHASES.index(OPTIMIZER)
    unpaired = zip(runs, (alignment.missing.ops, alignment.extra.ops), strict=True)
    is_other = any((run.tables.ops.phase[ops.rows] == in_optimizer).any() for run, ops in unpaired)
    values, rows = runs[0].tables.values, runs[0].rows
    is_op = (values.op[rows] >= 0) & (values.phase[rows] == in_optimizer)
    are_computed = [run.is_unpaired[np.maximum(run.maker, -1)] for run in runs]
    is_passed_on = (runs[0].is_passed_on & ~are_computed[1]) | (runs[1].is_passed_on & ~are_computed[0])
    return np.asarray(~(is_op & is_other | is_passed_on))
