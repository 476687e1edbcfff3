"""The one tracker of the process, which all recorders share."""

import os
import threading

from ..log.listeners import Listener
from .tracker import ScopeTracker

_current: ScopeTracker | None = None
_current_lock = threading.RLock()
_fork_handler_registered = False


def acquire(listener: Listener, *, strict: bool = False) -> ScopeTracker:
    """Adds a listener to the process's tracker, which the first one starts."""
    global _current, _fork_handler_registered
    with _current_lock:
        if not _fork_handler_registered and hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=_leave_to_parent)
            _fork_handler_registered = True
        tracker = current()
        if tracker is None:
            tracker = ScopeTracker()
            tracker.start()
            _current = tracker
        tracker.subscribers.listeners.append(listener)
        if strict:
            tracker.subscribers.strict_for.append(listener)
        _tell_wishes(tracker)
        return tracker


def release(listener: Listener) -> None:
    """Takes a listener off; with the last one everything is put back as it was."""
    global _current
    with _current_lock:
        tracker = _current = current()
        if tracker is None or listener not in tracker.subscribers.listeners:
            return
        subscribers = tracker.subscribers
        if len(subscribers.listeners) == 1:
            tracker.stop()
        subscribers.listeners.remove(listener)
        subscribers.strict_for = [each for each in subscribers.strict_for if each is not listener]
        _tell_wishes(tracker)
        if not subscribers.listeners:
            _current = None


def _tell_wishes(tracker: ScopeTracker) -> None:
    listeners = tracker.subscribers.listeners
    tracker.backwards.events_wanted = any(each.wants_backward_events for each in listeners)
    tracker.backwards.additions_wanted = any(each.wants_additions for each in listeners)


def current() -> ScopeTracker | None:
    """Returns the process's tracker, None while nobody records; one that has failed is nobody's any more."""
    tracker = _current
    return None if tracker is None or tracker.has_failed else tracker


def _leave_to_parent() -> None:
    """In a forked child (a DataLoader's worker): the recording is the parent's."""
    global _current
    tracker, _current = current(), None
    if tracker is None:
        return
    for listener in tracker.subscribers.listeners:
        listener.forked()
    tracker.subscribers.listeners = []
    tracker.remove_hooks()
