"""Keeps a recording in memory. If there are too many rows, the oldest are dropped."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy.typing as npt
import pyarrow as pa

from ...errors import MisuseError
from ..arrow.arrays import to_numpy
from ..arrow.buffer import TableBuffer
from ..arrow.dictionary_codes import share_dictionaries
from ..meta import Note, RunMeta
from ..options.tensor_options import TensorOptions
from ..raw_tensor import RawTensor
from ..schema import schema, schemas
from .tensors import TensorMemory

#: Small tables without which the others cannot be understood.
NEVER_DROPPED = frozenset({"modules", "sites", "scalars", "steps", "compilations", "compiled_ops"})

_SEALED_ROWS = 8192
_SEALED_PART_OF_MAX = 64  # a sealed batch is dropped as a whole, so it takes about this part of max_bytes


class MemoryRecording:
    """A recording without files: a `Sink`, and the `RecordingData` of what was written to it.

    If the rows take more than `max_bytes`, whole batches are dropped, those of the oldest steps first, and a mark says
    so. The tables in `NEVER_DROPPED` are kept. Whole tensors have a bound of their own, in `tensors`, above which the
    oldest are dropped.
    """

    def __init__(
        self,
        meta: RunMeta | None = None,
        *,
        max_bytes: int = 256 * 2**20,
        tensors: TensorOptions | None = None,
    ) -> None:
        self._meta = meta if meta is not None else RunMeta()
        self._max_bytes = max_bytes
        self._tables = {name: _MemoryTable(name, max_bytes // _SEALED_PART_OF_MAX) for name in schemas()}
        self._last_step = -1  # the latest step in a row
        self._step = 0  # the step for rows without a step (tensors, uses)
        self._dropped: dict[str, int] = {}  # by table, the last step of which rows were dropped
        self._tensors = TensorMemory((tensors or TensorOptions()).max_bytes)
        self._marks: list[str] = list(self._meta.marks)
        self._closed = False
        self._abandoned = False

    @property
    def meta(self) -> RunMeta:
        """The description of the run; its `marks` say what is missing."""
        marks = list(self._marks)
        if self._dropped:
            tables = ", ".join(name for name in schemas() if name in self._dropped)
            before = max(self._dropped.values()) + 1
            limit = f"max_bytes={self._max_bytes}"
            marks.append(f"{tables} of steps before {before} were dropped to stay within {limit}")
        marks += self._tensors.marks
        return replace(self._meta, marks=tuple(marks), complete=self._closed and not marks)

    @property
    def rows(self) -> int:
        """The number of rows that are kept."""
        return sum(table.rows for table in self._tables.values())

    @property
    def size_bytes(self) -> int:
        """The bytes of the rows and the whole tensors."""
        return self._rows_bytes + self._tensors.size_bytes

    @property
    def _rows_bytes(self) -> int:
        return sum(table.size_bytes for table in self._tables.values())

    def table(self, name: str) -> pa.Table:
        """Returns the rows of a table that are kept, in its schema.

        Raises:
            ValueError: there is no such table.
        """
        schema(name)
        return self._tables[name].read()

    def tensor(self, blob: str) -> RawTensor:
        """Returns the whole tensor with a reference that `put_tensor` returned.

        Raises:
            RecordingError: it was never kept, or has been dropped.
        """
        return self._tensors.get(blob)

    def put_tensor(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int], *, step: int | None = None
    ) -> str | None:
        """Keeps a copy of a whole tensor; see `Sink.put_tensor`.

        Raises:
            ValueError: the array does not hold a tensor of this dtype and shape.
            MisuseError: the recording has been closed.
        """
        if self._abandoned:
            return None
        if self._closed:
            raise MisuseError(f"the tensor {name!r} comes after the recording was closed")
        return self._tensors.put(name, array, dtype, shape, self._step if step is None else step)

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Takes a batch of rows of one table; see `Sink.write`.

        Raises:
            ValueError: the columns do not fit the table.
            MisuseError: the recording has been closed.
        """
        if self._abandoned:
            return
        if self._closed:
            raise MisuseError(f"rows of {table!r} come after the recording was closed")
        schema(table)
        self._last_step = max(self._last_step, self._tables[table].append(columns, self._step))
        self._step = max(self._step, self._last_step)
        while self._rows_bytes > self._max_bytes and self._drop_oldest():
            pass

    def end_step(self, now_ns: int, *, force: bool = False) -> None:
        """Assigns later rows to the next step. Rows in memory need no flush."""
        self._step = self._last_step + 1

    def mark(self, text: str) -> None:
        """Stores a sentence that says what is missing or went wrong, once for each text."""
        if text not in self._marks:
            self._marks.append(text)

    def note(self, note: Note) -> None:
        """Stores a note on an event that is not damage."""
        self._meta = replace(self._meta, notes=(*self._meta.notes, note))

    def close(self) -> None:
        """Ends the recording, whose contents can still be read."""
        self._closed = True

    def abandon(self) -> None:
        """Drops all rows, because this process is a fork and the recording is its parent's."""
        self._abandoned = True
        self._tensors.clear()
        self._tables = {name: _MemoryTable(name, 0) for name in schemas()}

    def _drop_oldest(self) -> bool:
        """Drops the batch with the oldest steps. Returns False if there is none to drop."""
        droppable = [name for name, table in self._tables.items() if name not in NEVER_DROPPED and table.rows]
        if not droppable:
            return False
        oldest = min(droppable, key=lambda name: self._tables[name].oldest_step)
        self._dropped[oldest] = self._tables[oldest].drop_oldest()
        return True


class _Sealed(NamedTuple):
    """A batch that gets no more rows."""

    batch: pa.RecordBatch
    size_bytes: int
    last_step: int


class _MemoryTable:
    """The rows of one table: sealed batches, followed by the rows of the next one."""

    def __init__(self, name: str, sealed_bytes: int) -> None:
        self._name = name
        self._schema = schema(name)
        self._sealed_bytes = sealed_bytes
        self._sealed: deque[_Sealed] = deque()
        self._sealed_size_bytes = 0
        self._open = TableBuffer(name)
        self._open_last_step = 0
        self._read: pa.Table | None = None  # made on request, and dropped when rows are added or dropped
        self.rows = 0

    @property
    def size_bytes(self) -> int:
        return self._sealed_size_bytes + self._open.size_bytes

    @property
    def oldest_step(self) -> int:
        return self._sealed[0].last_step if self._sealed else self._open_last_step

    def append(self, columns: Mapping[str, Any], step: int) -> int:
        """Adds rows, and returns the last step in them, or -1. A row without a step counts as one of `step`."""
        batch = self._open.append(columns)
        self._read = None
        self.rows += batch.num_rows
        named = _last_step(batch)
        self._open_last_step = max(self._open_last_step, step if named < 0 else named)
        if self._open.rows >= _SEALED_ROWS or self._open.size_bytes > self._sealed_bytes:
            self._seal()
        return named

    def drop_oldest(self) -> int:
        """Drops the oldest batch. Returns the last step of its rows."""
        if not self._sealed:
            self._seal()
        dropped = self._sealed.popleft()
        self._read = None
        self.rows -= dropped.batch.num_rows
        self._sealed_size_bytes -= dropped.size_bytes
        return dropped.last_step

    def read(self) -> pa.Table:
        if self._read is None:
            batches = [sealed.batch for sealed in self._sealed]
            if self._open.rows:
                batches.append(self._open.peek())
            self._read = share_dictionaries(pa.Table.from_batches(batches, schema=self._schema))
        return self._read

    def _seal(self) -> None:
        if not self._open.rows:
            return
        batch = self._open.peek()
        # Memory that absent columns share does not count.
        size_bytes = self._open.size_bytes + self._open.dictionaries_size_bytes
        self._open = TableBuffer(self._name)
        self._sealed.append(_Sealed(batch, size_bytes, self._open_last_step))
        self._sealed_size_bytes += size_bytes


def _last_step(batch: pa.RecordBatch) -> int:
    at = batch.schema.get_field_index("step")
    return int(to_numpy(batch.column(at)).max()) if at >= 0 and batch.num_rows else -1
