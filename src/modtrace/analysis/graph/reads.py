"""Reads what the ops of a step read and return, from the rows of `uses` and `tensors`."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ...recording.protocols import RecordingData
from ..step.calls import Column, RowFinder, Rows, column_of
from ..step.ops import dictionary_codes
from .columns import Tensors

#: The prefix of the slots of calls' arguments; those of their outputs begin with `output`.
_GIVEN = "input"

#: Columns of `tensors` that a graph keeps.
_KEPT = (
    "shape", "stride", "offset", "dtype", "device", "layout", "requires_grad", "storage", "version", "site_id",
    "producer_op",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Reads:
    """The reads of tensors in the order of the table: `op[i]` reads `tensor[i]`, and likewise for calls."""

    op: Rows
    tensor: Rows  # row of the tensors
    slot: Column  # codes of `slots`
    slots: tuple[str, ...]
    call: Rows  # of what calls return: the call,
    returned: Rows  # the tensor,
    place: Column  # and where it is in the output: codes of `slots`
    given: Rows  # of what calls are given: the tensor,
    given_as: Column  # where it is among the arguments: codes of `slots`,
    given_to: Rows  # and the call


def read_uses(data: RecordingData, op_id: Column, call_id: Column) -> tuple[Reads, Tensors]:
    """Returns what ops read and return, and what calls return. `producer` of the tensors is a row of `op_id`."""
    uses, tensors = data.table("uses"), data.table("tensors")
    find_op = RowFinder(op_id)
    op = find_op(column_of(uses, "consumer_op"))
    call = RowFinder(call_id)(column_of(uses, "consumer_call"))
    kept = np.flatnonzero((op >= 0) | (call >= 0))
    producer = find_op(column_of(tensors, "producer_op"))
    ids = column_of(tensors, "tensor_id")
    read = RowFinder(ids)(column_of(uses, "tensor_id")[kept])
    kept, read = kept[read >= 0], read[read >= 0]
    is_wanted = producer >= 0
    is_wanted[read] = True
    rows = np.flatnonzero(is_wanted)
    number = np.cumsum(is_wanted) - 1
    slot, slots = word_or_text_codes(uses["slot"].take(pa.array(kept)))
    is_given = np.array([each.startswith(_GIVEN) for each in slots] + [False])[slot] & (op[kept] < 0)
    by_op, by_call = np.flatnonzero(op[kept] >= 0), np.flatnonzero((op[kept] < 0) & ~is_given)
    tensor = number[read]
    reads = Reads(
        op=op[kept][by_op],
        tensor=tensor[by_op],
        slot=slot[by_op],
        slots=slots,
        call=call[kept][by_call],
        returned=tensor[by_call],
        place=slot[by_call],
        given=tensor[is_given],
        given_as=slot[is_given],
        given_to=call[kept][is_given],
    )
    table = tensors.take(pa.array(rows))
    slot, slots = word_or_text_codes(table["slot"])
    table = table.select(_KEPT)
    return reads, Tensors(tensor_id=ids[rows], producer=producer[rows], slot=slot, table=table, slots=slots)


def word_or_text_codes(column: pa.ChunkedArray) -> tuple[Column, tuple[str, ...]]:
    """Returns a column of strings as codes, and the strings; -1 for null."""
    return dictionary_codes(column if pa.types.is_dictionary(column.type) else column.dictionary_encode())
