"""Computes how far apart the inputs of each compared tensor are, from the errors of earlier tensors."""

from dataclasses import dataclass, replace

import numpy as np

from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import (
    BUFFER,
    INPUT,
    OF_PARAMETERS,
    OP_OUTPUT,
    OPTIMIZER_STATE,
    OUTPUT,
    PARAMETER,
    PARAMETER_GRAD,
    UPDATE,
)
from ...recording.statistics.moments import Numbers
from ..tables.calls import iterate_levels
from ..tables.columns import Bools, Column, Rows, find_rows
from ..tables.op_rules import UNINITIALIZED
from ..tables.run import RunTables
from .op_inputs import find_op_inputs
from .paired_run import PairedRun, find_tensors

_FORWARD = PHASES.index(FORWARD)


@dataclass(frozen=True, kw_only=True, eq=False)
class PairInputs:
    """The inputs of each pair, i.e. what its tensors were computed from; pairs are in the order of use."""

    error: Numbers  # the largest error of the inputs; 0 where there are none
    is_known: Bools  # whether all inputs were compared; else `error` is that of earlier measurements
    is_partial: Bools  # whether an op's inputs also depend on tensors that were not compared
    through: Rows  # an unpaired op of the first recording among the inputs' makers; -1 for none
    through_b: Rows  # an unpaired op of the second recording; -1 for none
    is_source: Bools  # a parameter, a buffer or an input, which nothing computed
    is_update: Bools  # a change of a parameter, or a state of an optimizer
    is_of_optimizer: Bools  # an update, a state, or an output of an op of an optimizer
    is_copy: Bools  # whether the pair of an op's output has the same tensor


def find_inputs_in_both(
    runs: tuple[PairedRun, PairedRun], error: Numbers, absorbed: Bools, elsewhere: tuple[Numbers, Numbers]
) -> PairInputs:
    """Returns the inputs of each pair, including unpaired ops of the second recording; see `find_inputs`."""
    run, run_b = runs
    inputs = find_inputs(run, error, absorbed, elsewhere[0])
    if not run_b.is_unpaired.any():
        return inputs
    second = find_inputs(run_b, error, absorbed, elsewhere[1])
    is_op = (run.op >= 0) & ~np.isnan(error)
    group, group_b = (paired.tables.values.group[paired.rows] for paired in runs)
    is_of_ops = np.isin(group, group[is_op]) & np.isin(group_b, group_b[is_op])
    # A module of the second recording may return the output of an unpaired op, which is then an input. If the inputs
    # are unknown in both, an error that was measured earlier in only one of the runs does not explain them.
    least, most = np.minimum(inputs.error, second.error), np.maximum(inputs.error, second.error)
    return replace(
        inputs,
        error=np.where(inputs.is_known, most, np.where(second.is_known, second.error, least)),
        through_b=second.through,
        is_copy=~is_op & (is_of_ops | _are_inputs(run)),
    )


def find_inputs(
    run: PairedRun, error: Numbers, absorbed: Bools | None = None, elsewhere: Numbers | float = np.nan
) -> PairInputs:
    """Returns the inputs of each pair in one recording.

    Args:
        run: the recording, with its rows in the order that `order_by_use` returns.
        error: the error of each pair; NaN where nothing could be compared.
        absorbed: the absorbed pairs, which excuse only pairs that are known to read them; None for no pairs.
        elsewhere: the error of each tensor against an equal one that another op of the other recording returned; NaN
            for none.
    """
    tables, rows, values = run.tables, run.rows, run.tables.values
    is_op, is_leaf, is_input = values.is_of(OP_OUTPUT, rows=rows), _are_leaves(run), _are_inputs(run)
    is_parameter = values.is_of(PARAMETER, rows=rows) & ~is_leaf
    step, group = values.step[rows], values.group
    excusing = error if absorbed is None else np.where(absorbed, 0.0, error)
    before, earlier = _find_largest_earlier(step, group[rows], is_parameter, excusing)
    # Parameters measured in a step carry everything over from earlier steps.
    left = np.where(np.isin(step, step[is_parameter]), 0.0, earlier)
    is_update = values.is_of(OPTIMIZER_STATE, UPDATE, rows=rows)
    inputs = PairInputs(
        error=np.fmax(before, left),
        is_known=np.zeros(len(rows), bool),
        is_partial=np.zeros(len(rows), bool),
        through=np.full(len(rows), -1, np.int64),
        through_b=np.full(len(rows), -1, np.int64),
        is_source=is_leaf | is_parameter,
        is_update=is_update,
        is_of_optimizer=is_update | (is_op & (values.phase[rows] == PHASES.index(OPTIMIZER))),
        is_copy=_find_copies(group, rows, is_op & ~np.isnan(error), is_input),
    )
    inputs.error[inputs.is_source] = earlier[inputs.is_source]
    inputs.is_known[inputs.is_source] = True
    _add_parameters(inputs, tables, rows, error)
    inside = _add_calls(inputs, tables, rows, error, left)
    _add_module_inputs(inputs, tables, rows, error, inside)
    outputs = values.is_of(OUTPUT, rows=rows)
    of_parameters = _find_errors_of_parameters(tables, rows, error)
    inputs.error[outputs] = np.fmax(inputs.error[outputs], of_parameters[outputs])
    if run.have_ops and len(tables.ops.name):
        inputs.is_copy[is_input] = True  # the input is an op's output or a leaf, which has a pair of its own
        of_group = _find_errors_of_groups(group, rows, error, is_op, is_input)
        _add_ops(inputs, run, of_group, before, elsewhere)
    return inputs


def _are_leaves(run: PairedRun) -> Bools:
    """Returns which rows are of leaves as an op first read them; later measurements in a step follow a write."""
    values, rows = run.tables.values, run.rows
    keys = values.site[rows].astype(np.int64) << 32 | values.step[rows].astype(np.int64)
    order = np.lexsort((values.moment[rows], keys))
    is_first = np.ones(len(rows), bool)
    is_first[order[1:]] = np.diff(keys[order]) != 0
    return np.asarray(~values.is_of(OP_OUTPUT, rows=rows) & (values.op[rows] >= 0) & is_first)


def _are_inputs(run: PairedRun) -> Bools:
    """Returns which rows are of inputs of modules, excluding leaves."""
    return np.asarray(run.tables.values.is_of(INPUT, rows=run.rows) & ~_are_leaves(run))


def order_by_use(tables: RunTables, rows: Rows) -> Rows:
    """Returns the order in which the tensors of rows of `values` were used.

    A parameter measured when the optimizer stepped is the one that the whole step used. The output of an op precedes
    outputs of modules that are the same tensor.
    """
    values = tables.values
    is_parameter = values.is_of(PARAMETER, rows=rows) & (values.op[rows] < 0)
    return np.lexsort((values.op[rows] < 0, values.moment[rows], ~is_parameter, values.step[rows]))


def _find_errors_of_groups(group: Rows, rows: Rows, error: Numbers, is_op: Bools, is_input: Bools) -> Numbers:
    """Returns the error of each group of rows that share a tensor; NaN where none was compared.

    The error of an op's output takes precedence over that of a module's output. Inputs of modules are ignored, because
    a module may be given another tensor in the other recording.
    """
    of_group = np.full(int(group.max(initial=-1)) + 1, np.nan)
    np.fmax.at(of_group, group[rows[is_op]], error[is_op])
    others = ~is_op & ~is_input & np.isnan(of_group[group[rows]])
    np.fmax.at(of_group, group[rows[others]], error[others])
    return of_group


def _find_copies(group: Rows, rows: Rows, is_op: Bools, is_input: Bools) -> Bools:
    """Returns which pairs have a tensor that an op, or for an input any other row, returned in another pair."""
    has_op, has_more = np.zeros((2, int(group.max(initial=-1)) + 1), bool)
    has_op[group[rows[is_op]]] = True
    has_more[group[rows[~is_input]]] = True
    return ~is_op & (has_op[group[rows]] | (is_input & has_more[group[rows]]))


def _find_largest_earlier(
    step: Column, order: Rows, is_parameter: Bools, error: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns for each pair the largest error of earlier pairs in its step, and the largest error of earlier steps."""
    order = np.where(is_parameter, -1, order)
    rows = np.lexsort((order, step))
    known = np.nan_to_num(error[rows], nan=0.0, posinf=np.inf)
    new_step = np.append(True, step[rows][1:] != step[rows][:-1]) if len(rows) else np.empty(0, bool)
    new_group = new_step | np.append(True, order[rows][1:] != order[rows][:-1])[: len(rows)]
    before, earlier = np.zeros(len(rows)), np.zeros(len(rows))
    before[rows] = _accumulate_largest(known, new_step, new_group)
    earlier[rows] = _accumulate_largest(known, np.arange(len(rows)) == 0, new_step)
    return before, earlier


def _accumulate_largest(numbers: Numbers, resets: Bools, starts: Bools) -> Numbers:
    """Returns for each position the largest number since the last reset, excluding the run that contains it.

    Args:
        numbers: numbers of at least 0.
        resets: the positions at which the maximum starts again.
        starts: the positions at which runs begin; numbers within a run do not count for each other.
    """
    if not len(numbers):
        return numbers
    distinct, rank = np.unique(numbers, return_inverse=True)
    part = np.cumsum(resets) - 1
    highest = np.maximum.accumulate(part * len(distinct) + rank.reshape(-1))
    start = np.maximum.accumulate(np.where(starts, np.arange(len(numbers)), 0))
    largest = np.append(-1, highest[:-1])[start] - part * len(distinct)
    return np.where(largest >= 0, distinct[np.maximum(largest, 0)], 0.0)


def _add_parameters(inputs: PairInputs, tables: RunTables, rows: Rows, error: Numbers) -> None:
    """Adds earlier errors of the same parameter to the inputs of parameters and of what their optimizer computes."""
    of_parameters = np.flatnonzero(tables.values.is_of(*OF_PARAMETERS, rows=rows))
    keys = number_parameters(tables, rows[of_parameters])
    of_parameters = of_parameters[np.argsort(keys, kind="stable")]
    is_new = np.append(True, np.diff(np.sort(keys)) != 0)[: len(keys)]
    known = np.nan_to_num(error[of_parameters], nan=0.0, posinf=np.inf)
    before = np.zeros(len(rows))
    before[of_parameters] = _accumulate_largest(known, is_new, np.ones(len(keys), bool))
    updated = tables.values.is_of(*(OF_PARAMETERS - {PARAMETER_GRAD}), rows=rows)
    inputs.error[updated] = before[updated]
    inputs.is_known[updated] = True
    # A program may keep gradients from step to step, so that their earlier values matter.
    gradients = tables.values.is_of(PARAMETER_GRAD, rows=rows)
    inputs.error[gradients] = np.fmax(inputs.error[gradients], before[gradients])


def number_parameters(tables: RunTables, rows: Rows) -> Rows:
    """Returns for each row the number of its parameter, which the parameter's gradient, states and updates share."""
    values = tables.values
    names = [slot.partition(".")[0].partition("[")[0] for slot in values.slots]
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    code = np.array([*(codes[name] for name in names), 0])[values.slot[rows]]
    return np.asarray(values.place[rows].astype(np.int64) * len(names) + code)


def _add_calls(inputs: PairInputs, tables: RunTables, rows: Rows, error: Numbers, left: Numbers) -> Numbers:
    """Adds to outputs of modules the errors of earlier pairs in the same caller, and of pairs inside the call.

    Returns:
        The largest error inside of each call. `left` is the largest error of earlier steps.
    """
    calls, parent, values = tables.calls, tables.calls.parent, tables.values
    is_forward = (values.call[rows] >= 0) & (values.phase[rows] == _FORWARD)
    outputs = np.flatnonzero(is_forward & values.is_of(OUTPUT, rows=rows))
    call = values.call[rows[outputs]]
    of_call, before, inside = np.zeros((3, len(parent)))
    np.fmax.at(of_call, call, np.nan_to_num(error[outputs], nan=0.0, posinf=np.inf))
    has_parent = np.flatnonzero(parent >= 0)
    np.fmax.at(inside, parent[has_parent], of_call[has_parent])
    for level in iterate_levels(parent):
        level = level[calls.phase[level] == _FORWARD]
        above = np.where(parent[level] >= 0, parent[level], -1 - calls.step[level])
        order = np.lexsort((calls.start_ns[level], above))
        level, above = level[order], above[order]
        is_new = np.append(True, above[1:] != above[:-1])[: len(level)]
        largest = _accumulate_largest(of_call[level], is_new, np.ones(len(level), bool))
        before[level] = np.fmax(largest, np.where(parent[level] >= 0, before[parent[level]], 0.0))
    inputs.error[outputs] = np.fmax(np.fmax(before[call], inside[call]), left[outputs])
    return inside


def _find_errors_of_parameters(tables: RunTables, rows: Rows, error: Numbers) -> Numbers:
    """Returns for each pair the largest error of the parameters of its module in its step; 0 if there are none."""
    place, step = tables.values.place[rows].astype(np.int64), tables.values.step[rows].astype(np.int64)
    keys = place << 32 | step
    parameters = np.flatnonzero(tables.values.is_of(PARAMETER, rows=rows) & (place >= 0))
    return find_largest(
        keys[parameters], np.nan_to_num(error[parameters], nan=0.0, posinf=np.inf), keys, none=0.0
    )


def find_largest(keys: Rows, numbers: Numbers, wanted: Rows, *, none: float) -> Numbers:
    """Returns for each wanted key the largest of the numbers with that key; `none` for a key without numbers."""
    distinct, which = np.unique(keys, return_inverse=True)
    largest = np.full(len(distinct) + 1, none)
    np.fmax.at(largest, which.reshape(-1), numbers)
    return largest[find_rows(distinct, wanted)]


def _add_module_inputs(
    inputs: PairInputs, tables: RunTables, rows: Rows, error: Numbers, inside: Numbers
) -> None:
    """Adds to outputs of calls the errors of their recorded inputs, and of pairs inside of the calls."""
    call = tables.values.call[rows]
    of_call = np.full(len(inside) + 1, np.nan)
    is_input = tables.values.is_of(INPUT, rows=rows) & (call >= 0)
    np.fmax.at(of_call, call[is_input], error[is_input])
    outputs = np.flatnonzero(tables.values.is_of(OUTPUT, rows=rows) & ~np.isnan(of_call[call]))
    inputs.error[outputs] = np.fmax(of_call[call[outputs]], inside[call[outputs]])
    inputs.is_known[outputs] = True


def _add_ops(
    inputs: PairInputs, run: PairedRun, of_group: Numbers, before: Numbers, elsewhere: Numbers | float
) -> None:
    """Sets the inputs of outputs of ops to what the ops read. `before` is the largest earlier error of each pair."""
    tables, rows = run.tables, run.rows
    values, flow, producer, group = (
        tables.values,
        tables.flow,
        tables.flow.tensors.producer,
        tables.values.group,
    )
    outputs = np.flatnonzero(tables.tensor_of_value >= 0)
    of_tensor = np.full(len(producer), np.nan)
    np.fmax.at(of_tensor, tables.tensor_of_value[outputs], of_group[group[outputs]])
    if run.is_unpaired.any():
        of_view = _find_errors_of_returned(tables, rows, of_group[group[rows]])
        of_tensor = np.where(np.isnan(of_tensor), of_view, of_tensor)
    of_tensor[(producer >= 0) & tables.ops.are_named(UNINITIALIZED)[producer]] = 0.0
    is_leaf = ~values.is_of(OP_OUTPUT) & ((values.op >= 0) | values.is_of(PARAMETER, BUFFER))
    leaves = np.flatnonzero(is_leaf)
    of_read = _find_errors_of_reads(tables, leaves, of_group[group[leaves]])
    of_tensor = np.where(np.isnan(elsewhere), of_tensor, elsewhere)
    op_inputs = find_op_inputs(flow, run.is_unpaired, of_tensor, of_read)
    # Where ops show what made a difference, a module is blamed only for more than all earlier pairs.
    computed = np.flatnonzero(~inputs.is_source & ~inputs.is_update)
    inputs.error[computed] = np.fmax(inputs.error[computed], before[computed])
    computed = computed[run.maker[computed] >= 0]
    op = run.maker[computed]
    is_of_known = ~np.isnan(op_inputs.error[op]) | op_inputs.is_known[op]
    computed, op = computed[is_of_known], op[is_of_known]
    inputs.is_known[computed] = op_inputs.is_known[op]
    unknown = np.where(inputs.is_known[computed], 0.0, before[computed])
    inputs.error[computed] = np.fmax(np.nan_to_num(op_inputs.error[op], nan=0.0, posinf=np.inf), unknown)
    inputs.through[computed], inputs.is_partial[computed] = op_inputs.through[op], op_inputs.is_partial[op]


def _find_errors_of_returned(tables: RunTables, rows: Rows, error: Numbers) -> Numbers:
    """Returns the error of each tensor or view that an innermost module returned; NaN for other tensors."""
    is_innermost = ~np.isin(tables.values.call[rows], tables.calls.parent)
    returned = np.flatnonzero(tables.values.is_of(OUTPUT, rows=rows) & ~np.isnan(error) & is_innermost)
    tensor = find_tensors(tables, rows[returned], np.ones(len(returned), bool))
    of_tensor = np.full(len(tables.flow.tensors), np.nan)
    np.fmax.at(of_tensor, tensor[tensor >= 0], error[returned[tensor >= 0]])
    return of_tensor


def _find_errors_of_reads(tables: RunTables, leaves: Rows, errors: Numbers) -> Numbers:
    """Returns the error of each read of a parameter, buffer, input or constant, measured in the same step."""
    values, flow = tables.values, tables.flow
    keys = values.site_id[leaves].astype(np.int64) << 32 | values.step[leaves].astype(np.int64)
    site, step = flow.tensors.site_id[flow.read], tables.ops.step[flow.reader]
    wanted = np.where(site >= 0, site.astype(np.int64) << 32 | step.astype(np.int64), -1)
    # A tensor measured after an op of forward may have been overwritten since, as running averages are.
    is_leaf = (values.op[leaves] >= 0) & (values.phase[leaves] == _FORWARD)
    early = is_leaf | values.is_of(PARAMETER, rows=leaves)
    before = find_largest(keys[early], errors[early], wanted, none=np.nan)
    is_later = (tables.ops.phase[flow.reader] != _FORWARD) | np.isnan(before)
    return np.where(is_later, find_largest(keys, errors, wanted, none=np.nan), before)
