"""The thread beside the training that has ended steps written when no further step comes to an end."""

import threading
from collections.abc import Callable

#: Rows of ended steps go to the sink this long after the first of them ended, or with the next step's end.
_FLUSH_AFTER_S = 0.2

#: ... or when so many measurements wait: with their rows in the making 1 MB.
_FLUSH_SAMPLES = 2048


class FlushTimer:
    """Writes what waits a moment after it was told of it, from `start` to `stop`."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to wait, on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="modtrace-flush", daemon=True)
        self._thread.start()

    def tell(self, samples: int) -> None:
        """Steps wait to be written, with so many measurements and ops."""
        self._wake.set()
        if samples >= _FLUSH_SAMPLES:
            self._hurry.set()

    def stop(self) -> None:
        """Writes nothing more, and waits until the thread has ended."""
        self._stopping = True
        self._wake.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._hurry.wait(_FLUSH_AFTER_S)
            if self._stopping:
                return
            self._wake.clear()
            self._hurry.clear()
            self._flush()
