"""Aligns two recordings: steps, modules, calls, ops and measured tensors, in this order."""

from collections.abc import Sequence

import numpy as np

from ...recording.protocols import RecordingData
from ..step.calls import Column, Rows
from ..step.chosen_step import find_step
from .calls import pair_calls
from .contract import REASONS, Alignment, Joined, Unpaired, UnpairedRows
from .keys import to_pairs
from .modules import pair_places
from .ops import pair_ops
from .sides import Side, read_side
from .steps import pair_steps
from .values import pair_values


def align(
    a: RecordingData,
    b: RecordingData,
    *,
    rules: Sequence[str] = (),
    step: int | str | None = None,
    step_b: int | str | None = None,
) -> Alignment:
    """Returns which rows of two recordings mean the same.

    Args:
        a: a recording.
        b: another one, or the same.
        rules: `EXPRESSION=PATH`: how modules of `a` are called in `b`.
        step: the only step of `a` to compare, as `find_step` takes it; None: all.
        step_b: that of `b`; None: the same as of `a`.

    Raises:
        ValueError: there is no such step; a rule means no module, or several that are not parts of one.
    """
    chosen = None if step is None else (find_step(a, step), find_step(b, step if step_b is None else step_b))
    steps, of_a, of_b = pair_steps(a, b, chosen)
    side, other = read_side(a, of_a), read_side(b, of_b)
    places = pair_places(side, other)
    calls = pair_calls(side, other, places, steps)
    ops = pair_ops(side, other, calls, steps)
    values = pair_values(side, other, places, steps, calls, ops)
    pairs = to_pairs(values[0], _order_values(side))
    return Alignment(
        steps=steps,
        modules=tuple(
            (side.names[at], other.names[there]) for at, there in enumerate(places[0].tolist()) if there >= 0
        ),
        calls=to_pairs(calls[0], side.calls.calls.start_ns),
        ops=to_pairs(ops[0], side.ops.order),
        values=pairs,
        permuted=np.full(len(pairs), -1, np.int64),
        axes=(),
        joined=_no_joined(),
        missing=_list_unpaired(side, places[0], calls[0], ops[0], values[0]),
        extra=_list_unpaired(other, places[1], calls[1], ops[1], values[1]),
        rules=tuple(rules),
        proposed=(),
    )


def _order_values(side: Side) -> Rows:
    order = np.empty(len(side.values.order), np.int64)
    order[np.lexsort((side.values.order, side.values.step))] = np.arange(len(order))
    return order


def _no_joined() -> Joined:
    none = np.empty(0, np.int64)
    return Joined(part=none, whole=none, whole_in_a=none.astype(bool), dimension=none, offset=none)


def _list_unpaired(side: Side, places: Rows, calls: Rows, ops: Rows, values: Rows) -> Unpaired:
    return Unpaired(
        modules=tuple(side.names[at] for at in np.flatnonzero(places < 0).tolist()),
        calls=_list_rows(calls, side.calls.kept, side.calls.calls.start_ns, "call"),
        ops=_list_rows(ops, side.ops.kept, side.ops.order, "op"),
        values=_list_rows(values, side.values.kept, _order_values(side), "site"),
    )


def _list_rows(partner: Rows, kept: Column, order: Rows, reason: str) -> UnpairedRows:
    rows = np.flatnonzero(kept & (partner < 0))
    rows = rows[np.argsort(order[rows], kind="stable")]
    return UnpairedRows(rows=rows, reason=np.full(len(rows), REASONS.index(reason), np.int8))
