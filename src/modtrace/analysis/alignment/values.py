"""Pairs the measured tensors of two recordings."""

import numpy as np

from ..step.calls import Rows
from .calls import translate
from .keys import number_keys, number_texts, pair_keys, take
from .sides import Side


def pair_values(
    a: Side, b: Side, places: tuple[Rows, Rows], steps: Rows, calls: tuple[Rows, Rows], ops: tuple[Rows, Rows]
) -> tuple[Rows, Rows]:
    """Returns the partner of each row of `values`; -1 if there is none."""
    of_a, of_b = a.values, b.values
    step, place = translate(of_a.step, steps), take(places[0], of_a.place)
    call, op = take(calls[0], of_a.call), take(ops[0], of_a.op)
    roles, slots = number_texts(of_a.roles, of_b.roles), number_texts(of_a.slots, of_b.slots)
    has_op, has_op_b = of_a.op >= 0, of_b.op >= 0
    keys = number_keys(
        (step, of_b.step),
        (of_a.phase, of_b.phase),
        (np.where(has_op, -1, place), np.where(has_op_b, -1, of_b.place)),
        (np.where(has_op, -1, call), np.where(has_op_b, -1, of_b.call)),
        (op, of_b.op),
        (take(roles[0], of_a.role), take(roles[1], of_b.role)),
        (take(slots[0], of_a.slot), take(slots[1], of_b.slot)),
    )
    known = (
        of_a.kept
        & (step >= 0)
        & ((of_a.op < 0) | (op >= 0))
        & (has_op | (of_a.call < 0) | (call >= 0))
        & (has_op | (of_a.place < 0) | (place >= 0))
    )
    known_b = (
        of_b.kept
        & np.isin(of_b.step, steps[:, 1])
        & ((of_b.op < 0) | (take(ops[1], of_b.op) >= 0))
        & (has_op_b | (of_b.call < 0) | (take(calls[1], of_b.call) >= 0))
        & (has_op_b | (of_b.place < 0) | (take(places[1], of_b.place) >= 0))
    )
    rows, rows_b = (
        np.flatnonzero(kept)[np.lexsort((side.order[kept], side.step[kept]))]
        for kept, side in ((known, of_a), (known_b, of_b))
    )
    partner, back = pair_keys(keys[0][rows], keys[1][rows_b])
    spread, spread_back = np.full(len(of_a.step), -1, np.int64), np.full(len(of_b.step), -1, np.int64)
    spread[rows], spread_back[rows_b] = take(rows_b, partner), take(rows, back)
    return spread, spread_back
