"""Records what a loop does outside of modules: its backwards, its waits for data loaders, and our own writing."""

from collections import deque
from collections.abc import Sequence
from types import NoneType
from typing import Any

import numpy as np

from ...recording.protocols import Sink
from ...torch_internals.data_loaders import unwatch_loaders, watch_loaders
from ..log.listeners import Subscribers
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

        What began before the step is of the step before, if there is one.
        """
        if self._step is not None:
            self._place(step.start_ns)
        self._step, self._is_recorded = step.number, is_recorded
        self._place(until_ns)

    def _place(self, until_ns: float) -> None:
        for _ in range(len(self._waiting)):
            interval = self._waiting.popleft()
            if interval[0] >= until_ns:
                self._waiting.append(interval)
            elif self._is_recorded and self._step is not None:
                self._placed.append((self._step, interval))

    def write(self, steps: Sequence[Step]) -> None:
        """Writes the intervals of ended steps, and later ones of earlier steps; after `stop()` all.

        Call it before the values of the steps are freed, since it reads the overhead there.
        """
        if self._logs is None:
            self._place(float("inf"))
        rows: list[tuple[int | None, _Interval]] = [
            (step.number, (backward.start_ns, backward.end_ns, backward.log.number, BACKWARD, NoneType, 0))
            for step in steps
            for backward in step.backwards
            if backward.outer is None
        ]
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
            add_overheads([columns], [*steps])
            self._sink.write("intervals", columns)


def _name(of: type, workers: int) -> str | None:
    if of is NoneType:
        return None
    return f"{of.__name__}, {workers} workers" if workers else of.__name__
