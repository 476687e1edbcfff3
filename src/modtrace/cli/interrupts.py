"""What Ctrl-C and other signals do to a program that is recorded, and the exit code with which it ends.

The calls that a Ctrl-C leaves open are closed in collect/scopes/tracker.py.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of a program that an error has ended; negative if it is as if a signal had."""
    if isinstance(error, Terminated):
        return -error.number
    if isinstance(error, KeyboardInterrupt):
        return -signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def exit_like(code: int) -> int:
    """Returns an exit code, or ends this process by a signal, so that the shell sees the same as from `python`."""
    if code >= 0:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    _end_by(signal.Signals(-code))
    return 128 - code  # the signal is blocked


class Terminated(SystemExit):
    """Raised when a signal arrives that ends a process."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.code = 128 + number


@contextlib.contextmanager
def raising_on(number: signal.Signals) -> Iterator[None]:
    """Makes the signal raise inside the block, unless the program handles it or the parent process ignores it."""
    pid = os.getpid()

    def terminate(_: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # forked by another thread than the main one
            _end_by(number)
        raise Terminated(number)

    def exchange(one: Any, other: Any) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and os.getpid() == pid and signal.getsignal(number) == one:
            signal.signal(number, other)

    # A fork has the default from its first moment: Python drops what comes before a fork runs again.
    was_ours = False

    def before_fork() -> None:
        nonlocal was_ours
        was_ours = signal.getsignal(number) is terminate
        exchange(terminate, signal.SIG_DFL)

    def after_fork() -> None:
        if was_ours:
            exchange(signal.SIG_DFL, terminate)

    exchange(signal.SIG_DFL, terminate)
    os.register_at_fork(before=before_fork, after_in_parent=after_fork)
    try:
        yield
    finally:
        exchange(terminate, signal.SIG_DFL)


def _end_by(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
