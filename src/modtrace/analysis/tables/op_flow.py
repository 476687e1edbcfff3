"""Reads from the tables `uses` and `tensors` which tensors ops read and return, and finds what nothing reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy
from ...recording.protocols import RecordingData
from .columns import Bools, Column, Groups, RowFinder, Rows, column_of, find_rows, ranges, text_codes
from .tensors import Tensors

#: The slots of calls' arguments begin with this prefix, those of their outputs with `output`.
_GIVEN = "input"

#: Slots of the first tensor that an op returns.
FIRST_SLOTS = ("", "[0]")


class TensorsOfCalls(NamedTuple):
    """The tensors that calls are given, or that they return, with a row for each tensor of a call."""

    call: Rows  # index of the call among those that were requested
    tensor: Rows
    slot: Column  # codes of the names in `OpFlow.slots`


@dataclass(frozen=True, kw_only=True, eq=False)
class OpFlow:
    """Ops and the tensors that flow between them. An op is its row of `op_id`, a tensor its row of `tensors`.

    Reads are in the order of the ops that read, and the reads of one op in the order of its arguments.
    """

    op_id: Column
    tensors: Tensors
    reader: Rows  # for each read, the op that reads
    read: Rows  # for each read, the tensor that is read
    slot: Column  # for each read, the argument, as a code of `slots`
    slots: tuple[str, ...]
    given: TensorsOfCalls
    returned: TensorsOfCalls

    @cached_property
    def first_returned(self) -> Rows:
        """The first tensor that each op returned; -1 for none."""
        first = np.full(len(self.op_id), -1, np.int64)
        made = np.flatnonzero(self.tensors.producer >= 0)[::-1]
        first[self.tensors.producer[made]] = made
        return first

    @cached_property
    def readers(self) -> Groups:
        """For each tensor, the ops that read it."""
        return Groups(self.read, self.reader, len(self.tensors))

    @cached_property
    def outputs(self) -> Groups:
        """For each op, the tensors that it returned."""
        made = np.flatnonzero(self.tensors.producer >= 0)
        return Groups(self.tensors.producer[made], made, len(self.op_id))

    @cached_property
    def first_read(self) -> Rows:
        """The number of the first read of each op, and behind them the number of all reads."""
        return np.searchsorted(self.reader, np.arange(len(self.op_id) + 1))

    def reads_of(self, op: int) -> list[tuple[str, int]]:
        """Returns the slot and the tensor of each read of one op; of -1, which stands for no op, there are none."""
        if op < 0:
            return []
        begin, end = self.first_read[op : op + 2].tolist()
        slots = (self.slots[code] for code in self.slot[begin:end].tolist())
        return list(zip(slots, self.read[begin:end].tolist(), strict=True))

    def returns_of(self, op: int) -> list[tuple[str, int]]:
        """Returns the slot and the tensor of each output of one op."""
        made, tensors = self.outputs[op], self.tensors
        slots = (tensors.slots[code] for code in tensors.slot[made].tolist())
        return list(zip(slots, made.tolist(), strict=True))

    def find_output(self, op: Rows, slot: Column, slots: Sequence[str]) -> Rows:
        """Returns the tensor that each op returned at a slot, the first if there are several; -1 if there is none.

        Args:
            op: the rows of the ops; -1 for none.
            slot: the slot of each op, as an index into `slots`; -1 for none.
            slots: the names that `slot` refers to.
        """
        codes = {name: code for code, name in enumerate(self.tensors.slots)}
        own = np.array([*(codes.get(name, -1) for name in slots), -1])[slot]
        return self._find_by_slot(np.where((op >= 0) & (own >= 0), op * self._width + own, -2))

    @cached_property
    def _width(self) -> int:
        return len(self.tensors.slots) + 2

    @cached_property
    def output(self) -> Rows:
        """For each tensor, a number of the op and slot that returned it; several tensors may share it; -1 for no op."""
        producer = self.tensors.producer
        return np.where(producer >= 0, producer * self._width + self.tensors.slot, -1)

    @cached_property
    def _find_by_slot(self) -> RowFinder:
        return RowFinder(self.output)

    @cached_property
    def writes_part(self) -> Bools:
        """A mask of the ops that write in place through a view, so that they return the tensor behind it, too."""
        outputs, counts = np.unique(self.output, return_counts=True)
        writes_part = np.zeros(len(self.op_id), bool)
        writes_part[outputs[(counts > 1) & (outputs >= 0)] // self._width] = True
        return writes_part

    def find_reads_of_values(self, overwrites: Bools) -> Bools:
        """Returns which reads need what a tensor holds, rather than only its memory as the target of a write.

        An op that writes in place through a view returns the whole tensor behind it. It needs the rest of that tensor,
        which stays as it was, but not what it overwrites.

        Args:
            overwrites: which ops ignore what their argument `self` holds, such as a copy in place.
        """
        is_self = np.array([*(name.partition("[")[0] == "self" for name in self.slots), False])[self.slot]
        return np.asarray(~(is_self & (overwrites & ~self.writes_part)[self.reader]))

    def find_unread(self, overwrites: Bools, among: Bools | None = None) -> Bools:
        """Returns which ops returned nothing that a call takes or returns, or that an op other than these reads.

        Args:
            overwrites: which ops ignore what their argument `self` holds.
            among: the ops to check; None for all.
        """
        producer = self.tensors.producer[self.read]
        counts = (producer >= 0) & self.find_reads_of_values(overwrites)
        reader, producer = self.reader[counts], producer[counts]
        of_calls = self.tensors.producer[np.concatenate([self.given.tensor, self.returned.tensor])]
        used = np.concatenate([producer, of_calls[of_calls >= 0]])
        readers_left = np.bincount(used, minlength=len(self.op_id))
        ends = np.searchsorted(reader, np.arange(len(self.op_id) + 1))
        is_unread = np.asarray(readers_left == 0)
        if among is not None:
            is_unread &= among
        last = np.flatnonzero(is_unread)
        while len(last):  # an op whose outputs only unread ops read is unread, too
            read = producer[ranges(ends[last], ends[last + 1] - ends[last])]
            np.subtract.at(readers_left, read, 1)
            last = np.unique(read[(readers_left[read] == 0) & ~is_unread[read]])
            last = last if among is None else last[among[last]]
            is_unread[last] = True
        return is_unread

    def find_internal(self, forward_op: Rows) -> Bools:
        """Returns which outputs of ops, except first ones, only the backward of their own op reads.

        Outputs of backward ops are excluded: they are gradients, which the engine may pass on without an op.

        forward_op: for each op that ran in backward, its forward op; -1 for others.
            forward_op: the forward op of each op that ran in backward; -1 for none.
        """
        tensors = self.tensors
        is_first = np.array([name in FIRST_SLOTS for name in tensors.slots] + [True])[tensors.slot]
        is_shown = is_first | (tensors.producer < 0) | (np.append(forward_op, -1)[tensors.producer] >= 0)
        is_shown[self.returned.tensor] = True
        is_shown[self.read[forward_op[self.reader] != tensors.producer[self.read]]] = True
        return np.asarray(~is_shown)


def read_op_flow(
    data: RecordingData, *, op_id: Column | None = None, call_id: Column | None = None
) -> OpFlow:
    """Returns which tensors ops read and return, and which calls are given and return.

    Args:
        data: the recording, or the rows of a step of it.
        op_id: the ids of the ops; None for all, in the order of the table.
        call_id: the ids of the calls; None for all.
    """
    uses, tensors = data.table("uses"), data.table("tensors")
    op_id = column_of(data.table("ops"), "op_id") if op_id is None else op_id
    call_id = column_of(data.table("calls"), "call_id") if call_id is None else call_id
    find_op = RowFinder(op_id)
    op = find_op(column_of(uses, "consumer_op"))
    call = find_rows(call_id, column_of(uses, "consumer_call"))
    producer = find_op(column_of(tensors, "producer_op"))
    tensor = find_rows(column_of(tensors, "tensor_id"), column_of(uses, "tensor_id"))
    kept = np.flatnonzero((tensor >= 0) & ((op >= 0) | (call >= 0)))
    op, call, tensor = op[kept], call[kept], tensor[kept]
    is_wanted = producer >= 0
    is_wanted[tensor] = True
    tensor = (np.cumsum(is_wanted) - 1)[tensor]
    slot, slots = text_codes(uses["slot"].take(from_numpy(kept)))
    is_given = np.array([*(name.startswith(_GIVEN) for name in slots), False])[slot]
    by_op = np.flatnonzero(op >= 0)
    by_op = by_op[np.argsort(op[by_op], kind="stable")]
    given, returned = (np.flatnonzero((op < 0) & (is_given == is_input)) for is_input in (True, False))
    return OpFlow(
        op_id=op_id,
        tensors=_read_tensors(tensors, is_wanted, producer),
        reader=op[by_op],
        read=tensor[by_op],
        slot=slot[by_op],
        slots=slots,
        given=TensorsOfCalls(call[given], tensor[given], slot[given]),
        returned=TensorsOfCalls(call[returned], tensor[returned], slot[returned]),
    )


def find_ops_with_tensors(data: RecordingData, op_id: Column) -> Bools:
    """Returns which ops read or return a tensor; marks of the profiler do neither."""
    reading = column_of(data.table("uses"), "consumer_op")
    making = column_of(data.table("tensors"), "producer_op")
    return np.asarray(np.isin(op_id, reading) | np.isin(op_id, making))


def _read_tensors(table: pa.Table, is_wanted: Bools, producer: Rows) -> Tensors:
    if not is_wanted.all():
        table, producer = table.filter(from_numpy(is_wanted)), producer[is_wanted]
    slot, slots = text_codes(table["slot"])
    return Tensors(
        tensor_id=column_of(table, "tensor_id"), producer=producer, slot=slot, table=table, slots=slots
    )
