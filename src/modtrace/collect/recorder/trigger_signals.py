"""Receives the signals of `OnSignal` triggers. A thread acts on them, because a handler must not wait for a lock."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from ...errors import MisuseError
from ...recording.failure_reporter import start_thread
from ...recording.triggers.trigger_kinds import OnSignal

#: The longest time after which an arrived signal is acted on, if no step ends before.
_ACT_EVERY_S = 0.5


class SignalWatch:
    """The signals of one recording, from `start` to `stop`."""

    def __init__(self, triggers: Sequence[OnSignal], fire: Callable[[str], None]) -> None:
        """Creates a watch, which receives nothing before `start()`.

        Args:
            fire: called with a signal's name, on any thread.
        """
        self._triggers = triggers
        self._fire = fire
        #: Signals that have arrived. A handler only appends to it, which is atomic.
        self._came: deque[str] = deque()
        self._former: dict[signal.Signals, Any] = {}
        self._ours: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Installs the handlers.

        Raises:
            MisuseError: this is not the main thread, on which alone Python handles signals.
        """
        if not self._triggers:
            return
        if threading.current_thread() is not threading.main_thread():
            raise MisuseError(
                f"{self._triggers[0]!r}: only the main thread may handle signals. "
                "Enter record() there, or leave this trigger out."
            )
        for trigger in self._triggers:
            if trigger.number not in self._ours:
                self._ours[trigger.number] = handler = partial(self._handle, trigger)
                self._former[trigger.number] = _in_use(trigger.number, signal.signal(trigger.number, handler))
        self._thread = start_thread(
            self._run, "modtrace-signals", without="signals are acted on when a step ends"
        )

    def stop(self) -> str | None:
        """Restores the former handlers, unless others have replaced ours. Returns a warning if this is impossible."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if threading.current_thread() is threading.main_thread():
            for number, former in self._former.items():
                if signal.getsignal(number) is self._ours[number]:
                    former = _in_use(number, former)
                    signal.signal(number, signal.SIG_DFL if former is None else former)
        elif self._former:
            return (
                f"{self._triggers[0]!r}: the recording was left on the thread {threading.current_thread().name!r}, and "
                "only the main thread may take signal handlers off: ours stays, and passes on what comes. "
                "Leave the recording on the thread that entered it."
            )
        return None

    def act(self) -> None:
        """Acts on the signals that have arrived."""
        while self._came:
            try:
                name = self._came.popleft()
            except IndexError:  # another thread took it
                return
            self._fire(name)

    def _run(self) -> None:
        while not self._stopping.wait(_ACT_EVERY_S):
            self.act()

    def _handle(self, trigger: OnSignal, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid and not self._stopping.is_set():  # False in a fork, or after the end
            self._came.append(trigger.name)
        former = self._former.get(trigger.number)
        if callable(former):
            former(number, frame)
        elif former == signal.SIG_DFL and not trigger.is_harmless:
            raise SystemExit(128 + number)  # the exit status that a shell reports


def _in_use(number: signal.Signals, handler: Any) -> Any:
    """Returns the handler to use, skipping those of ended recordings, which may end in any order."""
    while (watch := _watch_of(handler)) is not None and watch._stopping.is_set():
        handler = watch._former.get(number)
    return handler


def _watch_of(handler: Any) -> SignalWatch | None:
    watch = getattr(getattr(handler, "func", None), "__self__", None)  # our handlers are `partial` objects
    return watch if isinstance(watch, SignalWatch) else None
