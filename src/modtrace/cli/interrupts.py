"""Ends a recorded program on signals that end a process, and closes its recording.

The calls that a Ctrl-C leaves open are closed in collect/scopes/tracker.py.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from ..recording.failure_reporter import start_thread
from .endings import Terminated, end_by

#: None if it is not compiled; a signal then waits until the main thread executes Python code.
blocked_call: ModuleType | None
try:
    from . import _blocked_call as blocked_call
except ImportError:
    blocked_call = None

#: The longest time until a handler of ours, which the program has set again, is guarded again.
_CHECK_EVERY_MS = 500

#: A process that uses this much processor time within half a second is computing: a computing one uses 90 ms on two
#: processors shared by eleven busy processes, while one that waits for another rank uses 1 ms, or 15 ms with a
#: TCPStore.
_COMPUTING_S, _SAMPLE_S = 0.03, 0.5


class EndingSignals:
    """Ends the program on SIGTERM and SIGHUP by an exception, as Ctrl-C does, unless it handles or ignores them.

    Python does this when the main thread executes Python code. If the main thread is blocked in a call, such as a
    collective that waits for another rank, another thread closes the recording and ends the process; see
    `_blocked_call.c`.
    """

    def __init__(self, close: Callable[[BaseException], None]) -> None:
        """Creates the object, which handles no signal before it is entered.

        Args:
            close: closes the recording; it is called on our thread with the exception that ended the program.
        """
        self._close = close
        self._pid = os.getpid()
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        self._handlers: dict[signal.Signals, Any] = {
            number: partial(self._raise, number) for number in numbers
        }
        self._python_handler = signal.default_int_handler
        self._lent: list[signal.Signals] = []  # handlers are reset while this process forks
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        for number, handler in self._handlers.items():
            self._exchange(number, signal.SIG_DFL, handler)
        if blocked_call is not None and blocked_call.start():
            without = "a signal that comes while a call blocks waits for the end of the call"
            self._thread = start_thread(self._watch, "modtrace-blocked", without=without)
            if self._thread is None:
                blocked_call.stop()
            else:
                self._exchange_interrupt(signal.default_int_handler, blocked_call.default_int_handler)
                self._guard_all()
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork)

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._handlers.items():
            self._exchange(number, handler, signal.SIG_DFL)
        if blocked_call is not None and self._thread is not None:
            self._exchange_interrupt(blocked_call.default_int_handler, self._python_handler)
            blocked_call.stop()
            self._thread.join()

    def _raise(self, number: signal.Signals, _: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # forked by another thread than the main one
            end_by(number)
        if blocked_call is not None:
            blocked_call.came_back(number)
        raise Terminated(number)

    def _exchange(self, number: signal.Signals, one: Any, other: Any) -> bool:
        """Replaces the handler `one` of a signal by `other`, on the main thread, unless another is installed."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or os.getpid() != self._pid or signal.getsignal(number) != one:
            return False
        signal.signal(number, other)
        return True

    def _exchange_interrupt(self, one: Any, other: Any) -> None:
        """Replaces the handler of Ctrl-C by its equal, even in `signal`, as asyncio takes no other for the default."""
        if signal.default_int_handler is one:
            signal.default_int_handler = other
        self._exchange(signal.SIGINT, one, other)

    # A forked child has the default handlers from its first moment, because Python drops signals that arrive before
    # the child runs Python code.

    def _before_fork(self) -> None:
        for number, handler in self._handlers.items():
            if self._exchange(number, handler, signal.SIG_DFL):
                self._lent.append(number)

    def _after_fork(self) -> None:
        while self._lent:
            number = self._lent.pop()
            self._exchange(number, signal.SIG_DFL, self._handlers[number])
        self._guard_all()

    def _guard_all(self) -> None:
        """Watches the signals whose handler is ours."""
        if blocked_call is not None and self._thread is not None:
            ours = {**self._handlers, signal.SIGINT: blocked_call.default_int_handler}
            for number, handler in ours.items():
                if signal.getsignal(number) is handler:
                    blocked_call.guard(number)

    def _watch(self) -> None:
        assert blocked_call is not None
        while (number := blocked_call.next_blocked(_CHECK_EVERY_MS)) >= 0:
            if number == 0:
                self._guard_all()
            elif number == signal.SIGINT and _is_computing():
                blocked_call.postpone(
                    number
                )  # the signal comes again, as the program may catch a KeyboardInterrupt
            elif blocked_call.begin_end(number):
                with contextlib.suppress(BaseException):
                    is_interrupt = number == signal.SIGINT
                    self._close(KeyboardInterrupt() if is_interrupt else Terminated(signal.Signals(number)))
                blocked_call.end(number)


def _is_computing() -> bool:
    before_s = time.process_time()
    time.sleep(_SAMPLE_S)
    return time.process_time() - before_s > _COMPUTING_S
