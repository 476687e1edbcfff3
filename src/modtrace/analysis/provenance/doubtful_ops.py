"""Finds which ops of a step may read or write values that are not known to be finite; the others need no visit."""

import numpy as np

from ..tables.columns import Bools, Rows
from ..tables.one_step import OneStep
from ..tables.op_rules import CARRIERS, FILLS, UNINITIALIZED
from .step_counts import StepCounts


def find_doubtful_ops(step: OneStep, counts: StepCounts) -> Rows:
    """Returns the ops that share memory with a tensor which may not be finite, in the order in which they began.

    Such a tensor is a leaf or output that was measured as not finite, or not measured, unless it shows another tensor
    or can hold neither NaN nor an infinity. What an op passes on is among these, too. In a step of a million ops nearly
    all others only return tensors that were measured as finite.
    """
    flow, tensors = step.flow, step.tensors
    is_made = tensors.producer >= 0
    may_pass_on = _of_producers(step, step.are_named(CARRIERS | FILLS)) | tensors.holds_numbers
    is_doubtful = is_made & (
        counts.is_bad
        | (~counts.is_measured & ~step.shows_first_read & may_pass_on)
        | _of_producers(step, step.are_named(UNINITIALIZED))
    )
    leaves = np.flatnonzero(~is_made)
    is_doubtful[leaves] = [not _is_finite(counts, tensor) for tensor in leaves.tolist()]
    reads_dropped = np.zeros(len(step.ops), bool)
    reads_dropped[list(counts.reads_dropped)] = True
    is_doubtful |= _of_producers(step, reads_dropped)
    touches = np.isin(tensors.memory, tensors.memory[is_doubtful])
    is_visited = reads_dropped
    is_visited[tensors.producer[touches & is_made]] = True
    is_visited[flow.reader[touches[flow.read]]] = True
    return step.order[is_visited[step.order]]


def _of_producers(step: OneStep, of_ops: Bools) -> Bools:
    """Returns for each tensor whether the op that made it is one of these ops; False if none made it."""
    return np.append(of_ops, False)[step.tensors.producer]


def _is_finite(counts: StepCounts, leaf: int) -> bool:
    measured = counts.of_leaf(leaf)
    return measured is not None and not (measured.nan or measured.inf)
