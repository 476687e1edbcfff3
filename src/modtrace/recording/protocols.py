"""The two protocols through which collectors, stores and analyses meet."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import pyarrow as pa

from .meta import Note, RunMeta
from .raw_tensor import RawTensor


class Sink(Protocol):
    """Where a collector's rows go, a batch at a time."""

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Takes a batch of rows of one table.

        Args:
            table: a name of `recording.schema`.
            columns: for each column a numpy array, an Arrow array or a list, all of one length.
                A column of the schema that is left out is null (or empty, 0, False where it may not be null).
        """

    def put_tensor(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int], *, step: int | None = None
    ) -> str | None:
        """Takes a copy of a whole tensor before it returns; any thread may call it.

        Args:
            name: what it is called; a number is put in front, so that no two are called alike.
            array: its raw elements in any strides: what numpy lacks as unsigned integers of the same width,
                complex32 and complex64 as parts with a last axis of 2 or as they are.
            dtype: torch's name without `torch.`.
            shape: of the tensor.
            step: the one that it belongs to; None for the one that runs.

        Returns:
            The reference that goes into `values.blob`, which `RecordingData.tensor` takes; None where the
            tensor was left out. Which and why, the recording says by a mark when it is closed.

        Raises:
            ValueError: the array does not hold a tensor of this dtype and shape.
        """

    def end_step(self, now_ns: int, *, force: bool = False) -> None:
        """A step has ended, and all its rows have been written: they may go to rest now.

        Args:
            now_ns: `time.perf_counter_ns()` of the moment.
            force: put everything to rest now, however recent the last time was.
        """

    def mark(self, text: str) -> None:
        """Notes in the recording that something is missing or went wrong (`incomplete from ...`)."""

    def note(self, note: Note) -> None:
        """Notes in the recording what has happened to it and is no damage: why steps were written, or were not."""

    def close(self) -> None:
        """Writes what is left. After it nothing more may be written; calling it again does nothing."""

    def abandon(self) -> None:
        """Drops the files without writing: this process is a fork, and the recording is its parent's."""


class RecordingData(Protocol):
    """Where an analysis reads a recording from."""

    @property
    def meta(self) -> RunMeta:
        """Returns what is known about the run; its `marks` say what is missing."""

    def table(self, name: str) -> pa.Table:
        """Returns all rows of a table, in its schema; no rows if there are none.

        Raises:
            ValueError: there is no such table.
        """

    def tensor(self, blob: str) -> RawTensor:
        """Returns the whole tensor that a row of `values` refers to by its column `blob`.

        Raises:
            RecordingError: it is not there: left out, dropped, or lost with the end of a file.
        """
