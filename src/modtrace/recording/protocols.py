"""The two protocols through which collectors, stores and analyses meet."""

from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa

from .meta import RunMeta


class Sink(Protocol):
    """Where a collector's rows go, a batch at a time."""

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Takes a batch of rows of one table.

        Args:
            table: a name of `recording.schema`.
            columns: for each column a numpy array, an Arrow array or a list, all of one length.
                A column of the schema that is left out is null (or empty, 0, False where it may not be null).
        """

    def end_step(self, now_ns: int, *, force: bool = False) -> None:
        """A step has ended, and all its rows have been written: they may go to rest now.

        Args:
            now_ns: `time.perf_counter_ns()` of the moment.
            force: put everything to rest now, however recent the last time was.
        """

    def mark(self, text: str) -> None:
        """Notes in the recording that something is missing or went wrong (`incomplete from ...`)."""

    def close(self) -> None:
        """Writes what is left. After it nothing more may be written; calling it again does nothing."""

    def abandon(self) -> None:
        """Drops the files without writing: this process is a fork, and the recording is its parent's."""


class RecordingData(Protocol):
    """Where an analysis reads a recording from."""

    @property
    def meta(self) -> RunMeta:
        """What is known about the run; its `marks` say what is missing."""

    def table(self, name: str) -> pa.Table:
        """All rows of a table, in its schema; no rows if there are none.

        Raises:
            ValueError: there is no such table.
        """
