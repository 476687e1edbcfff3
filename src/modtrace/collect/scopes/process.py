"""Holds the one tracker of the process, which all recorders share."""

import os
import threading

from ...torch_internals.graph_captures import graph_captures
from ..log.listeners import Listener
from .tracker import ScopeTracker

_current: ScopeTracker | None = None
_current_lock = threading.RLock()
_fork_handler_registered = False


def acquire(user: Listener, *, strict: bool = False) -> ScopeTracker:
    """Returns the process's tracker, with `user` as a listener. The first user starts it.

    Args:
        user: the listener, for whom the tracker runs until `release(user)`.
        strict: whether to raise internal errors.
    """
    global _current, _fork_handler_registered
    with _current_lock:
        if not _fork_handler_registered and hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=_leave_to_parent)
            _fork_handler_registered = True
        while True:
            tracker = current()
            if tracker is None:
                tracker = ScopeTracker()
                tracker.start()
                _current = tracker
            if tracker.subscribers.add_user(user, strict=strict):
                return tracker


def release(user: Listener) -> None:
    """Removes a user. When the last one leaves, every hook is removed and the process has no tracker."""
    global _current
    with _current_lock:
        tracker = _current = current()
        if tracker is None or user not in tracker.subscribers.users:
            return
        subscribers = tracker.subscribers
        if len(subscribers.users) == 1:
            tracker.stop()
            _current = None
        del subscribers.users[user]
        subscribers.remove(user)


def current() -> ScopeTracker | None:
    """Returns the process's tracker; None if nothing records, or if the tracker has failed."""
    tracker = _current
    return None if tracker is None or tracker.subscribers.has_failed else tracker


def _leave_to_parent() -> None:
    """Ends the tracking in a forked child, such as a DataLoader's worker, since the recording is the parent's."""
    global _current
    graph_captures.abandon()
    tracker, _current = current(), None
    if tracker is None:
        return
    for forked in tracker.subscribers.forked:
        forked()
    tracker.subscribers.clear()
    tracker.remove_hooks()
