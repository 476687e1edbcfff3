"""Ends the process as `python` would after the same program: with its exit status, by a signal, or by Ctrl-C."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from ..recording.failure_reporter import exit_code_of


@dataclass(frozen=True)
class Exited:
    """The program ended with a status, which may be any int; the system keeps only its lowest bits."""

    status: int


@dataclass(frozen=True)
class Killed:
    """The program was ended by a signal, by whose default action the process must end, too."""

    number: signal.Signals


Ending = Exited | Killed


class Terminated(SystemExit):
    """Raised when a signal arrives that ends a process."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.code = 128 + number


def end_like(ending: Ending) -> NoReturn:
    """Ends this process so that the shell sees the same as from `python`."""
    if isinstance(ending, Exited):
        sys.exit(ending.status)
    if ending.number == signal.SIGINT:
        _run_at_exit()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    end_by(ending.number)
    sys.exit(128 + ending.number)  # reached only if the signal is blocked


def _run_at_exit() -> None:
    """Waits for threads and calls the functions registered with `atexit`, as Python does after Ctrl-C.

    Python would then free all modules, which takes seconds with torch, before it ends itself by the signal.
    """
    # multiprocessing calls both of them as well (CPython 3.10 to 3.14).
    for function in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            function()


def end_by(number: signal.Signals) -> None:
    """Ends this process by the default action of a signal, unless that is blocked. Only the main thread may call it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def print_ending(error: BaseException, shown: TracebackType | None) -> Ending:
    """Prints what Python prints for an uncaught exception, and returns how that ends the process.

    Args:
        error: the exception.
        shown: the part of its traceback that is printed.
    """
    if isinstance(error, Terminated):
        return Killed(error.number)
    if isinstance(error, SystemExit):
        return Exited(_print_code(exit_code_of(error)))
    error = error.with_traceback(shown)
    try:
        hook = sys.excepthook
    except AttributeError:
        _write("sys.excepthook is missing\n")
        _print_traceback(error)
    else:
        try:
            hook(type(error), error, shown)
        except SystemExit as ended:
            return Exited(_print_code(exit_code_of(ended)))
        except BaseException as failure:
            _write("Error in sys.excepthook:\n")
            trace = failure.__traceback__
            _print_traceback(failure.with_traceback(trace and trace.tb_next))
            _write("\nOriginal exception was:\n")
            _print_traceback(error)
    return (
        Killed(signal.SIGINT) if type(error) is KeyboardInterrupt else Exited(1)
    )  # subclasses are not meant, as in Python


def _print_code(code: object) -> int:
    """Returns the status for an argument of `sys.exit()`; an argument that is no number is printed."""
    if code is None:
        return 0
    if isinstance(code, int):
        return int.__index__(code)
    with contextlib.suppress(Exception):
        _write(str(code), if_closed="")
    _write("\n")
    return 1


def _print_traceback(error: BaseException) -> None:
    _write("".join(traceback.format_exception(error)))


def _write(text: str, *, if_closed: str | None = None) -> None:
    """Writes to `sys.stderr`, or to the file behind it if the program has deleted or closed that, as Python does.

    text: the text to write.
        if_closed: the text to write instead if `sys.stderr` is closed.
        if_closed: what is written instead if `sys.stderr` is closed.
    """
    stream: Any = getattr(sys, "stderr", None)
    if stream is not None:
        try:
            stream.write(text)
            return
        except Exception:
            text = text if if_closed is None else if_closed
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))
