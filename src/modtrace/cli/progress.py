"""Says how far the recording is while a program runs, on lines that the program leaves free."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

_REPORT_EVERY_S = 10.0


class ProgressReporter:
    """Says on standard error how far a recording is, every ten seconds and at the end."""

    def __init__(self, recording: Any, describe: Callable[[Any], str], *, quiet: bool) -> None:
        """Begins to watch, and to report.

        Args:
            recording: what is made, with its `progress`.
            describe: says how much of it there is.
            quiet: nothing is said, not even at the end.
        """
        self._recording = recording
        self._describe = describe
        self._quiet = quiet
        self._pid = os.getpid()
        self._line = LineWatch()
        self._said = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="modtrace-progress", daemon=True)
        if not quiet:
            self._line.start()
            with contextlib.suppress(RuntimeError):  # the system has no more threads
                self._thread.start()

    def end(self, lines: Iterable[str]) -> None:
        """Says no more of the progress, and these lines, of which the last is the last that is said at all."""
        if self._quiet or os.getpid() != self._pid:
            return
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()  # a daemon thread that wakes while the interpreter goes down may abort it
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()  # in a file with both, what the program printed stands in front
        for line in lines:
            self.say(line)
        self._line.stop()

    def tell(self) -> None:
        """Says how far it is, if anything has run since the last time and the program has ended its line."""
        progress = self._recording.progress
        text = f"{self._describe(progress)} so far"
        if (progress.steps or progress.rows) and text != self._said and not self._line.is_open:
            self.say(text)
            self._said = text

    def _report(self) -> None:
        while not self._ended.wait(_REPORT_EVERY_S):
            self.tell()

    def say(self, text: str) -> None:
        """Says it, on a line of its own."""
        fresh = "\n" if self._line.is_open else ""
        with contextlib.suppress(OSError, ValueError):  # standard error is closed
            # In one write: other ranks may print to the same terminal.
            print(f"{fresh}modtrace: {text}\n", end="", file=sys.stderr, flush=True)


class LineWatch:
    """Knows whether the program has written to a line without ending it: a bar of tqdm, or what ends with a `\\r`.

    The `write` of standard error is replaced meanwhile, and of standard output where both are one terminal or file.
    What other processes write, and C code, is not seen.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._watched: list[tuple[Any, Callable[..., Any]]] = []

    def start(self) -> None:
        """Begins to watch."""
        for stream in _streams_beside_stderr():
            watching = self._watch(stream.write)
            if "write" not in getattr(stream, "__dict__", {"write": None}):  # nobody else has replaced it
                with contextlib.suppress(AttributeError):
                    stream.write = watching
                    self._watched.append((stream, watching))

    def stop(self) -> None:
        """Puts back what was there, unless the program has replaced it."""
        for stream, watching in self._watched:
            if vars(stream).get("write") is watching:
                del stream.write
        self._watched.clear()

    def _watch(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def watching(text: Any, *more: Any) -> Any:
            written = write(text, *more)
            self.is_open = leaves_line_open(text, self.is_open)
            return written

        return watching


def leaves_line_open(text: str, is_open: bool) -> bool:
    """Returns whether something stands on the last line behind a text; blanks behind a `\\r` clear it.

    Args:
        text: what is written.
        is_open: whether something stood there before.
    """
    _, newline, line = text.rpartition("\n")
    first, *overwritten = line.split("\r")
    is_open = bool(first.strip()) or (is_open and not newline)
    for each in filter(None, overwritten):
        is_open = bool(each.strip())
    return is_open


def _streams_beside_stderr() -> list[Any]:
    """Returns standard error, and standard output if it is the same terminal or file."""
    try:
        is_one = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # one of them is closed, or is no file
        is_one = False
    return [each for each in ([sys.stderr, sys.stdout] if is_one else [sys.stderr]) if each is not None]
