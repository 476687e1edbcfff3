"""Finds the ops that made what other ops read."""

from collections.abc import Iterator

import numpy as np

from ..tables.columns import Column, column_of, find_rows, take
from ..tables.sampled_steps import SampledSteps

#: The largest number of views between what an op reads and the op that made it.
_MOST_VIEWS = 8


def find_makers(run: SampledSteps, op_id: Column, slot: str) -> Iterator[Column]:
    """Yields for each op the op that made what it reads in a slot; where that is a view, then what made what it views.

    -1 stands for none.
    """
    reader = op_id
    for _ in range(_MOST_VIEWS):
        tensor = find_read(run, reader, slot)
        tensors = run.find("tensors", ["tensor_id", "producer_op"], tensor_id=tensor)
        maker = take(column_of(tensors, "producer_op"), find_rows(column_of(tensors, "tensor_id"), tensor))
        yield maker
        ops = run.find("ops", ["op_id", "is_view"], op_id=maker)
        is_view = (
            take(column_of(ops, "is_view").astype(np.int64), find_rows(column_of(ops, "op_id"), maker)) == 1
        )
        reader, slot = np.where(is_view, maker, -1), "self"
        if not is_view.any():
            return


def find_read(run: SampledSteps, op_id: Column, slot: str) -> Column:
    """Returns the tensor that each op reads in a slot; -1 for none."""
    uses = run.find("uses", ["consumer_op", "slot", "tensor_id"], consumer_op=op_id)
    is_one = np.array([used == slot for used in uses["slot"].to_pylist()], bool)
    return take(
        column_of(uses, "tensor_id")[is_one], find_rows(column_of(uses, "consumer_op")[is_one], op_id)
    )
