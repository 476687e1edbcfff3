"""A listener that keeps every segment and backward, for tests that ask the tracker directly."""

from contextlib import contextmanager

from modtrace.collect.log.listeners import Listener
from modtrace.collect.scopes import process


class Keeper(Listener):
    """Hears everything, keeps it, decides nothing."""

    def __init__(self, events: bool = False, additions: bool = False) -> None:
        self.wants_backward_events = events
        self.wants_additions = additions
        self.segments = []
        self.backwards = []
        self.optimizer_steps = []
        self.failures = []

    def segment_opened(self, segment, in_step):
        segment.holders += 1
        self.segments.append(segment)

    def segment_dropped(self, segment):
        self.segments.remove(segment)

    def backward_ended(self, backward):
        self.backwards.append(backward)

    def optimizer_began(self, start_ns):
        pass

    def optimizer_ended(self, start_ns, end_ns, thread):
        self.optimizer_steps.append((start_ns, end_ns, thread))

    def failed(self, error, where):
        self.failures.append((error, where))


@contextmanager
def tracking(*roots, events: bool = False, additions: bool = False):
    """The process's tracker with everything kept: `tracker.kept`, `tracker.keeper`."""
    keeper = Keeper(events, additions)
    tracker = process.acquire(keeper, strict=True)
    tracker.keeper, tracker.kept = keeper, keeper.segments
    for root in roots:
        tracker.names.add_root(root)
    try:
        yield tracker
    finally:
        process.release(keeper)
