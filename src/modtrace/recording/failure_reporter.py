"""Reports what a recording lacks and why: a warning tells the user, and a mark is stored in the recording."""

import threading
import warnings
from collections.abc import Callable, Sequence

from ..errors import ModtraceWarning, describe_error
from .meta import RUN_ENDED
from .protocols import Sink

#: The argument with which internal errors are raised instead of being reported.
_STRICT = "record(strict=True)"


class FailureReporter:
    """Reports the failures of one recording, each once.

    A report that may come while the lock over the tracker's events is held is written later; see `write_late`.
    """

    def __init__(
        self, sink: Sink, writing: threading.RLock, *, strict: bool, step: Callable[[], int]
    ) -> None:
        """Creates a reporter.

        Args:
            sink: receives the marks.
            writing: the lock over the sink.
            strict: whether to raise internal errors in values and ops instead of reporting them.
            step: returns the number of the running step.
        """
        self.strict = strict
        self._sink = sink
        self._writing = writing
        self._step = step
        self._late_marks: list[str] = []  # marks to be written with the next rows
        self._warned: set[str] = set()
        self._has_failed = False
        self._refused_tables: set[str] = set()  # tables with values that were left out

    @property
    def step(self) -> int:
        """The number of the running step, as far as it can be known."""
        return self._step()

    def failed(self, error: Exception, where: str) -> None:
        """Reports, once, that nothing is recorded any more."""
        if self._has_failed:
            return
        self._has_failed = True
        self._mark(
            f"incomplete from step {self._step()}: modtrace failed at {where}: {describe_error(error)}"
        )
        if not self.strict:
            text = f"{where}: modtrace met an internal error and stopped recording; the run goes on"
            warn_of_error(text, error, strict=_STRICT)

    def ops_failed(self, error: Exception, where: str) -> None:
        """Reports that ops cannot be recorded; calls still are."""
        if self.strict:
            raise error
        step, reason = self._step(), describe_error(error)
        self._mark(f"ops are incomplete from step {step}: modtrace failed at {where}: {reason}")
        text = (
            f"{where}: modtrace met an internal error and records no more ops; "
            "the run and the recording of calls go on"
        )
        warn_of_error(text, error, strict=_STRICT)

    def ops_missed(self) -> None:
        """Reports that ops run unseen, because torch has removed our mode or it cannot be below the user's.

        It is called with the lock over the tracker's events, so the mark is written later.
        """
        self._late_marks.append(
            f"ops are missing from step {self._step()}: a dispatch mode of yours was on when record() was entered, "
            "or when a step to keep began, and was left later"
        )

    def values_failed(self, error: Exception, where: str) -> None:
        """Reports that nothing is measured any more; calls are still recorded."""
        step, reason = self._step(), describe_error(error)
        self._mark(f"values are incomplete from step {step}: modtrace failed at {where}: {reason}")
        text = (
            f"{where}: modtrace met an internal error and measures no more values; "
            "the run and the recording of calls go on"
        )
        warn_of_error(text, error, strict=_STRICT)

    def rows_failed(self, table: str, error: Exception, step: int | None = None) -> None:
        """Reports that no more rows of one table are recorded, from `step` on, by default the running one.

        The lock over the tracker's events may be held here.
        """
        if self.strict:
            raise error
        step, reason = self._step() if step is None else step, describe_error(error)
        self._late_marks.append(f"{table} are incomplete from step {step}: modtrace failed: {reason}")
        text = f"modtrace met an internal error and records no more {table}; the run and the recording of calls go on"
        warn_of_error(text, error, strict=_STRICT)

    def rows_refused(self, table: str, faults: Sequence[str], step: int | None) -> None:
        """Reports values that break the rules of a table and are not written: one warning, and one mark a table.

        `step` is the first step of these rows; None if the table has no steps.

        Raises:
            ValueError: with `strict`, in place of the report.
        """
        if self.strict:
            raise ValueError(f"rows of {table!r} break the rules of a recording: {'; '.join(faults)}")
        if table in self._refused_tables:
            return
        step = self._step() if step is None else step
        self._mark(
            f"{table} lacks values from step {step} on, which break the rules of a recording: {faults[0]}"
        )
        if not self._refused_tables:
            text = (
                f"rows of {table!r}: modtrace met an internal error and leaves out values that no reader accepts; "
                "the run and the recording go on"
            )
            warn_of_error(text, ValueError(faults[0]), strict=_STRICT)
        self._refused_tables.add(table)

    def user_raised(self, what: str, error: Exception) -> None:
        """Reports that a function of the user has raised. The lock over the tracker's events may be held here."""
        reason = describe_error(error)
        self._late_marks.append(f"{what} raised in step {self._step()}: {reason}")
        warnings.warn(
            f"{what} raised {reason}. The run and the recording go on, without what it was asked for.",
            ModtraceWarning,
            stacklevel=2,
        )

    def warn_once(self, text: str) -> None:
        """Warns the user once of something about the run, and marks it. The tracker's lock may be held here."""
        if text in self._warned:
            return
        self._warned.add(text)
        self._late_marks.append(text)
        warnings.warn(text, ModtraceWarning, stacklevel=2)

    def interrupted(self, error: BaseException, first: int) -> None:
        """Reports that rows may be missing from step `first` on, because an exception interrupted their writing."""
        self._late_marks.append(
            f"rows may be missing from step {first} on: {type(error).__name__} while they were written"
        )

    def run_ended(self, error: BaseException, line: str | None = None) -> None:
        """Reports the exception that ended the run, with the line that raised it, unless it is a clean exit."""
        if is_clean_exit(error):
            return
        text = f"{RUN_ENDED} {describe_error(error)}" + (f", at {line}" if line else "")
        steps = self._step()
        self._sink.mark(f"{text}; step {steps - 1} was the last to end" if steps else text)

    def _mark(self, text: str) -> None:
        """Writes a mark now if the sink is free; otherwise it is written late.

        Waiting could deadlock: the thread that uses the sink may wait for a lock that is held here.
        """
        if not self._writing.acquire(blocking=False):
            self._late_marks.append(text)
            return
        try:
            self._sink.mark(text)
        finally:
            self._writing.release()

    def write_late(self) -> None:
        """Writes the marks that had to wait. Callers hold the lock over the sink."""
        while self._late_marks:
            self._sink.mark(self._late_marks.pop(0))


def warn_of_error(text: str, error: Exception, *, strict: str, stacklevel: int = 4) -> None:
    """Warns of an internal error, saying what has stopped and what continues.

    Args:
        text: the warning, without the error.
        error: the internal error.
        strict: the argument with which the error would be raised; "" if there is none.
        stacklevel: as for `warnings.warn`, counted from this function.
    """
    advice = f"({describe_error(error)}). Please report it{f'; {strict} raises it' if strict else ''}."
    warnings.warn(" ".join((text, advice)), ModtraceWarning, stacklevel=stacklevel)


def start_thread(run: Callable[[], None], name: str, *, without: str) -> threading.Thread | None:
    """Starts a daemon thread; returns None, with a warning, if the system has no more threads.

    Args:
        run: the function that the thread runs.
        name: the name of the thread.
        without: what happens without the thread, for the warning.
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
    """Returns whether an error is `sys.exit()` with status 0."""
    if not isinstance(error, SystemExit):
        return False
    code = exit_code_of(error)
    return code is None or (isinstance(code, int) and int.__index__(code) == 0)


def exit_code_of(error: SystemExit) -> object:
    """Returns the argument of `sys.exit()`, or as in Python the error itself if its class hides the argument."""
    try:
        return error.code
    except Exception:
        return error
