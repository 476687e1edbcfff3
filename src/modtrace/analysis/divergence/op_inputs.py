"""Finds how far apart the tensors are that each op read, also through ops whose outputs were not compared."""

from dataclasses import dataclass

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Bools, Rows
from ..tables.op_flow import OpFlow

#: The largest number of consecutive ops through which errors pass: where all inputs are known, and elsewhere.
_MOST_PASSED = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class OpInputs:
    """What is known of the inputs of ops."""

    error: Numbers  # for each op, the largest error of the tensors that it read; NaN where none is known
    is_known: Bools  # whether all inputs were compared, or computed from compared tensors
    is_partial: Bools  # whether some of those also depend on tensors that were not compared
    through: Rows  # the last unpaired op from whose output an input was computed; -1 for none


def find_op_inputs(
    flow: OpFlow, is_unpaired: Bools, of_tensor: Numbers, of_read: Numbers, among: Bools | None = None
) -> OpInputs:
    """Returns the errors of the tensors that each op read.

    Args:
        flow: the ops and the tensors that they read.
        is_unpaired: which ops `through` may name.
        of_tensor: the error of each tensor; NaN where it was not compared.
        of_read: the error of each read of a leaf; NaN where it was not compared.
        among: the ops whose inputs are needed; None for all.
    """
    producer = flow.tensors.producer
    known, is_partial = of_tensor.copy(), np.zeros(len(of_tensor), bool)
    through = np.full(len(known), -1, np.int64)
    count = len(flow.op_id)
    inputs = OpInputs(
        error=np.full(count, np.nan),
        is_known=np.ones(count, bool),
        is_partial=np.zeros(count, bool),
        through=np.full(count, -1, np.int64),
    )
    # All reads, in order, of the ops that read a tensor whose error became known in the last round.
    is_needed = np.ones(count, bool) if among is None else among.copy()
    is_needed[producer[np.isnan(known) & (producer >= 0)]] = True
    reads = all_reads = np.flatnonzero(is_needed[flow.reader])
    rounds, others = 0, 0
    while len(reads) and others < _MOST_PASSED:
        tensor = flow.read[reads]
        error = np.where(np.isnan(of_read[reads]), known[tensor], of_read[reads])
        starts = np.flatnonzero(np.append(True, np.diff(flow.reader[reads]) != 0))
        op = flow.reader[reads[starts]]
        is_unknown = np.isnan(error)
        inputs.error[op] = np.fmax.reduceat(error, starts)
        inputs.is_known[op] = ~np.logical_or.reduceat(is_unknown, starts)
        inputs.is_partial[op] = np.logical_or.reduceat(is_unknown | is_partial[tensor], starts)
        inputs.through[op] = np.maximum.reduceat(through[tensor], starts)
        waiting = np.flatnonzero(np.isnan(known) & (producer >= 0))
        waiting = waiting[~np.isnan(inputs.error[producer[waiting]])]
        if not len(waiting):
            break
        # Ops with an unknown input come last, as that input may become known.
        whole = waiting[inputs.is_known[producer[waiting]]]
        if len(whole) and rounds < _MOST_PASSED:
            rounds, waiting = rounds + 1, whole
        else:
            others += 1
        passed = producer[waiting]
        known[waiting], is_partial[waiting] = inputs.error[passed], inputs.is_partial[passed]
        is_first = (inputs.through[passed] < 0) & is_unpaired[passed]
        through[waiting] = np.where(is_first, passed, inputs.through[passed])
        is_new = np.zeros(len(known), bool)
        is_new[waiting] = True
        reads_new = np.zeros(count, bool)
        reads_new[flow.reader[all_reads][is_new[flow.read[all_reads]]]] = True
        reads = all_reads[reads_new[flow.reader[all_reads]]]
    return inputs
