"""Joins batches of ops, with what each op used and returned."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ..log.nesting import Ints
from ..tensor_ids.tensor_ids import BITS, FRESH, GEOMETRY, NO_OP, PRODUCER, ROW_WIDTH
from .arguments import Arguments
from .batches import OpBatch
from .mode import ARGUMENTS, EVENT_WIDTH, OP, SCHEMA, TENSORS, USES, OpRun

_GEOMETRY_OF_USE = 1


class JoinedOps:
    """The ops of several batches, as one table."""

    def __init__(
        self, batches: Sequence[OpBatch], texts_of: Callable[[Arguments], tuple[str, tuple[str, ...]]]
    ) -> None:
        """Joins batches. `texts_of` returns the JSON template of arguments, and the slots of their tensors."""
        self.batches = batches
        self.firsts = [*accumulate(map(len, batches), initial=0)][:-1]  # of the ops of each batch
        self.events: Ints = _joined([batch.events for batch in batches]).reshape(-1, EVENT_WIDTH)
        self.tensors: Ints = _joined([batch.tensors for batch in batches]).reshape(-1, ROW_WIDTH)
        counts = [len(batch.tensors) // ROW_WIDTH for batch in batches]
        shifts = [
            batch.first_tensor - before
            for batch, before in zip(batches, accumulate(counts, initial=0), strict=False)
        ]
        self.tensor_ids: Ints = np.repeat(np.array(shifts, np.int64), counts) + np.arange(sum(counts))
        self.arguments, self.argument = self._join_arguments()
        self.texts = [texts_of(argument) for argument in self.arguments]
        slots = np.array([len(slots) for _, slots in self.texts], np.int64)
        self.use_counts: Ints = slots[self.argument]  # of each op
        self.used: Ints = self._join_uses()  # tensor and geometry
        self.use_ends: Ints = np.cumsum(self.use_counts)
        met_at = np.searchsorted(self.events[:, TENSORS], self.tensor_ids, side="right")
        #: For each tensor the op while which it was met, if there is one, and whether that one has returned it.
        self.op_of_tensor: Ints = np.minimum(met_at, len(self.events) - 1)
        self.is_output: npt.NDArray[np.bool_] = (met_at < len(self.events)) & (
            self.tensors[:, PRODUCER] == np.append(self.events[:, OP], NO_OP)[met_at]
        )

    def _join_arguments(self) -> tuple[list[Arguments], Ints]:
        """Returns all sets of arguments, and for each op the index of its own. Most batches share one list."""
        known: list[Arguments] = []
        firsts: dict[int, int] = {}
        for batch in self.batches:
            if id(batch.arguments) not in firsts:
                firsts[id(batch.arguments)] = len(known)
                known += batch.arguments
        shifts = np.repeat(
            [firsts[id(batch.arguments)] for batch in self.batches], [len(batch) for batch in self.batches]
        )
        used, position = number_used(self.events[:, ARGUMENTS] + shifts, len(known))
        return [known[at] for at in used.tolist()], position

    def _join_uses(self) -> Ints:
        """Returns the uses by ops that have run to their end.

        An op that an interrupt ended has left incomplete uses.
        """
        lengths = [len(batch.used) // 2 for batch in self.batches]
        used = _joined([batch.used for batch in self.batches]).reshape(-1, 2)
        if self.use_counts.sum() == len(used):
            return used
        shifts = np.repeat([*accumulate(lengths, initial=0)][:-1], [len(batch) for batch in self.batches])
        ends = self.events[:, USES] // 2 + shifts
        rows = np.repeat(ends - np.cumsum(self.use_counts), self.use_counts)
        return used[rows + np.arange(len(rows))]

    def threads(self) -> list[tuple[int, int, OpRun]]:
        """Returns the ranges of ops that are consecutive on one thread, or work for nodes of one thread."""
        found: list[tuple[int, int, OpRun]] = []
        for batch, first in zip(self.batches, self.firsts, strict=True):
            for begin, end, run in batch.runs():
                last = found[-1] if found else None
                is_next = last is not None and last[1] == first + begin and last[2].thread == run.thread
                if last is not None and is_next and last[2].node_thread == run.node_thread:
                    found[-1] = (last[0], first + end, run)
                else:
                    found.append((first + begin, first + end, run))
        return found

    def sum_of_uses(self, sizes: Ints) -> Ints:
        """Returns for each op the sum of `sizes` over its input tensors; `sizes` has an entry for each geometry."""
        total = np.concatenate([[0], np.cumsum(sizes[self.used[:, _GEOMETRY_OF_USE]])])
        summed: Ints = total[self.use_ends] - total[self.use_ends - self.use_counts]
        return summed

    def sum_of_outputs(self, sizes: Ints) -> Ints:
        """Returns for each op the sum of `sizes` over its output tensors."""
        summed = np.zeros(len(self.events), np.int64)
        np.add.at(summed, self.op_of_tensor[self.is_output], sizes[self.tensors[self.is_output, GEOMETRY]])
        return summed

    def geometries_of(self, ops: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yields the geometries of the inputs and of the outputs of each of these ops."""
        used, ends = self.used[:, _GEOMETRY_OF_USE], self.use_ends[ops]
        uses = zip((ends - self.use_counts[ops]).tolist(), ends.tolist(), strict=True)
        outputs, op_of_output = self.tensors[self.is_output, GEOMETRY], self.op_of_tensor[self.is_output]
        firsts, lasts = (np.searchsorted(op_of_output, ops + more).tolist() for more in (0, 1))
        for (begin, end), first, last in zip(uses, firsts, lasts, strict=True):
            yield used[begin:end], outputs[first:last]

    def first_use(self, op: int) -> int:
        """Returns the first input tensor of an op; -1 if it has none."""
        count = int(self.use_counts[op])
        return int(self.used[int(self.use_ends[op]) - count, 0]) if count else -1

    def is_view(self, tensor: int, is_view_schema: npt.NDArray[np.bool_]) -> bool:
        """Returns whether a tensor was returned by one of these ops, if that op returns views."""
        at = int(np.searchsorted(self.tensor_ids, tensor))
        if at >= len(self.tensor_ids) or self.tensor_ids[at] != tensor or not self.is_output[at]:
            return False
        return bool(is_view_schema[self.events[self.op_of_tensor[at], SCHEMA]])

    def has_allocated(self) -> npt.NDArray[np.bool_]:
        """Returns whether each op has returned a tensor with a storage of its own."""
        allocated = np.zeros(len(self.events), bool)
        is_fresh = self.is_output & ((self.tensors[:, BITS] & FRESH) != 0)
        allocated[self.op_of_tensor[is_fresh]] = True
        return allocated


def number_used(codes: Ints, count: int) -> tuple[Ints, Ints]:
    """Returns the codes that occur, in ascending order, and for each code its position among those.

    It is `np.unique` for codes from 0 up to `count`, without sorting.
    """
    is_used = np.zeros(count, bool)
    is_used[codes] = True
    return np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[codes]


def _joined(parts: Sequence[Sequence[int]]) -> Ints:
    return np.concatenate([np.asarray(part, np.int64) for part in parts])
