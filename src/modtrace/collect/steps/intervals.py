"""Records what a loop does outside of modules: its backwards, its waits for data loaders, and our own writing."""

from collections import deque
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any

import numpy as np

from ...recording.protocols import Sink
from ...torch_internals.data_loaders import unwatch_loaders, watch_loaders
from ..log.listeners import Subscribers
from ..log.nesting import Ints
from ..log.thread_log import ThreadLogs
from .call_rows import Columns, add_overheads
from .step import Step

BACKWARD, DATA, WRITING = "backward", "data", "writing"

#: The most intervals that wait for the end of their step, which may never come; they take some 10 MB.
_MOST_WAITING = 2**16


#: When it began and ended, its thread, its kind, and of a wait the class of the dataset and how many workers there are.
_Interval = tuple[int, int, int, str, type, int]


class IntervalRecorder:
    """Records the rows of `intervals`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._logs: ThreadLogs | None = None  # set while it records
        self._subscribers: Subscribers | None = None
        #: Threads append to it without a lock, so that only `popleft` removes anything.
        self._waiting: deque[_Interval] = deque(maxlen=_MOST_WAITING)
        self._placed: deque[tuple[int, _Interval]] = deque()  # with their steps; not written yet
        self._step: int | None = None  # the last step that has ended ...
        self._is_recorded = False  # ... and whether its rows are written

    def start(self, logs: ThreadLogs, subscribers: Subscribers) -> None:
        """Starts recording."""
        self._logs, self._subscribers = logs, subscribers
        watch_loaders(self._note_wait)

    def stop(self) -> None:
        """Stops recording, also in a forked child."""
        unwatch_loaders(self._note_wait)
        self._logs = self._subscribers = None

    def _note_wait(self, dataset: Any, workers: int, start_ns: int, end_ns: int) -> None:
        try:
            self._note(DATA, start_ns, end_ns, type(dataset), workers)
        except Exception as error:
            if self._subscribers is not None:
                self._subscribers.fail(error, None)

    def note_writing(self, start_ns: int, end_ns: int) -> None:
        """Notes that rows were written on this thread, or that it waited for them to be written."""
        self._note(WRITING, start_ns, end_ns)

    def _note(self, kind: str, start_ns: int, end_ns: int, of: type = NoneType, workers: int = 0) -> None:
        logs = self._logs
        if logs is not None:
            self._waiting.append((start_ns, end_ns, logs.current.number, kind, of, workers))

    def settle(self, step: Step, *, is_recorded: bool, until_ns: float) -> None:
        """Assigns what began before `until_ns`, the beginning of the next step, to the step that has just ended.

        What began before the step is of the step before, if there is one. A wait that goes on into the next step, whose
        first calls are those of a module in the data loader, becomes two.
        """
        if self._step is not None:
            self._place(step.start_ns)
        self._step, self._is_recorded = step.number, is_recorded
        self._place(until_ns)

    def _place(self, until_ns: float) -> None:
        for _ in range(len(self._waiting)):
            interval = self._waiting.popleft()
            (start_ns, end_ns), facts = interval[:2], interval[2:]
            if end_ns > until_ns:
                self._waiting.append((max(start_ns, int(until_ns)), end_ns, *facts))
            if start_ns < until_ns and self._is_recorded and self._step is not None:
                self._placed.append((self._step, (start_ns, int(min(end_ns, until_ns)), *facts)))

    def write(self, steps: Sequence[Step], measuring: Ints | None) -> None:
        """Writes the intervals of ended steps, and later ones of earlier steps; after `stop()` all.

        `measuring` is what `intervals_of` returns of the steps.
        """
        if self._logs is None:
            self._place(float("inf"))
        rows: list[tuple[int | None, _Interval]] = [
            (step.number, (backward.start_ns, backward.end_ns, backward.log.number, BACKWARD, NoneType, 0))
            for step in steps
            for backward in step.backwards
            if backward.outer is None
        ]
        if measuring is not None:
            rows += _measured_between(steps, measuring)
        last = steps[-1].number if steps else self._step
        for _ in range(len(self._placed)):
            number, interval = self._placed.popleft()
            if last is not None and number > last:
                self._placed.append((number, interval))
            else:
                rows.append((number, interval))
        if rows:
            columns: Columns = {"step": [step for step, _ in rows]}
            columns["kind"] = [interval[3] for _, interval in rows]
            columns["name"] = [_name(*interval[4:]) for _, interval in rows]
            numbers = np.array([interval[:3] for _, interval in rows], np.int64).T
            columns |= zip(("start_ns", "end_ns", "thread"), numbers.copy(), strict=True)
            add_overheads([columns], measuring)
            self._sink.write("intervals", columns)


def _measured_between(steps: Sequence[Step], measuring: Ints) -> Iterator[tuple[int | None, _Interval]]:
    """Yields what was measured behind the end of a step and before the next one, as after an optimizer."""
    starts = np.array([step.start_ns for step in steps], np.int64)
    ends = np.array([step.end_ns for step in steps], np.int64)
    at = np.searchsorted(starts, measuring[1], side="right") - 1
    for row in np.flatnonzero((at >= 0) & (measuring[1] >= ends[at])) if len(steps) else ():
        thread, start_ns, end_ns = measuring[:, row].tolist()
        yield steps[at[row]].number, (start_ns, end_ns, thread, WRITING, NoneType, 0)


def _name(of: type, workers: int) -> str | None:
    if of is NoneType:
        return None
    return f"{of.__name__}, {workers} workers" if workers else of.__name__
