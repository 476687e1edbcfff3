"""Joins batches of ops, with what each op used and returned."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

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

    def __init__(self, batches: Sequence[OpBatch]) -> None:
        self.batches = batches
        self.firsts = [*accumulate(map(len, batches), initial=0)][:-1]  # of the ops of each batch
        self.events: Ints = _joined([batch.events for batch in batches]).reshape(-1, EVENT_WIDTH)
        self.tensors: Ints = _joined([batch.tensors for batch in batches]).reshape(-1, ROW_WIDTH)
        counts = [len(batch.tensors) // ROW_WIDTH for batch in batches]
        first_rows = [*accumulate(counts, initial=0)][:-1]
        shifts = np.array([batch.first_tensor for batch in batches]) - np.array(first_rows)
        self.tensor_ids: Ints = np.repeat(shifts, counts) + np.arange(sum(counts))
        self.arguments, self.argument = self._join_arguments()
        self.shown = [arguments.shown for arguments in self.arguments]
        slots = np.array([len(shown.lengths) for shown in self.shown], np.int64)
        self.use_counts: Ints = slots[self.argument]  # of each op
        self.used: Ints = self._join_uses()  # tensor and geometry
        self.use_ends: Ints = np.cumsum(self.use_counts)
        of_batch = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        #: For each op the end of the rows of the tensors that were met while it ran, or since the op before.
        self.tensor_ends: Ints = self.events[:, TENSORS] - shifts[of_batch]
        ops, is_met = np.arange(len(self.events)), np.diff(self.tensor_ends, prepend=0)
        met_at = np.append(np.repeat(ops, is_met), np.full(sum(counts) - is_met.sum(), len(ops)))
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
        total = _sums(sizes[self.used[:, _GEOMETRY_OF_USE]])
        summed: Ints = total[self.use_ends] - total[self.use_ends - self.use_counts]
        return summed

    def sum_of_outputs(self, sizes: Ints) -> Ints:
        """Returns for each op the sum of `sizes` over its output tensors."""
        total = _sums(np.where(self.is_output, sizes[self.tensors[:, GEOMETRY]], 0))
        return np.diff(total[self.tensor_ends], prepend=0)

    def keys_of(self, ops: Ints) -> list[tuple[Arguments, bytes, bytes]]:
        """Returns for each of these ops its arguments, and the geometries of its inputs and of its outputs as bytes.

        Such keys are equal for ops that differ in nothing but what their tensors hold.
        """
        used = np.ascontiguousarray(self.used[:, _GEOMETRY_OF_USE]).tobytes()
        returned = self.tensors[self.is_output, GEOMETRY].tobytes()
        outputs = _sums(self.is_output)[np.append(0, self.tensor_ends)]  # before each op
        ends = self.use_ends[ops]
        arguments = map(self.arguments.__getitem__, self.argument[ops].tolist())
        sides = (used, ends - self.use_counts[ops], ends), (returned, outputs[ops], outputs[ops + 1])
        parts = (map(side.__getitem__, map(slice, *_bytes_of(bounds))) for side, *bounds in sides)
        return [*zip(arguments, *parts, strict=True)]

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


def _bytes_of(bounds: Sequence[Ints]) -> list[list[int]]:
    return [(bound * 8).tolist() for bound in bounds]


def _sums(numbers: npt.NDArray[Any]) -> Ints:
    """Returns the sum of all numbers before each, and of all."""
    sums = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(numbers, out=sums[1:])
    return sums


def _joined(parts: Sequence[Sequence[int]]) -> Ints:
    return np.concatenate([np.asarray(part, np.int64) for part in parts])
