"""Says when ended steps are to be written; a thread writes them when no other step ends."""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError

from ...recording.failure_reporter import start_thread

#: A step's end writes if nothing was written for so long. What else ends is written by the thread, so long after it.
_FLUSH_AFTER_S = 0.1

#: ... or when so many measurements wait: with their rows in the making 1 MB.
_FLUSH_SAMPLES = 2048

#: Whoever waits for the thread looks so often whether it is still there.
_LOOK_AFTER_S = 1.0


class FlushTimer:
    """Runs the thread beside the training, from `start` to `stop`."""

    def __init__(self, flush: Callable[[], None]) -> None:
        """Waits for nothing yet.

        Args:
            flush: writes what waits, and calls `taken`.
        """
        self._flush = flush
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._stopping = False
        self._waiting_since_s: float | None = None  # the end of the first step that waits
        self._taken_s = -math.inf
        self._thread: threading.Thread | None = None
        self._asked: list[tuple[Callable[[], None], Future[None]]] = []

    @property
    def is_due(self) -> bool:
        """Returns whether the last writing is so long ago that the end of a step is to write."""
        return time.monotonic() - self._taken_s >= _FLUSH_AFTER_S

    def start(self) -> None:
        """Starts the thread."""
        self._thread = start_thread(
            self._run, "modtrace-flush", without="steps are written when later ones end, and at the close"
        )

    def tell(self, samples: int) -> None:
        """Notes that steps wait to be written, and how many measurements and ops they have."""
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
            self._wake.set()
        if samples >= _FLUSH_SAMPLES:
            self._hurry.set()

    def taken(self) -> None:
        """Notes that a thread is writing all that waited."""
        self._taken_s = time.monotonic()
        self._waiting_since_s = None
        self._hurry.clear()

    def run(self, write: Callable[[], None]) -> None:
        """Runs a function on the thread and waits for it: Ctrl-C breaks off the waiting, and never the writing.

        The function runs here where there is no thread. The caller may hold no lock that it takes.

        Raises:
            Exception: what the function raises.
        """
        thread = self._thread
        if self._stopping or thread is None or thread is threading.current_thread() or not thread.is_alive():
            write()
            return
        done = Future[None]()
        self._asked.append((write, done))
        self._wake.set()
        self._hurry.set()
        while thread.is_alive() or done.done():
            with contextlib.suppress(TimeoutError):
                return done.result(_LOOK_AFTER_S)

    def stop(self) -> None:
        """Writes nothing more, and waits until the thread has ended."""
        self._stopping = True
        self._wake.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            self._run_what_was_asked()
            self._flush_what_waits()

    def _run_what_was_asked(self) -> None:
        while self._asked:
            write, done = self._asked.pop(0)
            try:
                done.set_result(write())
            except BaseException as error:  # is the caller's, whose stack it would have passed
                done.set_exception(error)

    def _flush_what_waits(self) -> None:
        while not self._stopping and (since_s := self._waiting_since_s) is not None:
            left_s = since_s + _FLUSH_AFTER_S - time.monotonic()
            if left_s > 0 and not self._hurry.wait(left_s):
                continue  # a step's end may have written meanwhile, and others may wait since
            if self._asked:
                self._run_what_was_asked()
                continue
            if not self._stopping:
                self._flush()
