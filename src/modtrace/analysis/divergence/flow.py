"""Finds which measured tensors each measured tensor was computed from, and how far those are apart."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.protocols import RecordingData
from ...recording.statistics.moments import Numbers
from ..graph.reads import word_or_text_codes
from ..provenance.op_rules import SHAPES_ONLY, UNINITIALIZED
from ..step.calls import Bools, Column, RowFinder, Rows, column_of
from ..step.ops import bare_name, dictionary_codes

#: Ops that compute nothing, as views.
_PLAIN = frozenset({"to_copy", "detach", "alias", "clone", "copy", "contiguous", "unsafe_view"})

#: Ops that do not read what `self` holds, in place or not.
_OVERWRITES = SHAPES_ONLY | {
    "copy", "fill", "normal", "uniform", "random", "exponential", "geometric", "log_normal", "cauchy",
}  # fmt: skip

#: Errors pass through so many ops in a row that were not measured, as views.
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


class OpFlow:
    """The ops of a recording and the tensors between them; errors are given to tensors, and asked for of ops."""

    def __init__(self, data: RecordingData) -> None:
        ops, tensors, uses = data.table("ops"), data.table("tensors"), data.table("uses")
        self.op_id = column_of(ops, "op_id")
        self.op_step = column_of(ops, "step")
        find_op = RowFinder(self.op_id)
        self.producer = find_op(column_of(tensors, "producer_op"))
        self.slot, self._slots = word_or_text_codes(tensors["slot"])
        self.site = column_of(tensors, "site_id")
        self.is_plain = find_plain(ops)
        self._overwrites = _find_named(ops, _OVERWRITES)
        self.is_uninitialized = _find_named(ops, UNINITIALIZED)  # returns memory that nobody has written
        op = find_op(column_of(uses, "consumer_op"))
        tensor = RowFinder(column_of(tensors, "tensor_id"))(column_of(uses, "tensor_id"))
        kept = np.flatnonzero((op >= 0) & (tensor >= 0))
        order = kept[np.argsort(op[kept], kind="stable")]
        self._uses, self._order = uses, order
        self.reader, self.read = op[order], tensor[order]

    def find_unread(self, among: Bools) -> Bools:
        """Returns which of these ops made nothing that other ops read, also by way of further ones among these.

        What an op overwrites, as a copy or a draw in place, is not read by it.
        """
        slot, names = word_or_text_codes(self._uses["slot"])
        is_self = slot[self._order] == (names.index("self") if "self" in names else -2)
        reads = np.flatnonzero(among[self.reader] & ~(is_self & self._overwrites[self.reader]))
        is_read = np.zeros(len(self.producer) + 1, bool)
        is_read[self.read[~among[self.reader]]] = True
        while True:
            is_used = np.zeros(len(self.op_id) + 1, bool)
            is_used[self.producer[is_read[:-1]]] = True
            more = self.read[reads[is_used[:-1][self.reader[reads]]]]
            if is_read[more].all():
                return np.asarray(among & ~is_used[:-1])
            is_read[more] = True

    def tensor_of(self, op: Rows, slot: Column, slots: tuple[str, ...]) -> Rows:
        """Returns the tensor that each op returned at a slot, the first one if there are several; -1 for none."""
        codes = {name: code for code, name in enumerate(self._slots)}
        own = np.array([*(codes.get(name, -1) for name in slots), -1])[slot]
        width = len(self._slots) + 2
        there = np.where(self.producer >= 0, self.producer * width + self.slot, -1)
        wanted = np.where((op >= 0) & (own >= 0), op * width + own, -2)
        return RowFinder(there)(wanted)

    def find_inputs(self, of_tensor: Numbers, of_read: Numbers) -> OpInputs:
        """Returns how far apart what each op read is.

        Args:
            of_tensor: the error of each tensor; NaN where it was not compared.
            of_read: the error of what each use reads where that is no op's output; NaN where it was not compared.
        """
        known, is_partial = of_tensor.copy(), np.zeros(len(of_tensor), bool)
        through = np.full(len(known), -1, np.int64)
        found = OpInputs(
            error=np.full(len(self.op_id), np.nan),
            is_known=np.ones(len(self.op_id), bool),
            is_partial=np.zeros(len(self.op_id), bool),
            through=np.full(len(self.op_id), -1, np.int64),
        )
        # All reads of the ops that read what is known since the last round, in order.
        reads = np.arange(len(self.read))
        for _ in range(_MOST_PASSED):
            if not len(reads):
                break
            tensor = self.read[reads]
            error = np.where(np.isnan(of_read[reads]), known[tensor], of_read[reads])
            starts = np.flatnonzero(np.append(True, np.diff(self.reader[reads]) != 0))
            at = self.reader[reads[starts]]
            is_unknown = np.isnan(error)
            found.error[at] = np.fmax.reduceat(error, starts)
            found.is_known[at] = ~np.logical_or.reduceat(is_unknown, starts)
            found.is_partial[at] = np.logical_or.reduceat(is_unknown | is_partial[tensor], starts)
            found.through[at] = np.maximum.reduceat(through[tensor], starts)
            waiting = np.flatnonzero(np.isnan(known) & (self.producer >= 0))
            waiting = waiting[~np.isnan(found.error[self.producer[waiting]])]
            if not len(waiting):
                break
            passed = self.producer[waiting]
            known[waiting], is_partial[waiting] = found.error[passed], found.is_partial[passed]
            is_first = (found.through[passed] < 0) & ~self.is_plain[passed]
            through[waiting] = np.where(is_first, passed, found.through[passed])
            reads = self._reads_beside(waiting)
        return found

    def _reads_beside(self, tensors: Rows) -> Rows:
        """Returns all reads of the ops that read one of these tensors."""
        is_one = np.zeros(len(self.producer), bool)
        is_one[tensors] = True
        reads_one = np.zeros(len(self.op_id), bool)
        reads_one[self.reader[is_one[self.read]]] = True
        return np.flatnonzero(reads_one[self.reader])


def find_plain(ops: pa.Table) -> Bools:
    """Returns which ops compute nothing: views, copies, and casts, which belong to the dtype."""
    is_view = np.asarray(pc.fill_null(ops["is_view"], False)).astype(bool)
    return is_view | _find_named(ops, _PLAIN)


def _find_named(ops: pa.Table, wanted: Collection[str]) -> Bools:
    """Returns which ops have one of these names."""
    name, names = dictionary_codes(ops["name"])
    is_wanted = np.array([*(bare_name(each) in wanted for each in names), False])
    return np.asarray(is_wanted[name])
