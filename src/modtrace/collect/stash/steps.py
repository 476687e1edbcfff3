"""Gives each stash its step and call index, and corrects both when more is known."""

import time
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...recording.phase import FORWARD, RECOMPUTE
from ..backward.recompute_origins import Origins, origins_of
from ..log.segments import CallRef, InsideCall, Segment
from ..log.thread_log import Backward
from ..steps.follower import StepFollower
from .stash import Stash

#: At this number of segments with stashes, the ones with final labels are dropped.
_PRUNE_AT = 32


class _Labelled(NamedTuple):
    """A stash of one call, by a weak reference because users may delete stashes."""

    stash: "weakref.ref[Stash]"
    call: CallRef | InsideCall


class StashSteps(StepFollower):
    """Follows the steps, and corrects the labels of stashes while backwards may still join or divide steps."""

    def __init__(self, is_backward_running: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._is_backward_running = is_backward_running  # returns whether one runs on any thread
        self._labelled: dict[Segment, list[_Labelled]] = {}
        self._look_at = _PRUNE_AT

    def follow(self, stash: Stash, call: CallRef | InsideCall) -> None:
        """Registers a stash for later corrections."""
        with self._lock:
            self._labelled.setdefault(call.segment, []).append(_Labelled(weakref.ref(stash), call))

    def segment_opened(self, segment: Segment, in_step: bool) -> None:
        super().segment_opened(segment, in_step)
        with self._lock:
            if segment.phase == RECOMPUTE:  # needed without stashes, too: regions match as a whole
                self._labelled[segment] = []
            if len(self._labelled) > self._look_at:
                self._settle()
                self._look_at = 2 * len(self._labelled) + _PRUNE_AT

    def segment_dropped(self, segment: Segment) -> None:
        super().segment_dropped(segment)
        with self._lock:
            self._labelled.pop(segment, None)

    def backward_ended(self, backward: Backward) -> None:
        super().backward_ended(backward)
        if backward.outer is None:
            with self._lock:
                self._settle()

    def stop(self) -> None:
        """Stops following steps, and makes all labels final."""
        super().stop()
        with self._lock:
            self._finder.finish(time.perf_counter_ns())
            self._finder.take_ended()
            self._settle()
            self._labelled = {}

    def _settle(self) -> None:
        """Updates the labels, and forgets stashes whose labels are final.

        Recomputes are labelled once their whole region has run.
        """
        for segment in self._labelled:
            self._replace(segment)
        have_run = not self._is_backward_running()
        ran = [segment for segment in self._labelled if segment.phase == RECOMPUTE and have_run]
        origins = origins_of(ran)
        for segment, labelled in self._labelled.items():
            if segment.phase != RECOMPUTE or segment in origins:
                self._label(labelled, origins.get(segment))
        self._labelled = {
            segment: labelled
            for segment, labelled in self._labelled.items()
            if not (segment in origins if segment.phase == RECOMPUTE else self._is_final(segment))
        }

    def _label(self, labelled: Iterable[_Labelled], origins: Origins | None) -> None:
        for entry in labelled:
            stash = entry.stash()
            call = entry.call
            repeated = None if origins is None else origins[call.index]
            step, nth = self._count_now(call if repeated is None else call.in_place_of(repeated))
            if stash is not None and step is not None:
                stash.step, stash.call = step, nth

    def _count_now(self, call: CallRef | InsideCall) -> tuple[int | None, int | None]:
        """Counts the call, unless its step has forgotten its segment, so that the old label stays."""
        if call.segment.phase == FORWARD:
            step = self._find(call.segment)
            if step is None or call.segment not in step.segments:
                return None, None
        return self.count(call)

    def _is_final(self, segment: Segment) -> bool:
        """Returns whether no backward can change the segment's step any more."""
        if not segment.is_closed:
            return False
        step = self._find(segment)
        return step is None or (step.number is not None and not step.is_open)
