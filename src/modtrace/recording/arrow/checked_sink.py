"""A sink in front of another one, which writes only rows that readers accept."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ..failure_reporter import FailureReporter
from ..meta import Note
from ..protocols import Sink
from .checked_rows import check_rows


class CheckedSink:
    """A `Sink` that checks the rows of a collector once, before they are held, kept or written."""

    def __init__(self, sink: Sink, reporter: FailureReporter) -> None:
        """Creates a sink in front of `sink`; `reporter` receives what breaks a rule."""
        self._sink = sink
        self._reporter = reporter

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Takes a batch of rows of one table; see `Sink.write`.

        Raises:
            ValueError: the columns do not fit the table, or with `strict` a value breaks a rule of it.
        """
        given, faults = check_rows(table, columns)
        if faults:
            steps = given["step"].to_pylist() if "step" in given else ()
            self._reporter.rows_refused(table, faults, min(steps, default=None))
        if given and len(next(iter(given.values()))):
            self._sink.write(table, given)

    def put_tensor(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int], *, step: int | None = None
    ) -> str | None:
        """Passes on a whole tensor."""
        return self._sink.put_tensor(name, array, dtype, shape, step=step)

    def end_step(self, now_ns: int, *, force: bool = False) -> None:
        """Passes on that a step has ended."""
        self._sink.end_step(now_ns, force=force)

    def mark(self, text: str) -> None:
        """Passes on a mark."""
        self._sink.mark(text)

    def note(self, note: Note) -> None:
        """Passes on a note."""
        self._sink.note(note)

    def close(self) -> None:
        """Closes the other sink."""
        self._sink.close()

    def abandon(self) -> None:
        """Abandons the other sink."""
        self._sink.abandon()
