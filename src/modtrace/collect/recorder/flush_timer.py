"""Decides when ended steps are written. A thread writes them if no other step ends."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from ...recording.failure_reporter import start_thread

#: The end of a step writes if nothing was written for this long. Otherwise the thread writes, this long after it. What
#: is written survives the process. Rows in memory do not: there steps wait for longer, and are written together.
FLUSH_TO_DISK_S, FLUSH_TO_MEMORY_S = 0.1, 1.0

#: ... or when this many measurements wait; they and their unfinished rows take 1 MB.
_FLUSH_SAMPLES = 2048

#: A caller that waits for the thread checks at this interval that it is still alive.
_LOOK_AFTER_S = 1.0


class FlushTimer:
    """A thread that writes ended steps, from `start` to `stop`."""

    def __init__(
        self,
        flush: Callable[[], None],
        *,
        after_s: float = FLUSH_TO_DISK_S,
        locks: Sequence[threading.RLock] = (),
    ) -> None:
        """Creates a timer, which does not run yet.

        Args:
            flush: writes the steps that wait, and calls `taken`.
            after_s: how long steps wait.
            locks: the locks that functions passed to `run` acquire.
        """
        self._after_s = after_s
        self._locks = locks
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
        """True if the last write was so long ago that the next step that ends must be written at once."""
        return time.monotonic() - self._taken_s >= self._after_s

    @property
    def has_thread(self) -> bool:
        """False if the system had none: then only the end of a step writes."""
        return self._thread is not None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = start_thread(
            self._run, "modtrace-flush", without="steps are written when later ones end, and at the close"
        )

    def count_waiting(self, samples: int) -> None:
        """Records that steps wait to be written, with the number of their measurements and ops."""
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
            self._wake.set()
        if samples >= _FLUSH_SAMPLES:
            self._hurry.set()

    def taken(self) -> None:
        """Records that a thread is writing all that waited."""
        self._taken_s = time.monotonic()
        self._waiting_since_s = None
        self._hurry.clear()

    def run(self, write: Callable[[], None]) -> None:
        """Runs a function on the thread and waits for it. Ctrl-C interrupts the wait, never the function.

        It runs on the caller's thread if the timer has none, or if no signal can interrupt that one.

        Raises:
            Exception: what the function raises.
        """
        thread = self._thread
        if self._stopping or thread is None or self._must_run_here():
            write()
            return
        done = Future[None]()
        self._asked.append((write, done))
        self._hurry.set()
        self._wake.set()
        while thread.is_alive() and not done.done():
            wait([done], timeout=_LOOK_AFTER_S)
        if done.done():
            done.result()
        else:
            write()

    def _must_run_here(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return True  # Python runs the handlers of signals on the main thread alone
        # A handler may call `rec.dump()` while we hold a lock, for which the thread would wait for ever. RLock shows
        # who holds it by a method that threading.Condition calls too (CPython 3.10 to 3.14).
        return any(lock._is_owned() for lock in self._locks)  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Stops the thread, and waits until it has ended."""
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
        if self._asked:
            self._hurry.clear()
        while self._asked:
            write, done = self._asked.pop(0)
            try:
                done.set_result(write())
            except BaseException as error:  # the caller raises it, as if it had run the function
                done.set_exception(error)

    def _flush_what_waits(self) -> None:
        while not self._stopping and (since_s := self._waiting_since_s) is not None:
            left_s = since_s + self._after_s - time.monotonic()
            if left_s > 0 and not self._hurry.wait(left_s):
                continue  # a step's end may have written meanwhile, and others may wait since
            if self._asked:
                self._run_what_was_asked()
                continue
            if not self._stopping:
                self._flush()
