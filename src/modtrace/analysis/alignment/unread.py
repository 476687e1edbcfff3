"""Finds ops that ran for nothing, by which two sequences of equal ops can be told apart."""

import numpy as np

from ..step.calls import Bools, RowFinder, column_of, take
from .sides import Side

#: Of chains of ops that ran for nothing, so many are found from the end on.
_MOST_PASSED = 64


def find_unread(side: Side) -> Bools:
    """Returns which ops made nothing that a call returned or that is read, or only by such ops."""
    ops, tensors, uses = (side.data.table(name) for name in ("ops", "tensors", "uses"))
    find_op = RowFinder(column_of(ops, "op_id"))
    producers = find_op(column_of(tensors, "producer_op"))
    tensor = RowFinder(column_of(tensors, "tensor_id"))(column_of(uses, "tensor_id"))
    producer = take(producers, tensor)
    reader = find_op(column_of(uses, "consumer_op"))
    kept = producer >= 0
    producer, reader = producer[kept], reader[kept]
    reads = np.bincount(producer, minlength=ops.num_rows)
    unread = np.asarray(reads == 0)
    last = unread
    for _ in range(_MOST_PASSED):
        reads -= np.bincount(producer[(reader >= 0) & last[reader]], minlength=ops.num_rows)
        last = (reads == 0) & ~unread
        if not last.any():
            break
        unread = unread | last
    return unread
