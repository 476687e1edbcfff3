"""Finds how far apart what each op read is, through ops that were not measured."""

from dataclasses import dataclass

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Rows
from ..tables.op_flow import OpFlow

#: Errors pass through so many ops in a row of which all that they read is known, and through so many others.
_MOST_PASSED = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class OpInputs:
    """What the ops of a recording read."""

    error: Numbers  # of each op: the largest error of what it read; NaN where nothing is known of that
    is_known: Bools  # all that it read was compared, or was computed from what was
    is_partial: Bools  # some of that was computed from what was not compared, too
    through: (
        Rows  # the row of an op that only this recording has, through which it read something; -1 for none
    )


def find_inputs(
    flow: OpFlow, is_told: Bools, of_tensor: Numbers, of_read: Numbers, among: Bools | None = None
) -> OpInputs:
    """Returns how far apart what each op read is.

    Args:
        flow: the ops.
        is_told: the ops that `through` may name.
        of_tensor: the error of each tensor; NaN where it was not compared.
        of_read: the error of what each use reads where that is no op's output; NaN where it was not compared.
        among: the ops that are asked about; None for all.
    """
    producer = flow.tensors.producer
    known, is_partial = of_tensor.copy(), np.zeros(len(of_tensor), bool)
    through = np.full(len(known), -1, np.int64)
    found = OpInputs(
        error=np.full(len(flow.op_id), np.nan),
        is_known=np.ones(len(flow.op_id), bool),
        is_partial=np.zeros(len(flow.op_id), bool),
        through=np.full(len(flow.op_id), -1, np.int64),
    )
    # All reads of the ops that read what is known since the last round, in order.
    is_asked = np.ones(len(flow.op_id), bool) if among is None else among.copy()
    is_asked[producer[np.isnan(known) & (producer >= 0)]] = True
    reads = every = np.flatnonzero(is_asked[flow.reader])
    rounds, others = 0, 0
    while len(reads) and others < _MOST_PASSED:
        tensor = flow.read[reads]
        error = np.where(np.isnan(of_read[reads]), known[tensor], of_read[reads])
        starts = np.flatnonzero(np.append(True, np.diff(flow.reader[reads]) != 0))
        at = flow.reader[reads[starts]]
        is_unknown = np.isnan(error)
        found.error[at] = np.fmax.reduceat(error, starts)
        found.is_known[at] = ~np.logical_or.reduceat(is_unknown, starts)
        found.is_partial[at] = np.logical_or.reduceat(is_unknown | is_partial[tensor], starts)
        found.through[at] = np.maximum.reduceat(through[tensor], starts)
        waiting = np.flatnonzero(np.isnan(known) & (producer >= 0))
        waiting = waiting[~np.isnan(found.error[producer[waiting]])]
        if not len(waiting):
            break
        # Ops that read something unknown come last: it may become known.
        whole = waiting[found.is_known[producer[waiting]]]
        if len(whole) and rounds < _MOST_PASSED:
            rounds, waiting = rounds + 1, whole
        else:
            others += 1
        passed = producer[waiting]
        known[waiting], is_partial[waiting] = found.error[passed], found.is_partial[passed]
        is_first = (found.through[passed] < 0) & is_told[passed]
        through[waiting] = np.where(is_first, passed, found.through[passed])
        reads = _reads_beside(flow, waiting, every)
    return found


def _reads_beside(flow: OpFlow, tensors: Rows, reads: Rows) -> Rows:
    """Returns those of some reads that are of ops that read one of these tensors."""
    is_one = np.zeros(len(flow.tensors), bool)
    is_one[tensors] = True
    reads_one = np.zeros(len(flow.op_id), bool)
    reads_one[flow.reader[reads][is_one[flow.read[reads]]]] = True
    return reads[reads_one[flow.reader[reads]]]
