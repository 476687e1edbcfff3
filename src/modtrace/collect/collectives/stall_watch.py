"""Notices that no collective advances, as when a rank does not come."""

import threading
import time
from collections.abc import Callable

from ...recording.failure_reporter import start_thread
from ...torch_internals.collectives import read_progress

_LOOK_AFTER_S = 0.5

#: Unless it waits for a collective, the run loses no more than this part of its time to `stalled`.
_MOST_PART = 0.01


class StallWatch:
    """A thread that looks, twice a second, how far the process groups are; it asks no other rank."""

    def __init__(self, looked: Callable[[], None], stalled: Callable[[], None]) -> None:
        """Creates a watch. On its thread it calls `looked` each time, and `stalled` once if nothing has advanced."""
        self._looked = looked
        self._stalled = stalled
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = start_thread(
            self._run,
            "modtrace-collectives",
            without="if this run is killed, nothing tells which rank did not come",
        )

    def stop(self) -> None:
        """Stops the thread, without waiting for its end."""
        self._stopping.set()

    def join(self) -> None:
        """Waits for the end of the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        last, is_told, not_before_s = read_progress(), False, 0.0
        while not self._stopping.wait(_LOOK_AFTER_S):
            self._looked()
            now, now_s = read_progress(), time.monotonic()
            is_waiting = any(issued != completed for _, issued, completed in now)
            if now != last:
                last, is_told = now, False
            elif not is_told and (is_waiting or now_s >= not_before_s):
                is_told = True
                self._stalled()
                took_s = time.monotonic() - now_s
                not_before_s = now_s + took_s / _MOST_PART
