"""Excuses the backwards of ops that made a difference themselves, as far as that one explains theirs."""

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Column, find_rows
from ..tables.op_rules import SMOOTH
from .answer import INHERITED, VERDICTS
from .errors import HASHES, STATISTICS
from .recomputes import MergedPairs

#: How many times as far apart as statistics show tensors may be, at least where amplification is judged.
_MORE_BY_STATISTICS = 10.0


def excuse_backwards(merged: MergedPairs, verdicts: Column, first: int | None) -> tuple[Column, Bools]:
    """Returns the verdicts without blame on the backward of an op that made a difference itself, in the same step.

    The difference of the forward op has to explain that of its backward. The second value is a mask of the pairs for
    which it does not, whether the op made its difference or inherited it: of something else that backward has read,
    such as a spoiled saved tensor.
    """
    of_parts = []
    for number, part in enumerate(merged.parts):
        ops = part.a.tables.ops
        forward = np.append(ops.forward, -1)[part.a.op]  # an op of -1, which is none, has no forward
        by_statistics = np.where(part.errors.is_by(STATISTICS), _MORE_BY_STATISTICS, 1.0)
        is_known = ~part.errors.is_by(HASHES)  # unequal hashes say nothing of a size
        of_parts.append(
            (
                np.full(len(part.a.op), number),
                part.a.op,
                forward,
                np.append(ops.are_named(SMOOTH), False)[forward],
                part.errors.error * by_statistics,
                part.inputs.error,
                np.where(is_known, part.errors.error, 0.0),
            )
        )
    part_of, op, forward, is_smooth, caused, given, error = (
        merged.collect(columns) for columns in zip(*of_parts, strict=True)
    )
    is_blamed = verdicts > VERDICTS.index(INHERITED)
    most = int(max(op.max(initial=0), forward.max(initial=0))) + 1
    forward_of = np.where(is_blamed & (forward >= 0), part_of * most + forward, -1)
    asked = np.unique(forward_of)
    answers = np.flatnonzero(op >= 0)
    at, of = find_rows(asked, forward_of), find_rows(asked, part_of[answers] * most + op[answers])
    answers, of = answers[of >= 0], of[of >= 0]
    caused_by, is_made = np.full(len(asked), -1.0), np.zeros(len(asked), np.bool_)
    np.fmax.at(caused_by, of, caused[answers])
    is_made[of[is_blamed[answers]]] = True
    has_forward = (forward_of >= 0) & (caused_by[at] >= 0)
    has_forward[[] if first is None else [first]] = False
    is_explained = error <= _explain_most(np.maximum(caused_by[at], given), is_smooth)
    excused = np.where(has_forward & is_made[at] & is_explained, VERDICTS.index(INHERITED), verdicts)
    return excused.astype(verdicts.dtype), has_forward & ~is_explained


def _explain_most(cause: Numbers, is_smooth: Bools) -> Numbers:
    """Returns how far the output of a backward may be apart if its op's output in forward, or what it reads, is so far.

    Of smooth functions (GELU, norms) it was at most 1.8 times as far; where a bound moves, over which the slope
    jumps, up to 0.7 times the root (`clamp`), and where the value jumps too, 0.9 times the cube root (`threshold`).
    Sketches are off by a factor of 1.2 on both sides.
    """
    jump = np.minimum(1.5 * np.cbrt(cause), 0.25)
    return np.maximum(3 * cause, np.where(is_smooth, 0.0, jump))
