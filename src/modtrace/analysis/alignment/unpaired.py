"""Lists the rows without partner with the reason, and pairs recomputed values with those of their forward."""

from dataclasses import dataclass

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE
from ...recording.role import OP_OUTPUT
from ..tables.columns import (
    Bools,
    Column,
    Rows,
    find_rows,
    number_codes,
    number_densely,
    number_keys,
    pair_keys,
    rows_in_order,
    take,
)
from ..tables.run import RunTables
from .both import translate
from .contract import REASONS, Unpaired, UnpairedRows
from .joins import Batched

#: The code of each reason by its name.
_CODE = {name: code for code, name in enumerate(REASONS)}
_FORWARD, _BACKWARD, _RECOMPUTE = (PHASES.index(phase) for phase in (FORWARD, BACKWARD, RECOMPUTE))


@dataclass(frozen=True, eq=False)
class Paired:
    """The tables of one recording, and the partners of its rows in the other; -1 for rows without."""

    run: RunTables
    other: RunTables
    steps: Rows  # (n, 2): each step with its partner in the other recording
    places: Rows
    calls: Rows
    ops: Rows
    values: Rows
    split: Rows  # places whose module is one of several parts, or the whole of several
    batched: Batched  # rows of micro-batches, or of the batch that they are parts of


def list_unpaired(side: Paired, recomputed: Rows) -> Unpaired:
    """Returns the rows that only one of two recordings has.

    Args:
        side: the recording whose rows are listed.
        recomputed: pairs of rows of `values`, of a recompute and of its forward.
    """
    run, other, batched = side.run, side.other, side.batched
    of_call = _explain_calls(side)
    of_op = _explain_ops(side)
    of_value = _explain_values(side, of_call, of_op)
    options = other.data.meta.options
    if not options.get("ops") and not len(other.ops.step):
        of_op[of_op != _CODE["step"]] = _CODE["unrecorded"]
        of_value[(run.values.op >= 0) & (of_value != _CODE["step"])] = _CODE["unrecorded"]
        if not options.get("backward_times") and _BACKWARD not in other.calls.phase:
            of_call[(run.calls.phase == _BACKWARD) & (of_call == _CODE["call"])] = _CODE["unrecorded"]
    for reason, rows in ((of_call, batched.calls), (of_op, batched.ops), (of_value, batched.values)):
        reason[rows & (reason != _CODE["step"])] = _CODE["joined"]
    alone = np.setdiff1d(np.flatnonzero(side.places < 0), side.split)
    return Unpaired(
        modules=tuple(run.names[place] for place in alone.tolist()),
        calls=_list_rows(side.calls, run.calls.kept, run.calls.start_ns, of_call),
        ops=_list_rows(side.ops, run.ops.kept, run.ops.order, of_op),
        values=_list_rows(side.values, run.values.kept, run.values.order, of_value),
        recomputed=recomputed,
    )


def _explain_calls(side: Paired) -> Column:
    calls = side.run.calls
    inside = np.flatnonzero(np.isin(side.places, side.other.values.place[side.other.values.is_inside]))
    has_place = calls.place >= 0
    reason = np.full(len(calls.step), _CODE["call"], np.int8)
    reason[has_place & (take(side.places, calls.place) < 0)] = _CODE["module"]
    reason[has_place & np.isin(calls.place, side.split)] = _CODE["joined"]
    reason[has_place & np.isin(calls.place, inside)] = _CODE["inside"]
    is_repeat = (calls.phase == _RECOMPUTE) & (take(side.calls, calls.unwrapped) >= 0)
    reason[is_repeat] = _CODE["recompute"]
    reason[calls.wraps > 0] = _CODE["wrapper"]
    reason[~np.isin(calls.step, side.steps[:, 0])] = _CODE["step"]
    return reason


def _explain_ops(side: Paired) -> Column:
    ops = side.run.ops
    reason = np.full(len(ops.step), _CODE["op"], np.int8)
    reason[ops.phase == PHASES.index(OPTIMIZER)] = _CODE["optimizer"]
    reason[ops.is_preparing] = _CODE["prepared"]
    reason[ops.is_view] = _CODE["view"]
    reason[np.isin(take(side.run.calls.place, ops.call), side.split)] = _CODE["joined"]
    is_recomputed = ops.phase == _RECOMPUTE
    is_alone = (ops.call < 0) | (take(side.calls, ops.call) < 0)
    is_alone |= ~np.isin(ops.call, ops.call[is_recomputed & (side.ops >= 0)])  # only a function in the call
    reason[is_recomputed & is_alone] = _CODE["recompute"]
    reason[~np.isin(ops.step, side.steps[:, 0])] = _CODE["step"]
    return reason


def _explain_values(side: Paired, of_call: Column, of_op: Column) -> Column:
    values = side.run.values
    has_op, has_call = values.is_of_op, values.call >= 0
    reason = np.full(len(values.step), _CODE["site"], np.int8)
    reason[(values.place >= 0) & (take(side.places, values.place) < 0) & ~has_op] = _CODE["module"]
    rows = np.flatnonzero(has_call & ~has_op & (take(side.calls, values.call) < 0))
    reason[rows] = of_call[values.call[rows]]
    # Compiled code has no calls, but the other recording should have measured the tensors of forward and backward.
    reason[(reason == _CODE["inside"]) & (values.phase == _RECOMPUTE)] = _CODE["recompute"]
    reason[reason == _CODE["inside"]] = _CODE["site"]
    rows = np.flatnonzero(has_op & (take(side.ops, values.op) < 0))
    reason[rows] = of_op[values.op[rows]]
    reason[np.isin(values.place, side.split) & (values.place >= 0) & ~has_op] = _CODE["joined"]
    reason[(reason == _CODE["site"]) & _is_seen_again(side.run, side.values)] = _CODE["again"]
    reason[~np.isin(values.step, side.steps[:, 0])] = _CODE["step"]
    reason[(reason == _CODE["site"]) & _is_measured_before(side)] = _CODE["before"]
    return reason


def _is_seen_again(side: RunTables, partner: Rows) -> Column:
    """Returns which rows are of a parameter or buffer that has another row, with a partner, in the same step."""
    values = side.values
    is_kept = ~values.is_of_op & (values.call < 0) & (values.place >= 0)
    key, _ = number_keys(
        *((column, column[:0]) for column in (values.step, values.place, values.role, values.slot))
    )
    return is_kept & np.isin(key, key[is_kept & (partner >= 0)])


def _is_measured_before(side: Paired) -> Bools:
    """Returns which rows are of leaves that the other recording measured in an earlier step."""
    one, other = side.run.values, side.other.values
    leaves, others = (np.flatnonzero((values.op >= 0) & ~values.is_of(OP_OUTPUT)) for values in (one, other))
    keys, known = number_keys(
        (take(side.places, one.place[leaves]), other.place[others]),
        number_codes((one.roles, one.role[leaves]), (other.roles, other.role[others])),
        number_codes((one.slots, one.slot[leaves]), (other.slots, other.slot[others])),
    )
    keys, known, count = number_densely(keys, known)
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, known, other.step[others])
    is_before = np.zeros(len(one.step), bool)
    is_before[leaves] = first[keys] < translate(one.step[leaves], side.steps)
    return is_before


def _list_rows(partner: Rows, kept: Column, order: Rows, reason: Column) -> UnpairedRows:
    rows = rows_in_order(kept & (partner < 0), order)
    return UnpairedRows(rows=rows, reason=reason[rows])


def pair_recomputed(side: RunTables, chosen: Bools) -> Rows:
    """Returns pairs (n, 2) of rows of `values`, one of a recompute and one of its forward, in the order of recomputing.

    Of a forward that was recomputed several times, only the first recompute is paired.

    Args:
        side: the tables of the recording.
        chosen: a mask of the rows of `values` to pair; rows of other phases than recompute are ignored.
    """
    values = side.values
    is_known = values.kept & (values.call >= 0)
    again = rows_in_order(is_known & chosen & (values.phase == _RECOMPUTE), values.order)
    if not len(again):
        return np.empty((0, 2), np.int64)
    first = rows_in_order(is_known & (values.phase == _FORWARD), values.order)
    of_op, columns = values.is_of_op, (values.is_of_op, values.role, values.slot)
    owner = np.where(of_op, values.op, values.call)
    repeated = np.where(
        of_op, take(_find_forward_ops(side), values.op), take(side.calls.unwrapped, values.call)
    )
    again = again[repeated[again] >= 0]
    keys, others = number_keys(
        (repeated[again], owner[first]), *((column[again], column[first]) for column in columns)
    )
    partner, _ = pair_keys(keys, others)
    return np.stack([again, take(first, partner)], axis=1)[partner >= 0]


def _find_forward_ops(side: RunTables) -> Rows:
    """Returns for each recomputed op the op that it repeats; -1 if there is none or the choice is ambiguous.

    A recomputed call runs the ops of its forward, so the n-th op of a name repeats the n-th of that name. A function
    that is recomputed without a module is part of a call; its ops repeat those of the call if no others have their
    names.
    """
    ops = side.ops
    again, first = (
        np.flatnonzero((ops.phase == phase) & (ops.call >= 0)) for phase in (_RECOMPUTE, _FORWARD)
    )
    repeated = np.full(len(ops.step), -1, np.int64)
    if not len(again):
        return repeated
    call = ops.call[again]
    names, others, size = number_densely(
        *number_keys((side.calls.unwrapped[call], ops.call[first]), (ops.name[again], ops.name[first]))
    )
    counts, count = (np.bincount(numbers, minlength=size)[names] for numbers in (names, others))
    is_part = side.calls.phase[call] == _FORWARD
    nth = ops.nth[again] - np.where(is_part, count, 0)
    keys, others = number_keys((names, others), (nth, ops.nth[first]))
    repeated[again] = np.where(
        is_part & (counts % np.maximum(count, 1) > 0), -1, take(first, find_rows(others, keys))
    )
    return repeated
