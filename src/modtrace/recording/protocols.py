"""The two protocols through which collectors, stores and analyses meet."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import pyarrow as pa

from .meta import Note, RunMeta
from .raw_tensor import RawTensor


class Sink(Protocol):
    """Receives the rows of a collector in batches."""

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Takes a batch of rows of one table.

        Args:
            table: a name of `recording.schema`.
            columns: for each column a numpy array, an Arrow array or a list, all of one length. A column of the schema
                that is left out is null (or empty, 0, False if it may not be null).
        """

    def put_tensor(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int], *, step: int | None = None
    ) -> str | None:
        """Takes a copy of a whole tensor before it returns. Any thread may call it.

        Args:
            name: the tensor's name. A number is put in front, so that names are unique.
            array: its raw elements in any strides. Elements of dtypes that numpy lacks are unsigned integers of the
                same width; complex32 and complex64 are parts with a last axis of 2, or as they are.
            dtype: torch's name without `torch.`.
            shape: the shape of the tensor.
            step: the step that it belongs to; None for the running one.

        Returns:
            the reference for `values.blob`, which `RecordingData.tensor` takes; None if the tensor was left out. The
            recording states which tensors were left out and why by a mark when it is closed.

        Raises:
            ValueError: the array does not hold a tensor of this dtype and shape.
        """

    def end_step(self, now_ns: int, *, force: bool = False) -> None:
        """Ends a step, all of whose rows have been written. They may be flushed now.

        Args:
            now_ns: `time.perf_counter_ns()` at this moment.
            force: flushes everything now, however recent the last flush was.
        """

    def mark(self, text: str) -> None:
        """Stores a sentence that says what is missing or went wrong (`incomplete from ...`)."""

    def note(self, note: Note) -> None:
        """Stores a note on an event that is not damage, such as why steps were written or were not."""

    def close(self) -> None:
        """Writes what is left. Nothing may be written afterwards; a second call does nothing."""

    def abandon(self) -> None:
        """Drops the files without writing, because this process is a fork and the recording is its parent's."""


#: The name in a row that has only the number of the last collective of a group.
LAST = "last"

#: The bytes of the texts of a collective that `RecentCollectives` keeps.
TEXT_BYTES = 252


class RecentCollectives(Protocol):
    """Keeps the newest collectives so that they survive the killing of the process."""

    @property
    def memory(self) -> Any:
        """A writable buffer of all of them, for code in C; `collective_ring.py` defines its form."""

    def begin(self, new: Sequence[int], texts: bytes) -> int:
        """Keeps a collective that begins, and returns its number.

        Args:
            new: start_ns, end_ns (0), seq_id, bytes_read, bytes_written, step, thread, peer; -1 for what is not known.
            texts: name, group, ranks, dtype, phase, path; with "\x1f" between them.
        """

    def set_last(self, slot: int, last: Sequence[int], texts: bytes) -> None:
        """Keeps the number of the last collective of a group, in place of what was in this slot; see `begin`."""

    def end(self, number: int, now_ns: int) -> None:
        """Keeps that a collective is complete."""


class RecordingData(Protocol):
    """The source from which analyses read a recording."""

    @property
    def meta(self) -> RunMeta:
        """The description of the run; its `marks` say what is missing."""

    def table(self, name: str) -> pa.Table:
        """Returns all rows of a table, in its schema.

        Raises:
            ValueError: there is no such table.
        """

    def tensor(self, blob: str) -> RawTensor:
        """Returns the whole tensor that a row of `values` refers to by its column `blob`.

        Raises:
            RecordingError: the tensor was left out, dropped, or lost with the end of a file.
        """
