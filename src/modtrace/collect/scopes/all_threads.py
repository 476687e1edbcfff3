"""Reads what runs on every thread, from any thread and without a lock: the thread in question may hang."""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from ...recording.phase import BACKWARD, OPTIMIZER
from ...torch_internals.call_frames import is_in_optimizer_step
from ..log.call_context import CallContext
from ..log.segments import Segment
from ..log.thread_log import Backward, ThreadLog
from .tracker import ScopeTracker


class RunningWork(NamedTuple):
    """A call, a backward or an optimizer's step that has begun and not ended."""

    thread: (
        int | None
    )  # the number of the thread, in the order in which they called modules; None for an optimizer
    phase: str
    path: str | None  # the module's path, or the name of a root; None for a backward or an optimizer's step
    since_ns: int  # when it began
    changed_ns: int  # when the newest call on its thread began or ended


def list_running(tracker: ScopeTracker) -> list[RunningWork]:
    """Returns what runs now, thread by thread, outermost first.

    The calls in a backward are known where their events are recorded, as with `backward_times` or `ops`.
    """
    running = [found for log in [*tracker.logs.all] for found in _of_thread(log)]
    frames = sys._current_frames()
    for thread, starts in [*tracker.optimizers.starts.items()]:
        for start_ns in [*starts]:
            if is_in_optimizer_step(frames.get(thread)):  # else it raised, and no hook ran
                running.append(RunningWork(None, OPTIMIZER, None, start_ns, start_ns))
    return running


def _of_thread(log: ThreadLog) -> Iterator[RunningWork]:
    segments = [*(segment for _, _, segment in [*log.suspended]), log.segment]
    open_ones = [segment for segment in segments if segment is not None]
    yield from (call for segment in open_ones if segment.task < 0 for call in _of_segment(log, segment))
    nested, backward = list[Backward](), log.backward
    while backward is not None:
        nested.append(backward)
        backward = backward.outer_of_thread
    yield from (call for one in reversed(nested) for call in _of_backward(log, one))
    yield from (call for segment in open_ones if segment.task >= 0 for call in _of_segment(log, segment))


def _of_segment(log: ThreadLog, segment: Segment) -> Iterator[RunningWork]:
    events = list(zip([*segment.contexts], [*segment.times], strict=False))  # the last may lack its time
    calls: list[tuple[int, int]] = []
    for context, time_ns in events:
        if context >= 0:
            calls.append((context, time_ns))
        elif calls:
            calls.pop()
    for context, time_ns in calls:
        path = _path_of(log.all_contexts[context])
        yield RunningWork(log.number, segment.phase, path, int(time_ns), int(events[-1][1]))


def _of_backward(log: ThreadLog, backward: Backward) -> Iterator[RunningWork]:
    calls = backward.calls
    rows = sorted(calls.open)
    newest_ns = max([backward.start_ns, *calls.start_ns[-1:]])
    yield RunningWork(log.number, BACKWARD, None, backward.start_ns, newest_ns)
    for row in rows:
        segment = calls.segment[row]
        path = _path_of(segment.context_of(calls.index[row]))
        yield RunningWork(log.number, BACKWARD, path, calls.start_ns[row], newest_ns)


def _path_of(context: CallContext) -> str:
    assert context.named is not None
    return context.path or context.named.shown
