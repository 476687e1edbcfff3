"""Turns the calls of ended steps into the columns of the tables `calls` and `steps`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASE_CODE
from ..backward.recompute_origins import Origins, origins_of
from ..log.backward_calls import BackwardCalls
from ..log.nesting import Ints, structure_of
from ..log.segments import EXIT_RAISED, EXIT_UNSEEN, CallRef, InsideCall, Segment
from ..log.thread_log import Backward
from .step import Step

Columns = dict[str, Any]


class NthMemory(dict[Segment, npt.NDArray[np.int32]]):
    """Keeps the `nth` of calls until their rows are written and no later backward can reach them.

    As a dict it holds the `nth` of calls that hooks saw, by segment; `number_inside` finds those in compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        #: By segment, in steps with compiled code: the number of earlier calls of each module inside, in the step.
        self._before: dict[Segment, dict[int, int]] = {}
        self._origins: dict[CallRef, CallRef | None] = {}  # the calls that recomputed calls repeat

    def prune(self) -> None:
        """Forgets segments whose graphs are dead."""
        for segment in [segment for segment in self if not segment.is_needed()]:
            del self[segment]
        self._before = {segment: before for segment, before in self._before.items() if segment.is_needed()}
        self._origins = {call: origin for call, origin in self._origins.items() if call.segment.is_needed()}

    def count_inside(self, step: Step) -> None:
        """Counts the calls of modules that run inside of compiled code, in a step that may still be open."""
        inside: Counter[int] = Counter()
        for segment in step.segments:
            if segment.inside and segment.phase == FORWARD:
                inside.update(segment.inside.counts())
        if inside:
            counted: Counter[int] = Counter()
            for segment in step.segments:
                self._before[segment] = {module_id: counted[module_id] for module_id in inside}
                counted.update(segment.forward_counts())

    def renumber(self, nth: npt.NDArray[np.int32], module_ids: Ints, segment: Segment, start: int) -> None:
        """Numbers the calls of a segment, whose rows begin at `start`, with those inside of compiled code."""
        before = self._before.get(segment)
        if before is None or segment.phase != FORWARD:
            return
        for index, module_id in enumerate(module_ids[start : start + segment.calls].tolist()):
            if module_id in before:
                nth[start + index] = before[module_id] + segment.rank_of(index)

    def note_origins(self, segment: Segment, origins: Origins) -> None:
        """Remembers which forward calls are repeated by recomputed calls with compiled code inside."""
        if segment.inside:
            self._origins.update((CallRef(segment, index), origin) for index, origin in enumerate(origins))

    def number_inside(self, call: InsideCall) -> int:
        """Returns the `nth` of a call inside of compiled code; -1 if it is not known."""
        if call.segment.phase != FORWARD:
            origin = self._origins.get(call.seen)
            if origin is None:
                return -1
            call = call.in_place_of(origin)
        before = self._before.get(call.segment, {}).get(call.module_id)
        return -1 if before is None or call.place is None else before + call.rank


def call_columns(steps: list[Step], memory: NthMemory, *, with_backward: bool) -> list[Columns]:
    """Returns the rows of ended steps, in one or more batches of columns.

    Args:
        memory: the `nth` of earlier calls, to which those of these steps are added.
        with_backward: whether to include the rows of backward calls, if they were recorded.
    """
    numbered = [(step.number, segment) for step in steps for segment in step.segments if segment.is_closed]
    for step in steps:
        memory.count_inside(step)
    batches = []
    if numbered:
        batches.append(_module_calls(numbered, memory))
    backwards = [
        (step.number, backward) for step in steps for backward in step.backwards if len(backward.calls)
    ]
    if backwards and with_backward:
        batches.append(_backward_calls(backwards, memory))
    return batches


def add_overheads(batches: Iterable[Columns], measuring: Ints | None) -> None:
    """Adds the column `overhead_ns` to rows, given what `intervals_of` returns of their steps."""
    if measuring is not None:
        for columns in batches:
            columns["overhead_ns"] = _overheads(columns, measuring)


def intervals_of(steps: Sequence[Step]) -> Ints | None:
    """Returns `[3, intervals]`: thread, begin and end of each time spent measuring; None if nothing was measured."""
    parts = []
    for measured in (measured for step in steps for measured in step.measured()):
        times = measured.intervals
        begin_end = np.fromiter(times, np.int64, len(times)).reshape(-1, 2).T
        parts.append(np.concatenate([np.full((1, begin_end.shape[1]), measured.thread), begin_end]))
    return np.concatenate(parts, axis=1) if parts else None


def _overheads(columns: Columns, intervals: Ints) -> Ints:
    """Returns the time spent measuring in each call, on its thread; masked where the call's end is not known.

    A call's output is measured after the call has ended, so this time counts for the enclosing call.
    """
    ends = columns["end_ns"]
    overhead = np.zeros(len(ends), np.int64)
    for thread in np.unique(intervals[0]).tolist():
        _, begin, end = intervals[:, intervals[0] == thread]
        order = np.argsort(begin, kind="stable")
        spent = np.concatenate([[0], np.cumsum((end - begin)[order])])
        here = columns["thread"] == thread
        first = np.searchsorted(begin[order], columns["start_ns"][here])
        last = np.searchsorted(begin[order], np.ma.getdata(ends)[here])
        overhead[here] = spent[last] - spent[first]
    masked: Ints = np.ma.masked_array(overhead, np.ma.getmaskarray(ends))
    return masked


def optimizer_columns(steps: list[Step], first_id: int) -> Columns | None:
    """Returns the rows of optimizer steps, which are calls of no module; None if there are none."""
    rows = [(step.number, *optimizer_step) for step in steps for optimizer_step in step.optimizer_steps]
    if not rows:
        return None
    step, start, end, thread = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return {
        "call_id": np.arange(first_id, first_id + len(rows)),
        "step": step,
        "phase": np.full(len(rows), PHASE_CODE[OPTIMIZER], np.int8),
        "thread": thread,
        "start_ns": start,
        "end_ns": end,
    }


def _module_calls(numbered: list[tuple[int | None, Segment]], memory: NthMemory) -> Columns:
    """Returns the rows of all calls that hooks saw, forward and recompute, in one vectorised computation."""
    segments = [segment for _, segment in numbered]
    contexts = np.concatenate([segment.contexts for segment in segments])
    times = np.concatenate([segment.times for segment in segments])
    counts = np.array([segment.calls for segment in segments])
    structure = structure_of(contexts)
    first_ids = np.array([segment.first_id for segment in segments], np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    ids = np.repeat(first_ids - starts, counts) + np.arange(len(structure.parent))
    step = np.repeat(np.array([number for number, _ in numbered], np.int64), counts)
    entered = contexts[structure.enter_event]
    compiled = np.array([context.compiled for context in segments[0].log.all_contexts], bool)
    modules = np.array([context.named.module_id for context in segments[0].log.all_contexts], np.int64)
    module_id = modules[entered]
    phase = np.repeat(np.array([PHASE_CODE[segment.phase] for segment in segments], np.int8), counts)
    # For forward calls: the number of earlier calls of the module in the step.
    nth = np.full(len(step), -1, np.int32)
    forward = np.flatnonzero(phase == PHASE_CODE[FORWARD])
    nth[forward] = count_before(step[forward], module_id[forward])
    for segment, start in zip(segments, starts.tolist(), strict=True):
        memory.renumber(nth, module_id, segment, start)
    exit_code = contexts[structure.exit_event]
    columns: Columns = {
        "call_id": ids,
        "step": step.astype(np.int32),
        "module_id": module_id.astype(np.int32),
        "nth": nth,
        "parent_call_id": np.ma.masked_array(ids[structure.parent], structure.parent < 0),
        "phase": phase,
        "thread": np.repeat(np.array([segment.log.number for segment in segments], np.int32), counts),
        "start_ns": times[structure.enter_event],
        "end_ns": np.ma.masked_array(times[structure.exit_event], exit_code == EXIT_UNSEEN),
        "raised": exit_code == EXIT_RAISED,
        "compiled": compiled[entered],
    }
    if any(segment.chunk is not None for segment in segments):
        _add_chunks(columns, segments, np.repeat(np.arange(len(segments)), counts))
    if any(segment.training is not None for segment in segments):
        columns["training"] = _training_column(segments, module_id, starts.tolist())
    _add_recomputes(columns, segments, starts.tolist(), memory)
    for segment, start in zip(segments, starts.tolist(), strict=True):
        memory[segment] = nth[start : start + segment.calls]
    columns["nth"] = np.ma.masked_array(columns["nth"], columns["nth"] < 0)
    return columns


def count_before(one: Ints, other: Ints) -> npt.NDArray[np.int32]:
    """Returns, for each row, the number of earlier rows with the same two numbers."""
    nth = np.zeros(len(one), np.int32)
    if len(one):
        order = np.lexsort((other, one))  # a stable sort
        changes = (np.diff(one[order]) != 0) | (np.diff(other[order]) != 0)
        first = np.concatenate([[True], changes])
        position = np.arange(len(order))
        nth[order] = position - np.maximum.accumulate(np.where(first, position, 0))
    return nth


def _training_column(segments: Sequence[Segment], module_id: Ints, starts: Sequence[int]) -> Any:
    """Returns the flag `training` of the module of each forward call; masked where it was not read."""
    flags = np.full(len(module_id), -1, np.int8)
    for segment, start in zip(segments, starts, strict=True):
        if segment.training is not None and segment.phase == FORWARD:
            rows = slice(start, start + segment.calls)
            flags[rows] = segment.training.of(module_id[rows])
    return np.ma.masked_array(flags > 0, flags < 0)


def _add_chunks(columns: Columns, segments: Sequence[Segment], which: Ints) -> None:
    """Adds what stages of pipelines run in the calls of some segments; `which` is the segment of each row."""
    chunks = np.array([segment.chunk or (-1, -1) for segment in segments], np.int32)[which]
    for name, column in zip(("stage", "micro_batch"), chunks.T, strict=True):
        columns[name] = np.ma.masked_array(column, column < 0)


def _add_recomputes(columns: Columns, segments: list[Segment], starts: list[int], memory: NthMemory) -> None:
    """Adds, for calls inside a backward, the call that each repeats and the call whose backward requested it."""
    starts_of = dict(zip(segments, starts, strict=True))
    inside = [segment for segment in segments if segment.task >= 0]
    if not inside:
        return
    nth = columns["nth"]
    recompute_of, triggered_by = np.full((2, len(nth)), -1, np.int64)
    for segment, origins in origins_of(inside).items():
        start = starts_of[segment]
        if segment.trigger is not None and segment.trigger.call_id is not None:
            triggered_by[start : start + segment.calls] = segment.trigger.call_id
        if segment.phase == BACKWARD:
            continue
        memory.note_origins(segment, origins)
        for row, origin in enumerate(origins, start):
            if origin is not None and origin.call_id is not None:
                recompute_of[row] = origin.call_id
                here = starts_of.get(origin.segment)
                numbers = memory.get(origin.segment) if here is None else nth[here:]
                nth[row] = -1 if numbers is None else numbers[origin.index]
    columns["recompute_of"] = np.ma.masked_array(recompute_of, recompute_of < 0)
    columns["triggered_by"] = np.ma.masked_array(triggered_by, triggered_by < 0)


def _backward_calls(numbered: list[tuple[int | None, Backward]], memory: NthMemory) -> Columns:
    parts = [_calls_of_backward(number, backward, memory) for number, backward in numbered]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    segments = [segment for _, backward in numbered for segment in backward.calls.segment]
    if any(segment.chunk is not None for segment in segments):
        _add_chunks(columns, segments, np.arange(len(segments)))
    for name in ("nth", "parent_call_id", "forward_call_id"):
        columns[name] = np.ma.masked_array(columns[name], columns[name] < 0)
    return columns


def _calls_of_backward(number: int | None, backward: Backward, memory: NthMemory) -> Columns:
    calls, rows = backward.calls, len(backward.calls)
    forward_id, module_id, nth = _forward_calls(calls, memory)
    above = np.array(calls.above, np.int64)
    outer = (
        backward.outer.first_id + backward.outer_call if backward.outer and backward.outer_call >= 0 else -1
    )
    raised = np.zeros(rows, bool)
    raised[list(backward.raised)] = True
    return {
        "call_id": np.arange(backward.first_id, backward.first_id + rows),
        "step": np.full(rows, number, np.int32),
        "module_id": module_id,
        "nth": nth,
        "parent_call_id": np.where(above < 0, outer, above + backward.first_id),
        "phase": np.full(rows, PHASE_CODE[BACKWARD], np.int8),
        "forward_call_id": forward_id,
        "thread": np.full(rows, backward.log.number, np.int32),
        "start_ns": np.array(calls.start_ns, np.int64),
        "end_ns": np.array(calls.end_ns, np.int64),
        "raised": raised,
    }


def _forward_calls(calls: BackwardCalls, memory: NthMemory) -> tuple[Ints, Ints, Ints]:
    """Returns, for each backward call, the id of its forward, its module and its `nth`; -1 where it is not known."""
    index = np.array(calls.index, np.int64)
    found = np.full((3, len(index)), -1, np.int64)
    keys = np.array([id(segment) for segment in calls.segment])
    for segment in {id(segment): segment for segment in calls.segment}.values():
        rows = keys == id(segment)
        wanted = index[rows]
        if segment.first_id is not None:
            found[0, rows] = segment.first_id + wanted
        contexts = np.asarray(segment.contexts)[segment.structure().enter_event[wanted]]
        found[1, rows] = [segment.log.all_contexts[number].named.module_id for number in contexts.tolist()]
        nth = memory.get(segment)
        if nth is not None:
            found[2, rows] = nth[wanted]
    return found[0], found[1], found[2]


def step_columns(steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the columns of `steps`.

    Call it before the values of the steps are freed, since it reads the overhead there.
    """
    columns = {
        "step": [step.number for step in steps],
        "kind": [step.kind for step in steps],
        "start_ns": [step.start_ns for step in steps],
        "end_ns": [step.end_ns for step in steps],
        "uncleared": [step.uncleared for step in steps],
        "next_start_ns": [step.next_start_ns for step in steps],
        "resident_bytes": [step.resident_bytes for step in steps],
        "device_bytes": [step.device_bytes for step in steps],
    }
    if any(step.values for step in steps):
        columns["overhead_ns"] = [_overhead_ns(step) for step in steps]
    return columns


def _overhead_ns(step: Step) -> int:
    """Returns the time spent measuring between the step's start and end, on all threads."""
    measuring = intervals_of([step])
    if measuring is None:
        return 0
    _, begin, end = measuring
    within = np.minimum(end, step.end_ns) - np.maximum(begin, step.start_ns)
    return int(np.maximum(within, 0).sum())
