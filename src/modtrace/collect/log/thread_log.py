"""What one thread is in the middle of."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...torch_internals import call_kwargs, sequence_nr
from .call_context import Place
from .segments import BackwardSpan, CallRef, Segment

if TYPE_CHECKING:
    from ..backward.backward_call import Heard
    from ..backward.watcher import Backward

#: Segments and spans that nothing holds are kept this long, for graphs that no output leads to (a stashed loss).
_UNWATCHED_KEPT = 16

#: Where code runs whose modules are not followed; see `ThreadLog.aside`.
ASIDE = Place(None, None, -1)


class ThreadLog:
    """What one thread is in the middle of, and the segments whose graphs may still run backward."""

    __slots__ = (
        "all_places", "backward", "forgotten_seq", "given_kwargs", "hooked", "hooked_task", "life", "number", "outside",
        "pinned", "place", "places", "prune_at", "scopes", "segment", "seqs", "spans", "suspended", "task", "times",
    )  # fmt: skip

    def __init__(
        self, places: list[Place], outside: Place, number: int, life: "weakref.ref[ThreadLife]"
    ) -> None:
        self.all_places = places  # the tracker's, by number
        self.outside = outside
        self.number = number
        self.life = life
        self.place = outside
        self.task = -1
        self.segment: Segment | None = None
        self.seqs: list[int] = []
        self.places: list[int] = []
        self.times: list[int] = []
        self.suspended: list[tuple[Place, int, Segment]] = []
        self.spans: list[Segment | BackwardSpan] = []  # by first_seq
        self.prune_at = 2 * _UNWATCHED_KEPT
        self.forgotten_seq = sequence_nr()  # of nodes with smaller numbers it may not be known whose they are
        self.backward: Backward | None = None
        self.hooked: Heard | None = None  # for whom a user's backward hook runs ...
        self.hooked_task = -1  # ... and in which graph task
        self.given_kwargs: dict[str, Any] | None = None  # of a call that is being opened without a hook
        self.pinned: list[Place] = []  # of the calls that were opened without a hook
        self.scopes: list[Place] = []  # scopes that stand outside of any module, outermost first

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, modules run on this thread that are nothing of the run's: no call of theirs is noted."""
        place, self.place = self.place, ASIDE
        try:
            yield
        finally:
            self.place = place

    @property
    def is_in_stretch(self) -> bool:
        """Whether named code runs directly that no module is around."""
        return bool(self.scopes) and self.place is self.scopes[-1]

    @property
    def is_in_module(self) -> bool:
        """Whether more runs on the thread than code that the user has named."""
        return self.segment is not None and not self.segment.is_stretch

    def kwargs_of(self, call_frame: FrameType) -> dict[str, Any]:
        """The keyword arguments of the call that begins; in this frame torch runs its hooks."""
        return call_kwargs(call_frame) or {} if self.given_kwargs is None else self.given_kwargs

    def push(self, segment: Segment) -> None:
        """Makes a new segment the one that the hooks append to."""
        if self.segment is not None:
            self.suspended.append((self.place, self.task, self.segment))
        self._use(segment, segment.place, segment.task)

    def pop(self) -> None:
        """Goes back to the segment that the last one interrupted, if it did."""
        if self.suspended:
            place, task, segment = self.suspended.pop()
            self._use(segment, place, task)
        else:
            self.place, self.task, self.segment = self.outside, -1, None

    def _use(self, segment: Segment, place: Place, task: int) -> None:
        self.segment, self.place, self.task = segment, place, task
        self.seqs, self.places, self.times = segment.seqs, segment.places, segment.times

    def span_of(self, sequence: int) -> Segment | BackwardSpan | None:
        """The innermost span in which this thread made the node of that number."""
        spans = self.spans
        for at in range(len(spans) - 1, -1, -1):
            if spans[at].first_seq <= sequence:
                span: Any = spans[at]
                while span is not None and span.last_seq is not None and sequence >= span.last_seq:
                    span = span.outer
                return span  # type: ignore[no-any-return]
        return None

    def call_of(self, sequence: int) -> CallRef | None:
        """The call in which this thread made the node of that number."""
        span = self.span_of(sequence)
        return None if span is None else span.call_at(sequence)

    def is_needed(self) -> bool:
        """Whether its thread lives, or what it built may yet run backward."""
        return self.life() is not None or any(span.is_needed() for span in self.spans)

    def prune(self) -> None:
        """Lets go of the spans whose graphs are dead."""
        spans = self.spans
        if len(spans) > self.prune_at:
            kept_anyway = len(spans) - _UNWATCHED_KEPT
            kept: list[Segment | BackwardSpan] = []
            for at, span in enumerate(spans):
                if at >= kept_anyway or span.is_needed():
                    kept.append(span)
                else:
                    self.forgotten_seq = max(self.forgotten_seq, span.last_seq or 0)
            self.spans = kept
            self.prune_at = 2 * len(self.spans)  # so that looking through them costs each but little


class ThreadLife:
    """Held by a thread, so it ends with it."""

    __slots__ = ("__weakref__",)
