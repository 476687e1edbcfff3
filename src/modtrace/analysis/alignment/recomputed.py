"""Pairs what a recording recomputed with its own forward, which it should equal."""

import numpy as np

from ...recording.phase import FORWARD, PHASES, RECOMPUTE
from ..tables.columns import Bools, RowFinder, Rows, number_keys, pair_keys, rows_in_order, take
from .sides import Side

_FORWARD, _RECOMPUTE = PHASES.index(FORWARD), PHASES.index(RECOMPUTE)


def pair_recomputed(side: Side, chosen: Bools) -> Rows:
    """Returns pairs (n, 2) of rows of `values`: one of a recompute, and that of its forward, as they were recomputed.

    Of what was recomputed several times, the first time counts.

    Args:
        side: the recording.
        chosen: the rows of `values` to pair, of which those of other phases than recompute have no pair.
    """
    values = side.values
    is_known = values.kept & (values.call >= 0)
    again = rows_in_order(is_known & chosen & (values.phase == _RECOMPUTE), values.order)
    if not len(again):
        return np.empty((0, 2), np.int64)
    first = rows_in_order(is_known & (values.phase == _FORWARD), values.order)
    ops, calls = np.arange(len(side.ops.step)), np.arange(len(side.calls.step))
    owner = _find_owners(side, again, _find_forward_ops(side), side.calls.origin)
    again, owner = again[owner >= 0], owner[owner >= 0]
    keys, others = number_keys(
        (owner, _find_owners(side, first, ops, calls)),
        (values.is_of_op[again], values.is_of_op[first]),
        (values.role[again], values.role[first]),
        (values.slot[again], values.slot[first]),
    )
    found, _ = pair_keys(keys, others)
    return np.stack([again, take(first, found)], axis=1)[found >= 0]


def _find_owners(side: Side, rows: Rows, op: Rows, call: Rows) -> Rows:
    """Returns of which op or call each row was measured, as what stands for that."""
    values = side.values
    return np.where(values.is_of_op[rows], take(op, values.op[rows]), take(call, values.call[rows]))


def _find_forward_ops(side: Side) -> Rows:
    """Returns the op that each recomputed one repeats; -1 if there is none, or several that it may be.

    A call that is recomputed runs the ops of its forward: the n-th of a name is the n-th. A function that is recomputed
    without a module is part of a call; its ops are those of the call if the call ran no others of their names.
    """
    ops = side.ops
    again, first = (
        np.flatnonzero((ops.phase == phase) & (ops.call >= 0)) for phase in (_RECOMPUTE, _FORWARD)
    )
    found = np.full(len(ops.step), -1, np.int64)
    if not len(again):
        return found
    call = ops.call[again]
    names, others = number_keys(
        (side.calls.origin[call], ops.call[first]), (ops.name[again], ops.name[first])
    )
    size = 1 + max(int(names.max()), int(others.max(initial=0)))
    counts, count = (np.bincount(each, minlength=size)[names] for each in (names, others))
    is_part = side.calls.calls.phase[call] == _FORWARD
    nth = ops.nth[again] - np.where(is_part, count, 0)
    keys, others = number_keys((names, others), (nth, ops.nth[first]))
    found[again] = np.where(
        is_part & (counts % np.maximum(count, 1) > 0), -1, take(first, RowFinder(others)(keys))
    )
    return found
