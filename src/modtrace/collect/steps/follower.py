"""Counts calls: the step in which a call runs, and its index among the calls of its module in that step."""

import threading
import time
from collections.abc import Callable, Iterable

from ...recording.phase import FORWARD
from ..backward.recompute import original_of
from ..log.listeners import Listener, Subscribers
from ..log.segments import CallRef, InsideCall, Segment
from ..log.thread_log import Backward
from .step import Step
from .step_rules import StepFinder

#: The largest number of outermost calls of one step that are kept one by one.
_FOLD_AT = 16

#: When this many outermost calls have known steps, those that are no longer needed are dropped.
_PRUNE_AT = 48


class StepFollower(Listener):
    """Follows the steps of a run, and knows the step of each call whose graph is alive."""

    def __init__(self) -> None:
        self._subscribers: Subscribers | None = None  # set once it is started
        self._finder = StepFinder()
        self._steps: dict[Segment, Step] = {}
        self._prune_at = _PRUNE_AT
        self._lock = threading.RLock()
        self._last: tuple[CallRef | InsideCall, tuple[int | None, int | None]] | None = None

    def start(self, subscribers: Subscribers, running: Callable[[], Iterable[Segment]]) -> None:
        """Follows the steps from now on.

        Segments that run already, because another user has started the tracker, are included.

        Args:
            running: returns the running segments. It is called after subscribing, so a segment that another thread
                opens in between is reported twice.
        """
        self._subscribers = subscribers
        subscribers.add(self)
        for segment in running():
            with self._lock:
                if segment not in self._steps:
                    self.segment_opened(segment, in_step=segment.task >= 0)

    def stop(self) -> None:
        """Stops following steps."""
        if self._subscribers is not None:
            self._subscribers.remove(self)

    def segment_opened(self, segment: Segment, in_step: bool) -> None:
        with self._lock:
            step = self._steps[segment] = self._finder.enter(segment, in_step, time.perf_counter_ns())
            self._finder.leave(segment)  # the step of calls inside it is not needed
            self._finder.take_ended()
            if len(step.segments) > _FOLD_AT:
                step.fold()
            if len(self._steps) > self._prune_at:
                self._steps = {
                    kept: its_step
                    for kept, its_step in self._steps.items()
                    if (its_step.is_open and kept in its_step.segments)
                    or not kept.is_closed
                    or kept.has_graph()
                }
                self._prune_at = len(self._steps) + _PRUNE_AT

    def segment_dropped(self, segment: Segment) -> None:
        with self._lock:
            self._steps.pop(segment, None)
            self._finder.drop(segment)

    def backward_began(self, backward: Backward) -> None:
        with self._lock:
            self._finder.backward_began(backward)
            self._last = None  # steps may have been joined or divided

    def backward_ended(self, backward: Backward) -> None:
        with self._lock:
            step = self._finder.backward_ended(backward)
            step.backwards.clear()  # no rows are made from them
            for segment in backward.reached:  # their steps may have been joined or divided
                self._replace(segment)

    def optimizer_began(self, start_ns: int) -> None:
        with self._lock:
            self._finder.optimizer_began(start_ns)

    def optimizer_ended(self, start_ns: int, end_ns: int, thread: int) -> None:
        with self._lock:
            self._finder.optimizer_ended(start_ns, end_ns, thread).optimizer_steps.clear()

    def count(self, call: CallRef | InsideCall) -> tuple[int | None, int | None]:
        """Returns the step of a call, and the number of calls of its module before it in the step; None if not known.

        A recomputed call has the numbers of the call that it repeats.
        """
        original: CallRef | InsideCall = call
        if call.segment.phase != FORWARD:
            repeated = original_of(CallRef(call.segment, call.index))
            if repeated is None:
                return None, None
            original = call.in_place_of(repeated)
        with self._lock:
            if self._last is not None and self._last[0] == original:
                return self._last[1]
            found = self._count(original)
            self._last = (original, found)
            return found

    def _count(self, call: CallRef | InsideCall) -> tuple[int | None, int | None]:
        step = self._find(call.segment)
        if step is None:
            return None, None
        key = call.counted_as
        before = step.folded[key]
        for segment in step.segments:
            if segment is call.segment:
                break
            before += segment.forward_counts()[key]
        return self._finder.number_of(step), before + call.rank

    def _find(self, segment: Segment) -> Step | None:
        step = self._steps.get(segment)
        if step is not None and segment not in step.segments:
            self._replace(segment)
            step = self._steps.get(segment)
        return step

    def _replace(self, segment: Segment) -> None:
        self._last = None
        found = self._finder.step_of(segment)
        if found is not None:
            self._steps[segment] = found
