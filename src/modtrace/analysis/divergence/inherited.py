"""Tells how far apart the inputs of each compared tensor were: what it has inherited, and not made."""

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
from ..tables.columns import Bools, Column, Rows, columns_at, find_rows
from ..tables.op_rules import UNINITIALIZED
from ..tables.run import RunTables
from .paired_run import find_inputs, find_tensors

_FORWARD, _OPTIMIZED = PHASES.index(FORWARD), PHASES.index(OPTIMIZER)
_FALSE = np.bool_(False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inherited:
    """What the inputs of each pair were; pairs are in the order of execution."""

    error: Numbers  # the largest error of what it was computed from; 0 where nothing was
    is_known: Bools  # all of that was compared; else `error` is of what was measured before it
    is_partial: Bools  # what an op read was computed from what was not compared, too
    through: Rows  # the row of an op that only this recording has, from which it comes; -1 for none
    through_b: Rows  # the same of the second recording
    is_source: Bools  # nothing was computed: a parameter, a buffer, an input
    is_input: Bools  # of a module
    is_update: Bools  # by how much an optimizer changes a parameter, or from what it computes that
    is_of_optimizer: Bools  # it is such, or an op of an optimizer returned it
    maker: Rows  # the row of the op that returned the tensor, whether that has a partner or not; -1 for none
    maker_b: Rows  # the same of the second recording
    group: Rows  # equal for rows with the same tensor
    is_copy: Bools  # another pair, of the op that returned it, has the same tensor

    def take(self, at: Rows) -> "Inherited":
        """Returns what some of the pairs were."""
        return Inherited(**columns_at(self, at))


def find_inherited(
    side: RunTables,
    rows: Rows,
    error: Numbers,
    absorbed: Bools | np.bool_ = _FALSE,
    alone: Bools | np.bool_ = _FALSE,
    elsewhere: Numbers | float = np.nan,
) -> Inherited:
    """Returns what each pair has inherited.

    Args:
        side: the recording, of which the calls are read.
        rows: the row of `values` of each pair, in the order of `order_by_use`.
        error: the error of each pair; NaN where nothing could be compared.
        absorbed: which of them come to nothing, and so excuse nothing that is not known to read them.
        alone: the ops that only this recording has.
        elsewhere: how far apart each tensor is from what another op of the other recording has returned; NaN for none.
    """
    values = side.values
    is_op = values.is_of(OP_OUTPUT, rows=rows)
    is_leaf = ~is_op & (values.op[rows] >= 0) & _are_first(side, rows)
    is_parameter = values.is_of(PARAMETER, rows=rows) & ~is_leaf
    group = values.group
    step = values.step[rows]
    before, earlier = _scan(step, group[rows], is_parameter, np.where(absorbed, 0.0, error))
    # Where parameters were measured, they are what a step has of those before it.
    left = np.where(np.isin(step, step[is_parameter]), 0.0, earlier)
    own = _error_of_groups(group, rows, error, is_op, values.is_of(INPUT, rows=rows) & ~is_leaf)
    of_parameters = _errors_of_own_parameters(side, rows, error)
    found = Inherited(
        error=np.fmax(before, left),
        is_known=np.zeros(len(rows), bool),
        is_partial=np.zeros(len(rows), bool),
        through=np.full(len(rows), -1, np.int64),
        through_b=np.full(len(rows), -1, np.int64),
        group=group[rows],
        maker=np.full(len(rows), -1, np.int64),
        maker_b=np.full(len(rows), -1, np.int64),
        is_input=values.is_of(INPUT, rows=rows) & ~is_leaf,
        is_update=values.is_of(OPTIMIZER_STATE, UPDATE, rows=rows),
        is_of_optimizer=values.is_of(OPTIMIZER_STATE, UPDATE, rows=rows)
        | (is_op & (values.phase[rows] == _OPTIMIZED)),
        is_source=is_leaf | is_parameter,
        is_copy=_find_copies(
            group, rows, is_op & ~np.isnan(error), values.is_of(INPUT, rows=rows) & ~is_leaf
        ),
    )
    found.error[found.is_source] = earlier[found.is_source]
    found.is_known[found.is_source] = True
    _inherit_by_parameters(found, side, rows, error)
    inside = _inherit_by_calls(found, side, rows, error, left)
    _inherit_by_inputs(found, side, rows, error, inside)
    outputs = values.is_of(OUTPUT, rows=rows)
    found.error[outputs] = np.fmax(found.error[outputs], of_parameters[outputs])
    _inherit_by_ops(
        found, side, rows, own, group, before, np.broadcast_to(alone, len(side.ops.name)), elsewhere
    )
    return found


def _are_first(side: RunTables, rows: Rows) -> Bools:
    """Returns which rows are the first of their site in their step: what is measured there again was written to."""
    values = side.values
    keys = values.site[rows].astype(np.int64) << 32 | values.step[rows].astype(np.int64)
    order = np.lexsort((values.moment[rows], keys))
    is_first = np.ones(len(rows), bool)
    is_first[order[1:]] = np.diff(keys[order]) != 0
    return is_first


def add_second(found: Inherited, second: Inherited, is_op: Bools) -> Inherited:
    """Returns what pairs have inherited, with what the second recording adds: ops between that only it has.

    Args:
        found: as the first recording has it.
        second: as the second recording has it.
        is_op: which pairs are of what an op returned, and were compared.
    """
    is_of_ops = np.isin(found.group, found.group[is_op]) & np.isin(second.group, second.group[is_op])
    is_copy = ~is_op & (is_of_ops | found.is_input)
    # What the second recording reads may be the output of an op that only it has, which a module returned. What was
    # measured in front of it in one of the runs alone is not what an unknown input comes from.
    least, most = np.minimum(found.error, second.error), np.maximum(found.error, second.error)
    error = np.where(found.is_known, most, np.where(second.is_known, second.error, least))
    return replace(found, error=error, through_b=second.through, maker_b=second.maker, is_copy=is_copy)


def order_by_use(side: RunTables, rows: Rows) -> Rows:
    """Returns the order in which rows of `values` were used.

    A parameter that was measured when the optimizer stepped is what the whole step used. What an op returned stands
    before outputs of modules that are the same tensor.
    """
    values = side.values
    is_parameter = side.values.is_of(PARAMETER, rows=rows) & (values.op[rows] < 0)
    return np.lexsort((values.op[rows] < 0, values.moment[rows], ~is_parameter, values.step[rows]))


def _error_of_groups(group: Rows, rows: Rows, error: Numbers, is_op: Bools, is_input: Bools) -> Numbers:
    """Returns the error of each group of rows that share a tensor; NaN where none was compared.

    It is that of what an op returned, if that was compared, and else of a module's output. A module may get another
    tensor in the other recording, so its input does not tell of the op that returned it.
    """
    found = np.full(int(group.max(initial=-1)) + 1, np.nan)
    np.fmax.at(found, group[rows[is_op]], error[is_op])
    others = ~is_op & ~is_input & np.isnan(found[group[rows]])
    np.fmax.at(found, group[rows[others]], error[others])
    return found


def _find_copies(group: Rows, rows: Rows, is_op: Bools, is_input: Bools) -> Bools:
    """Returns which pairs are of a tensor that an op, or for an input anything else, has returned in another pair."""
    has_op, has_more = np.zeros((2, int(group.max(initial=-1)) + 1), bool)
    has_op[group[rows[is_op]]] = True
    has_more[group[rows[~is_input]]] = True
    return ~is_op & (has_op[group[rows]] | (is_input & has_more[group[rows]]))


def _scan(step: Column, order: Rows, is_parameter: Bools, error: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the largest error before each pair in its step, and the largest one of earlier steps."""
    place = np.where(is_parameter, -1, order)
    rows = np.lexsort((place, step))
    known = np.nan_to_num(error[rows], nan=0.0, posinf=np.inf)
    new_step = np.append(True, step[rows][1:] != step[rows][:-1]) if len(rows) else np.empty(0, bool)
    new_group = new_step | np.append(True, place[rows][1:] != place[rows][:-1])[: len(rows)]
    before, earlier = np.zeros(len(rows)), np.zeros(len(rows))
    before[rows] = _largest_before(known, new_step, new_group)
    earlier[rows] = _largest_before(known, np.arange(len(rows)) == 0, new_step)
    return before, earlier


def _largest_before(numbers: Numbers, resets: Bools, starts: Bools) -> Numbers:
    """Returns the largest number since the last reset, of those in front of the run that began at the last start.

    Args:
        numbers: at least 0.
        resets: where counting begins anew.
        starts: where runs begin; numbers of one run do not count for each other.
    """
    if not len(numbers):
        return numbers
    distinct, rank = np.unique(numbers, return_inverse=True)
    part = np.cumsum(resets) - 1
    highest = np.maximum.accumulate(part * len(distinct) + rank.reshape(-1))
    behind = np.append(-1, highest[:-1])
    at = np.maximum.accumulate(np.where(starts, np.arange(len(numbers)), 0))
    found = behind[at]
    is_inside = found >= part * len(distinct)
    return np.where(is_inside, distinct[np.where(is_inside, found - part * len(distinct), 0)], 0.0)


def _inherit_by_parameters(found: Inherited, side: RunTables, rows: Rows, error: Numbers) -> None:
    """Gives parameters, and what their optimizer makes, what was before of the same parameter; gradients that, too."""
    mine = np.flatnonzero(side.values.is_of(*(OF_PARAMETERS - {PARAMETER_GRAD}), rows=rows))
    gradients = np.flatnonzero(side.values.is_of(PARAMETER_GRAD, rows=rows))
    every = np.flatnonzero(side.values.is_of(*OF_PARAMETERS, rows=rows))
    keys = name_parameters(side, rows[every])
    order = np.argsort(keys, kind="stable")
    is_new = np.append(True, np.diff(keys[order]) != 0)[: len(order)]
    before = np.zeros(len(rows))
    known = np.nan_to_num(error[every[order]], nan=0.0, posinf=np.inf)
    before[every[order]] = _largest_before(known, is_new, np.ones(len(order), bool))
    found.error[mine] = before[mine]
    found.is_known[mine] = True
    found.error[gradients] = np.fmax(
        found.error[gradients], before[gradients]
    )  # some are kept from step to step


def name_parameters(side: RunTables, rows: Rows) -> Rows:
    """Returns a number for the parameter that each row is of, or that an optimizer has updated."""
    values = side.values
    names = [slot.partition(".")[0].partition("[")[0] for slot in values.slots]
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    code = np.array([*(codes[name] for name in names), 0])[values.slot[rows]]
    return np.asarray(values.place[rows].astype(np.int64) * len(names) + code)


def _inherit_by_calls(
    found: Inherited, side: RunTables, rows: Rows, error: Numbers, left: Numbers
) -> Numbers:
    """Gives outputs of modules what was before their calls in the same caller, and what is inside of them.

    It returns of each call the largest error of the calls inside. The largest error of earlier steps is `left`.
    """
    calls = side.calls
    values = side.values
    is_forward = (values.call[rows] >= 0) & (values.phase[rows] == _FORWARD)
    mine = np.flatnonzero(is_forward & values.is_of(OUTPUT, rows=rows))
    of_call, known = np.zeros(len(calls.calls.parent)), np.nan_to_num(error[mine], nan=0.0, posinf=np.inf)
    np.fmax.at(of_call, values.call[rows[mine]], known)
    before, inside = _walk_calls(side, of_call)
    call = values.call[rows[mine]]
    found.error[mine] = np.fmax(np.fmax(before[call], inside[call]), left[mine])
    return inside


def _walk_calls(side: RunTables, of_call: Numbers) -> tuple[Numbers, Numbers]:
    """Returns, of each call, the largest error in front of it in its callers, and of the calls directly inside."""
    calls, parent = side.calls, side.calls.calls.parent
    before, inside = np.zeros(len(parent)), np.zeros(len(parent))
    has_parent = np.flatnonzero(parent >= 0)
    np.fmax.at(inside, parent[has_parent], of_call[has_parent])
    for level in iterate_levels(parent):
        level = level[calls.calls.phase[level] == _FORWARD]
        if not len(level):
            continue
        above = np.where(parent[level] >= 0, parent[level], -1 - calls.step[level])
        order = np.lexsort((calls.calls.start_ns[level], above))
        starts = np.append(True, above[order][1:] != above[order][:-1])
        each = np.ones(len(order), bool)
        mine = level[order]
        of_caller = np.where(parent[mine] >= 0, before[parent[mine]], 0.0)
        before[mine] = np.fmax(_largest_before(of_call[mine], starts, each), of_caller)
    return before, inside


def _errors_of_own_parameters(side: RunTables, rows: Rows, error: Numbers) -> Numbers:
    """Returns of each pair the largest error of the parameters of its module in its step; 0 without any."""
    place, step = side.values.place[rows].astype(np.int64), side.values.step[rows].astype(np.int64)
    keys = place << 32 | step
    mine = np.flatnonzero(side.values.is_of(PARAMETER, rows=rows) & (place >= 0))
    return find_largest(keys[mine], np.nan_to_num(error[mine], nan=0.0, posinf=np.inf), keys, none=0.0)


def find_largest(keys: Rows, numbers: Numbers, wanted: Rows, *, none: float) -> Numbers:
    """Returns the largest of the numbers of each key that is wanted; `none` where it has no number."""
    distinct, which = np.unique(keys, return_inverse=True)
    largest = np.full(len(distinct) + 1, none)
    np.fmax.at(largest, which.reshape(-1), numbers)
    return largest[find_rows(distinct, wanted)]


def _inherit_by_inputs(
    found: Inherited, side: RunTables, rows: Rows, error: Numbers, inside: Numbers
) -> None:
    """Gives outputs of calls the errors of their recorded inputs, and of what is inside of them."""
    call = side.values.call[rows]
    of_call = np.full(len(side.calls.calls.parent) + 1, np.nan)
    given = np.flatnonzero(side.values.is_of(INPUT, rows=rows) & (call >= 0))
    if not len(given):
        return
    np.fmax.at(of_call, call[given], error[given])
    mine = np.flatnonzero(side.values.is_of(OUTPUT, rows=rows) & ~np.isnan(of_call[call]))
    found.error[mine] = np.fmax(of_call[call[mine]], inside[call[mine]])
    found.is_known[mine] = True


def _inherit_by_ops(
    found: Inherited,
    side: RunTables,
    rows: Rows,
    of_group: Numbers,
    group: Rows,
    before: Numbers,
    alone: Bools,
    elsewhere: Numbers | float,
) -> None:
    """Gives what ops returned the errors of what they read."""
    values, flow, producer = side.values, side.flow, side.flow.tensors.producer
    if not len(side.ops.name):
        return
    is_output = values.is_of(OP_OUTPUT)
    outputs = np.flatnonzero(is_output & (values.op >= 0))
    tensor = side.tensor_of_value[outputs]
    of_tensor = np.full(len(producer), np.nan)
    np.fmax.at(of_tensor, tensor[tensor >= 0], of_group[group[outputs]][tensor >= 0])
    if alone.any():
        of_view = _errors_of_returned(side, rows, of_group[group[rows]])
        of_tensor = np.where(np.isnan(of_tensor), of_view, of_tensor)
    of_tensor[(producer >= 0) & side.ops.are_named(UNINITIALIZED)[producer]] = 0.0
    leaves = np.flatnonzero(~is_output & ((values.op >= 0) | values.is_of(PARAMETER, BUFFER)))
    of_read = _errors_of_reads(side, leaves, of_group[group[leaves]])
    of_tensor = np.where(np.isnan(elsewhere), of_tensor, elsewhere)
    inputs = find_inputs(flow, alone, of_tensor, of_read)
    # Where ops tell who made what, a module is blamed only for more than all before it.
    found.is_copy[found.is_input] = True  # an op has returned it, or it is a leaf
    others = np.flatnonzero(~found.is_source & ~found.is_update)
    found.error[others] = np.fmax(found.error[others], before[others])
    maker = np.full(len(of_group), -1, np.int64)
    maker[group[outputs]] = values.op[outputs]
    op = maker[group[rows]]
    found.maker[:] = op
    mine = np.flatnonzero((op >= 0) & ~found.is_source & ~found.is_update)
    known = inputs.error[op[mine]]
    is_told = ~np.isnan(known) | inputs.is_known[op[mine]]
    mine, known = mine[is_told], known[is_told]
    found.is_known[mine] = inputs.is_known[op[mine]]
    unknown = np.where(found.is_known[mine], 0.0, before[mine])
    found.error[mine] = np.fmax(np.nan_to_num(known, nan=0.0, posinf=np.inf), unknown)
    found.through[mine], found.is_partial[mine] = inputs.through[op[mine]], inputs.is_partial[op[mine]]


def _errors_of_returned(side: RunTables, rows: Rows, error: Numbers) -> Numbers:
    """Returns the error of each tensor, maybe a view, that a module without others inside returned; NaN for others."""
    is_leaf = ~np.isin(side.values.call[rows], side.calls.calls.parent)
    at = np.flatnonzero(side.values.is_of(OUTPUT, rows=rows) & ~np.isnan(error) & is_leaf)
    tensor = find_tensors(side, rows[at], np.ones(len(at), bool))
    found = np.full(len(side.flow.tensors), np.nan)
    np.fmax.at(found, tensor[tensor >= 0], error[at[tensor >= 0]])
    return found


def _errors_of_reads(side: RunTables, leaves: Rows, errors: Numbers) -> Numbers:
    """Returns the error of each read of a parameter, buffer, input or constant, from what was measured in its step."""
    values, flow = side.values, side.flow
    keys = values.site_id[leaves].astype(np.int64) << 32 | values.step[leaves].astype(np.int64)
    site, step = flow.tensors.site_id[flow.read], side.ops.step[flow.reader]
    wanted = np.where(site >= 0, site.astype(np.int64) << 32 | step.astype(np.int64), -1)
    # What was measured behind an op of forward may have been written to since, as the averages of a norm.
    is_leaf = (values.op[leaves] >= 0) & (values.phase[leaves] == _FORWARD)
    early = is_leaf | values.is_of(PARAMETER, rows=leaves)
    before = find_largest(keys[early], errors[early], wanted, none=np.nan)
    is_later = (side.ops.phase[flow.reader] != _FORWARD) | np.isnan(before)
    return np.where(is_later, find_largest(keys, errors, wanted, none=np.nan), before)
