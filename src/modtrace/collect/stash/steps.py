"""Says in which step each stash was made, and as which call of its module there; corrects it when more is known."""

import time
import weakref
from collections.abc import Iterable
from typing import NamedTuple

from ...recording.phase import FORWARD, RECOMPUTE
from ..backward.recompute import Origins, origins_of
from ..backward.watcher import Backward
from ..log.segments import CallRef, Segment
from ..steps.follower import StepFollower
from .stash import Stash

#: Segments with stashes that are followed before it is looked which are settled.
_PRUNE_AT = 32


class _Labelled(NamedTuple):
    """Stashes of one call: weak, for a user may have let go of them."""

    stash: "weakref.ref[Stash]"
    call: CallRef


class StashSteps(StepFollower):
    """Follows the steps; what it has said of stashes it corrects while a backward may still join or divide steps."""

    def __init__(self) -> None:
        super().__init__()
        self._labelled: dict[Segment, list[_Labelled]] = {}
        self._look_at = _PRUNE_AT
        self._running = 0  # outermost backwards, on all threads

    def follow(self, stash: Stash, call: CallRef) -> None:
        """Corrects the stash of a call when more is known."""
        with self._lock:
            self._labelled.setdefault(call.segment, []).append(_Labelled(weakref.ref(stash), call))

    def segment_opened(self, segment: Segment, in_step: bool) -> None:
        super().segment_opened(segment, in_step)
        with self._lock:
            if segment.phase == RECOMPUTE:  # all: one alone does not tell which calls a region repeats
                self._labelled[segment] = []
            if len(self._labelled) > self._look_at:
                self._settle()
                self._look_at = 2 * len(self._labelled) + _PRUNE_AT

    def segment_dropped(self, segment: Segment) -> None:
        super().segment_dropped(segment)
        with self._lock:
            self._labelled.pop(segment, None)

    def backward_began(self, backward: Backward) -> None:
        super().backward_began(backward)
        with self._lock:
            self._running += backward.outer is None

    def backward_ended(self, backward: Backward) -> None:
        super().backward_ended(backward)
        if backward.outer is None:
            with self._lock:
                self._running = max(self._running - 1, 0)  # it may have begun before we listened
                self._settle()

    def finish(self) -> None:
        """Nothing is followed any more: what is said now stays."""
        with self._lock:
            self._finder.finish(time.perf_counter_ns())
            self._finder.take_ended()
            self._settle()
            self._labelled = {}

    def _settle(self) -> None:
        """Says anew what is not final, and lets go of what is. Of recomputes nothing before all of a region ran."""
        for segment in self._labelled:
            self._replace(segment)
        ran = [each for each in self._labelled if each.phase == RECOMPUTE and not self._running]
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
        for each in labelled:
            stash = each.stash()
            original = None if origins is None else origins[each.call.index]
            step, nth = self._count_now(each.call if original is None else original)
            if stash is not None and step is not None:
                stash.step, stash.call = step, nth

    def _count_now(self, call: CallRef) -> tuple[int | None, int | None]:
        """Of a call in a segment that its step has let go of nothing new is known."""
        if call.segment.phase == FORWARD:
            step = self._find(call.segment)
            if step is None or call.segment not in step.segments:
                return None, None
        return self.count(call)

    def _is_final(self, segment: Segment) -> bool:
        """Whether no backward can change the step of a segment any more."""
        if not segment.is_closed:
            return False
        step = self._find(segment)
        return step is None or (step.number is not None and not step.is_open)
