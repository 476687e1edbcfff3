"""Finds the call and the phase that each op ran in."""

from collections.abc import Sequence

import numpy as np

from ...recording.phase import BACKWARD, OPTIMIZER, PHASE_CODE
from ..log.nesting import Ints
from ..log.segments import Segment
from ..log.thread_log import Backward, ThreadLog
from ..scopes.locate import Location
from ..steps.step import Step
from .batches import NodeOwners
from .joined import JoinedOps
from .mode import AT, START_NS, OpRun

NO_CALL = -1
NO_PHASE = -1


class OpCalls:
    """The calls of ops, as columns."""

    def __init__(self, found: JoinedOps, steps: Sequence[Step], optimizer_ids: Sequence[int]) -> None:
        size = len(found.events)
        self.call_id = np.full(size, NO_CALL, np.int64)
        self.phase = np.full(size, NO_PHASE, np.int8)
        self.thread = np.zeros(size, np.int32)
        self._events = found.events
        self._backward_rows: dict[Backward, dict[tuple[Segment, int], int]] = {}
        self._optimizers = _OptimizerCalls(steps, optimizer_ids)
        for batch, first in zip(found.batches, found.firsts, strict=True):
            worked: dict[ThreadLog, list[tuple[int, int, Backward]]] = {}
            for begin, end, run in batch.runs():
                self._fill(slice(first + begin, first + end), run)
                if type(run.where) is ThreadLog:
                    worked.setdefault(run.where, []).append((first + begin, first + end, run.backward))
            for log, runs in worked.items():
                self._fill_backward(batch.owners[log], runs)

    def _fill(self, rows: slice, run: OpRun) -> None:
        self.thread[rows] = run.thread
        where = run.where
        if type(where) is Segment:
            self._fill_segment(where, self._events[rows, AT], rows)
        elif type(where) is Location and where.phase is not None:
            self._fill_found(where, where.phase, run, rows)

    def _fill_segment(self, segment: Segment, at: Ints, rows: slice) -> None:
        self.phase[rows] = PHASE_CODE[segment.phase]
        if segment.first_id is not None:
            index = segment.structure().scope_after[at]
            self.call_id[rows] = np.where(index < 0, NO_CALL, segment.first_id + index)

    def _fill_backward(self, owners: NodeOwners, runs: list[tuple[int, int, Backward]]) -> None:
        """Sets phase and call of the backward ops whose autograd nodes were made on one thread."""
        keys = owners.of_segment << 32 | (owners.index + 1)
        done = 0
        for begin, end, backward in runs:
            self.phase[begin:end] = PHASE_CODE[BACKWARD]
            here = keys[done : done + end - begin]
            done += end - begin
            firsts = np.flatnonzero(np.diff(here, prepend=-1))  # of the consecutive ops of a call
            calls = [(owners.segments[key >> 32], (key & 0xFFFFFFFF) - 1) for key in here[firsts].tolist()]
            ids = [self._backward_row(backward, *call) for call in calls]
            self.call_id[begin:end] = np.repeat(ids, np.diff(firsts, append=len(here)))

    def _fill_found(self, where: Location, phase: str, run: OpRun, rows: slice) -> None:
        """Sets what was looked up when the op ran, because it cannot be looked up later."""
        self.phase[rows] = PHASE_CODE[phase]
        if phase == OPTIMIZER:
            self.call_id[rows] = self._optimizers.at(self._events[rows, START_NS], run.thread)
        elif where.call is not None and phase == BACKWARD:
            self.call_id[rows] = self._backward_row(run.backward, *where.call)
        elif where.call is not None and where.call.call_id is not None:
            self.call_id[rows] = where.call.call_id

    def _backward_row(self, backward: Backward | None, segment: Segment | None, index: int) -> int:
        """Returns the call id of the backward of a forward call in one run of the engine."""
        if backward is None or backward.first_id < 0 or segment is None or index < 0:
            return NO_CALL
        rows = self._backward_rows.get(backward)
        if rows is None:
            calls = zip(backward.calls.segment, backward.calls.index, strict=True)
            rows = self._backward_rows[backward] = {call: row for row, call in enumerate(calls)}
        row = rows.get((segment, index))
        return NO_CALL if row is None else backward.first_id + row


class _OptimizerCalls:
    """The optimizer steps, by thread and time."""

    def __init__(self, steps: Sequence[Step], ids: Sequence[int]) -> None:
        rows = [optimizer_step for step in steps for optimizer_step in step.optimizer_steps]
        self._by_thread: dict[int, list[tuple[int, int, int]]] = {}
        for (start, end, thread), call_id in zip(rows, ids, strict=True):
            self._by_thread.setdefault(thread, []).append((start, end, call_id))

    def at(self, times_ns: Ints, thread: int) -> Ints:
        """Returns the call ids of the optimizer steps that ran at the given times."""
        found = np.full(len(times_ns), NO_CALL, np.int64)
        for start, end, call_id in self._by_thread.get(thread, ()):
            found[(start <= times_ns) & (times_ns <= end)] = call_id
        return found
