"""Pairs what only one of two recordings recomputed with the forward of the other one."""

from dataclasses import replace

import numpy as np

from ...recording.phase import FORWARD, PHASES, RECOMPUTE
from ..step.calls import Rows
from .calls import pair_calls
from .keys import Partners, to_pairs
from .modules import PlacePairs
from .ops import pair_ops
from .sides import Side
from .values import number_values, pair_values

_FORWARD, _RECOMPUTE = PHASES.index(FORWARD), PHASES.index(RECOMPUTE)


def pair_recomputed(
    a: Side, b: Side, places: PlacePairs, steps: Rows, ops: Partners, values: Partners
) -> tuple[Rows, Rows]:
    """Returns pairs of ops and pairs of values: one of a recompute without partner, and that of the other's forward."""
    of_ops, of_values = [np.empty((0, 2), np.int64)], [np.empty((0, 2), np.int64)]
    for one, other in (
        (_take_recomputed(a, ops[0], values[0]), _take_forward(b)),
        (_take_forward(a), _take_recomputed(b, ops[1], values[1])),
    ):
        if not all(side.ops.kept.any() or side.values.kept.any() for side in (one, other)):
            continue
        calls = pair_calls(one, other, places, steps)
        found = pair_ops(one, other, places, calls, steps)
        measured = pair_values(one, other, number_values(one, other, places, steps, calls, found))
        of_ops.append(to_pairs(found[0], one.ops.order))
        of_values.append(to_pairs(measured[0], one.values.order))
    return np.concatenate(of_ops), np.concatenate(of_values)


def _take_recomputed(side: Side, ops: Rows, values: Rows) -> Side:
    """Returns the recording with nothing but recomputes, as if they were forwards."""
    kept = _keep_phase(side, _RECOMPUTE)
    kept = replace(
        kept,
        ops=replace(kept.ops, kept=kept.ops.kept & (ops < 0)),
        values=replace(kept.values, kept=kept.values.kept & (values < 0)),
    )
    calls = replace(kept.calls.calls, phase=_relabel(kept.calls.calls.phase))
    return replace(
        kept,
        calls=replace(kept.calls, calls=calls),
        ops=replace(kept.ops, phase=_relabel(kept.ops.phase)),
        values=replace(kept.values, phase=_relabel(kept.values.phase)),
    )


def _take_forward(side: Side) -> Side:
    return _keep_phase(side, _FORWARD)


def _keep_phase(side: Side, phase: int) -> Side:
    calls, ops, values = side.calls, side.ops, side.values
    of_calls = values.call >= 0
    return replace(
        side,
        calls=replace(calls, kept=calls.kept & (calls.calls.phase == phase)),
        ops=replace(ops, kept=ops.kept & (ops.phase == phase)),
        values=replace(values, kept=values.kept & (values.phase == phase) & of_calls),
    )


def _relabel(phase: Rows) -> Rows:
    return np.where(phase == _RECOMPUTE, _FORWARD, np.where(phase == _FORWARD, _RECOMPUTE, phase))
