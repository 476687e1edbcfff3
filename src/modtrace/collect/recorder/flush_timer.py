"""Decides when ended steps are written; a thread writes them if no other step ends in time."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from ...recording.failure_reporter import start_thread

#: A step that ends writes if nothing was written for this long; otherwise the thread writes after this time. What is
#: written to disk survives the process; a recording in memory does not, so there steps wait longer and are written
#: together.
FLUSH_TO_DISK_S, FLUSH_TO_MEMORY_S = 0.1, 1.0

#: The number of waiting measurements at which steps are written at once; with unfinished rows they take 4 MB. Writing
#: has a price for each time it is done, of some 8 ms with ops: four times as many cost 2 us an op less.
_FLUSH_SAMPLES = 8192

#: The interval at which a caller that waits for the thread checks that it is alive.
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
            flush: writes the waiting steps, and calls `taken`.
            after_s: how long steps may wait.
            locks: the locks that functions passed to `run` acquire.
        """
        self._after_s = after_s
        self._locks = locks
        self._flush = flush
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._stopping = False
        self._waiting_since_s: float | None = None  # when the first waiting step ended; None if none waits
        self._taken_s = -math.inf
        self._thread: threading.Thread | None = None
        self._asked: list[tuple[Callable[[], None], Future[None]]] = []

    @property
    def is_due(self) -> bool:
        """True if the last write was so long ago that the next step must be written as soon as it ends."""
        return time.monotonic() - self._taken_s >= self._after_s

    @property
    def has_thread(self) -> bool:
        """False if no thread could be started, so that only the ends of steps write."""
        return self._thread is not None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = start_thread(
            self._run, "modtrace-flush", without="steps are written when later ones end, and at the close"
        )

    def count_waiting(self, samples: int) -> None:
        """Records that steps wait to be written, with their number of measurements and ops."""
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
            self._wake.set()
        if samples >= _FLUSH_SAMPLES:
            self._hurry.set()

    def taken(self) -> None:
        """Records that everything that waited is being written."""
        self._taken_s = time.monotonic()
        self._waiting_since_s = None
        self._hurry.clear()

    def run(self, write: Callable[[], None]) -> None:
        """Runs a function on the thread and waits for it. Ctrl-C interrupts the wait, never the function.

        It runs on the caller's thread if there is no other, or if no signal can interrupt the caller's.

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
            return True  # Python runs signal handlers only on the main thread
        # A handler may call `rec.dump()` while we hold a lock, for which the thread would wait forever. RLock tells its
        # owner only by a method that threading.Condition also calls (CPython 3.10 to 3.14).
        return any(lock._is_owned() for lock in self._locks)  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Stops the thread, and waits for its end."""
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
            except BaseException as error:  # raised again by the caller
                done.set_exception(error)

    def _flush_what_waits(self) -> None:
        while not self._stopping and (since_s := self._waiting_since_s) is not None:
            left_s = since_s + self._after_s - time.monotonic()
            if left_s > 0 and not self._hurry.wait(left_s):
                continue  # a step's end may have written meanwhile, and other steps may wait
            if self._asked:
                self._run_what_was_asked()
                continue
            if not self._stopping:
                self._flush()
