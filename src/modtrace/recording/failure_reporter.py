"""Says what a recording lacks and why: to the user by a warning, in the recording by a mark."""

import threading
import warnings
from collections.abc import Callable
from typing import Protocol

from ..errors import ModtraceWarning
from .protocols import Sink


class _Lock(Protocol):
    def acquire(self, blocking: bool = True) -> bool: ...

    def release(self) -> None: ...


class FailureReporter:
    """What goes wrong in one recording, each said once.

    What may be told while the lock over what the tracker tells is held waits for the sink: see `write_late`.
    """

    def __init__(self, sink: Sink, writing: "_Lock", *, strict: bool, step: Callable[[], int]) -> None:
        """Has nothing to say yet.

        Args:
            sink: where the marks go.
            writing: the lock over the sink.
            strict: errors of ours in values and ops are raised; nothing is said of them here.
            step: the number of the step that runs.
        """
        self.strict = strict
        self._sink = sink
        self._writing = writing
        self._step = step
        self._late_marks: list[str] = []  # to be written with the next rows
        self._has_failed = False

    @property
    def step(self) -> int:
        """The number of the step that runs, as far as it is known."""
        return self._step()

    def failed(self, error: Exception, where: str) -> None:
        """Notes once that nothing more is recorded."""
        if self._has_failed:
            return
        self._has_failed = True
        self._mark(f"incomplete from step {self._step()}: modtrace failed at {where}: {describe(error)}")
        if not self.strict:
            text = f"{where}: modtrace met an internal error and stopped recording; the run goes on"
            warn_of_error(text, error, strict="record(strict=True)")

    def ops_failed(self, error: Exception, where: str) -> None:
        """Notes that ops cannot be recorded; calls are recorded on."""
        if self.strict:
            raise error
        self._mark(
            f"ops are incomplete from step {self._step()}: modtrace failed at {where}: {describe(error)}"
        )
        text = (
            f"{where}: modtrace met an internal error and records no more ops; "
            "the run and the recording of calls go on"
        )
        warn_of_error(text, error, strict="record(strict=True)")

    def ops_missed(self) -> None:
        """Notes that ops run unseen: torch has taken our mode off, or it cannot stand below the user's.

        Called with the lock over what the tracker tells, so that the sink has to wait.
        """
        self._late_marks.append(
            f"ops are missing from step {self._step()}: a dispatch mode of yours was on when record() was entered, "
            "or when a step to keep began, and was left later"
        )

    def values_failed(self, error: Exception, where: str) -> None:
        """Notes that nothing more is measured; calls are recorded on."""
        step = self._step()
        self._mark(f"values are incomplete from step {step}: modtrace failed at {where}: {describe(error)}")
        text = (
            f"{where}: modtrace met an internal error and measures no more values; "
            "the run and the recording of calls go on"
        )
        warn_of_error(text, error, strict="record(strict=True)")

    def user_raised(self, what: str, error: Exception) -> None:
        """Notes that a function of the user's has raised. The lock over what the tracker tells may be held."""
        said = describe(error)
        self._late_marks.append(f"{what} raised in step {self._step()}: {said}")
        warnings.warn(
            f"{what} raised {said}. The run and the recording go on, without what it was asked for.",
            ModtraceWarning,
            stacklevel=2,
        )

    def interrupted(self, error: BaseException, first: int) -> None:
        """Notes that rows may be missing from the step `first` on, for writing them has been broken off."""
        self._late_marks.append(
            f"rows may be missing from step {first} on: {type(error).__name__} while they were written"
        )

    def run_ended(self, error: BaseException) -> None:
        """Notes the exception that ended the run; a clean exit is none."""
        if is_clean_exit(error):
            return
        text = f"the run ended by {describe(error)}"
        steps = self._step()
        self._sink.mark(f"{text}; step {steps - 1} was the last to end" if steps else text)

    def _mark(self, text: str) -> None:
        """Marks now if the sink is free: whoever has it may wait for the lock that is held here."""
        if not self._writing.acquire(blocking=False):
            self._late_marks.append(text)
            return
        try:
            self._sink.mark(text)
        finally:
            self._writing.release()

    def write_late(self) -> None:
        """Writes the marks that had to wait. To be called with the lock over the sink."""
        while self._late_marks:
            self._sink.mark(self._late_marks.pop(0))


def warn_of_error(text: str, error: Exception, *, strict: str) -> None:
    """Warns of an internal error: what has stopped, and what goes on; `strict` is what raises the error instead."""
    advice = f"({describe(error)}). Please report it; {strict} raises it."
    warnings.warn(" ".join((text, advice)), ModtraceWarning, stacklevel=4)


def start_thread(run: Callable[[], None], name: str, *, without: str) -> threading.Thread | None:
    """Starts a thread of ours beside the training; None, with a warning, if the system has no more threads.

    Args:
        run: what the thread runs.
        name: of the thread.
        without: what happens without it.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        warnings.warn(
            f"no thread could be started beside the training ({error}): {without}. "
            "The run and the recording go on; a higher limit of threads (ulimit -u) gives it one.",
            ModtraceWarning,
            stacklevel=5,
        )
        return None
    return thread


def is_clean_exit(error: BaseException) -> bool:
    """Returns whether it is `sys.exit()` without a complaint."""
    return isinstance(error, SystemExit) and not error.code


def describe(error: BaseException) -> str:
    """Returns the class of an error and the first line of its text, if it has one."""
    said = _first_line(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _first_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a class of the user's that cannot say what it is
        return ""
    return (text.strip().splitlines() or [""])[0][:200]
