"""Finds outputs of modules that have other shapes in the other run, so that they are not compared."""

import math

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ...recording.role import OUTPUT
from ..alignment.sides import Side
from ..tables.calls import iterate_levels
from ..tables.columns import Column
from .answer import Reshaped
from .errors import NOTHING
from .names import Names
from .pairs import Compared

_FORWARD = PHASES.index(FORWARD)

#: At most so many of them are told.
_TOLD = 100


def find_reshaped(found: Compared) -> tuple[tuple[Reshaped, ...], bool]:
    """Returns the outputs of modules that have another number of elements in the other run, the outermost first.

    Each output of a module is told once. Returns besides whether what models return, and most of what modules inside of
    them return, was not compared: then the inputs have other shapes, and not a module or two.
    """
    side, other = found.side, found.other
    values, depth = side.values, _find_depths(side)
    is_output = values.is_of(OUTPUT) & (values.phase == _FORWARD) & (values.call >= 0)
    outermost = depth[values.call[is_output & values.kept]].min(initial=len(depth))
    rows_compared = found.a.rows[~found.errors.is_by(NOTHING)]
    compared = rows_compared[is_output[rows_compared]]
    misfits = found.misfits[is_output[found.misfits[:, 0]]]
    of = misfits[:, 0]  # of a call the last to be computed comes first: logits before what a cache keeps
    order = np.lexsort((-values.order[of], values.call[of], depth[values.call[of]]))
    rows, partners = misfits[order].T
    names, told = Names(side), dict[tuple[int, int], Reshaped]()
    for row, partner in zip(rows.tolist(), partners.tolist(), strict=True):
        key = int(values.place[row]), int(values.slot[row])
        if key not in told and len(told) < _TOLD:
            calls, calls_b = _count_calls(side, row), _count_calls(other, partner)
            common = math.gcd(calls, calls_b) or 1
            told[key] = Reshaped(
                name=names.label_value(row),
                step=int(values.step[row]),
                shape=_shape(side, row),
                shape_b=_shape(other, partner),
                calls=calls // common,
                calls_b=calls_b // common,
                outermost=bool(depth[values.call[row]] <= outermost),
            )
    returned, others = (depth[values.call[each]] <= outermost for each in (compared, of))
    return tuple(told.values()), bool(others.any() and not returned.any() and len(of) > len(compared))


def _find_depths(side: Side) -> Column:
    """Returns in how many calls each call is."""
    depth = np.zeros(len(side.calls.place), np.int64)
    for number, level in enumerate(iterate_levels(side.calls.calls.parent)):
        depth[level] = number
    return depth


def _shape(side: Side, row: int) -> tuple[int, ...]:
    return tuple(size for size in side.values.sizes[row].tolist() if size >= 0)


def _count_calls(side: Side, row: int) -> int:
    """Returns how often the module of a row is called in forward, in all compared steps."""
    calls = side.calls
    is_same = calls.kept & (calls.place == side.values.place[row]) & (calls.calls.phase == _FORWARD)
    return int((is_same & (calls.wraps == 0)).sum())
