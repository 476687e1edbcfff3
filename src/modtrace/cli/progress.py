"""Reports on standard error how far a recording has come while its program runs."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ..views.common.headline import name_rank

_REPORT_EVERY_S = 10.0


class ProgressReporter:
    """Reports how far a recording has come: every ten seconds on a terminal, and at the end."""

    def __init__(self, recording: Any, describe: Callable[[Any], str], *, quiet: bool) -> None:
        """Starts reporting.

        Args:
            recording: the recording, whose `progress` is reported.
            describe: returns a text on the progress.
            quiet: whether to report nothing, not even at the end.
        """
        self._recording = recording
        self._describe = describe
        self._quiet = quiet
        self._pid = os.getpid()
        self._reported = ""
        self._rank: str | None = None  # as the recording names it; None until it is read
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="modtrace-progress", daemon=True)
        if not quiet and _columns():
            with contextlib.suppress(RuntimeError):  # the system has no more threads
                self._thread.start()

    def end(self, lines: Iterable[str]) -> None:
        """Stops reporting progress, and prints the closing lines."""
        if self._quiet or os.getpid() != self._pid:
            return
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()  # a daemon thread that wakes while the interpreter ends may abort it
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()  # so that the program's output precedes ours in a common file
        for line in lines:
            self.print(line)

    def report(self) -> None:
        """Prints how far the recording has come, if anything has run since the last report."""
        progress = self._recording.progress
        text = f"{self._describe(progress)} so far"
        if (progress.steps or progress.rows) and text != self._reported:
            self.print(text)
            self._reported = text

    def _report(self) -> None:
        while not self._ended.wait(_REPORT_EVERY_S):
            self.report()

    def print(self, text: str) -> None:
        """Prints a text on a line of its own.

        The program may have left a line open, as a progress bar of tqdm does, so blanks up to the terminal's last
        column are written first: they stay on the line if it is empty, and run over to the next one otherwise.
        """
        columns = _columns()
        fresh = f"{' ' * (columns - 1)}\r" if columns else ""
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            # A single write is used, because other ranks may print to the same terminal.
            print(
                f"{fresh}modtrace: {self._name_rank()}{text}\n",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def _name_rank(self) -> str:
        if self._rank is None:
            with contextlib.suppress(Exception):  # a file of the recording may be anything by now
                self._rank = name_rank(self._recording.meta)
        return self._rank or ""


def _columns() -> int:
    """Returns the width of the terminal behind standard error; 0 if it is no terminal or has no width."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (AttributeError, OSError, ValueError):  # standard error is missing, closed, or no terminal
        return 0
