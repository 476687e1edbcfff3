"""Writes a recording to a folder while it is made, so that a killed process leaves a readable recording."""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import MisuseError, ModtraceWarning, RecordingError, RecordingReplacedError
from ..recording.arrow.buffer import TableBuffer
from ..recording.meta import Note, RunMeta
from ..recording.options.tensor_options import TensorOptions
from ..recording.schema import schema, schemas
from .collective_ring import CollectiveRing
from .folder import HeldFolder, create_rank_folder, delete_replaced, undo_rank_folder
from .json_files import write_meta
from .layout import table_file
from .stream import TableStream, compact
from .tensor_shards import TensorShards

#: Rows of steps that are not flushed by force, as those of copies, are flushed after this time at the latest.
_FLUSH_AFTER_NS = 100_000_000
_FLUSH_BYTES = 16 * 2**20
_COMPACT_BELOW_ROWS = 8192  # the mean number of rows of a batch
_OPEN, _CLOSED, _ABANDONED = "open", "closed", "abandoned"
_STOPPED, _LOST = "stopped", "lost"  # "stopped" after a failure; "lost" if the path holds something else now
_MOST_ENTRIES = 65_536  # the most strings in a table's dictionaries, after which new ones begin
_MOST_DICTIONARY_BYTES = 2**20  # likewise in bytes; in Python the dictionaries take three times as much


class FolderWriter:
    """A `Sink` that writes a rank's part of the recording folder.

    Only one thread at a time may call it, except for `put_tensor`, which any thread may call. What `end_step` has
    written is in the kernel's buffers, and survives the killing of the process.

    `steps` is written last, so all rows of a step in it are on disk. If the disk is full or gone, writing stops for
    good, a mark and a warning say so, and the training continues. If the folder is replaced, moved or deleted, writing
    also stops, without a mark, and what is at the path then is not touched.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        meta: RunMeta,
        *,
        overwrite: bool = False,
        new_attempt: bool | None = None,
        agent_start_ns: int | None = None,
        strict: bool = False,
        tensors: TensorOptions | None = None,
    ) -> None:
        """Creates the folder, or this rank's part of it.

        Args:
            path: the recording. Missing parents are made.
            meta: the description of the run. Ranks with one `run_id`, or of one `launch` at the same time, share the
                recording; `rank` names the folder.
            overwrite: replaces an existing recording. Anything else is never deleted.
            new_attempt: whether this rank may have written to the same run before (an elastic restart), so that
                `.attempt-1`, ... is added to its folder. None: if `meta.attempt` is not 0.
            agent_start_ns: under torchrun, when its agent was started: what ranks that have ended wrote since then is
                of earlier attempts of the same run.
            strict: raises `RecordingError` if writing fails later.
            tensors: how whole tensors are kept.

        Raises:
            RecordingExistsError: `path` exists already.
            NotARecordingError: something was to be replaced that is no recording.
            RecordingError: the folder cannot be made.
        """
        self.path = Path(path)
        self.steps = 0
        self._strict = strict
        folder, run_id = create_rank_folder(
            self.path,
            meta,
            overwrite=overwrite,
            new_attempt=meta.attempt > 0 if new_attempt is None else new_attempt,
            agent_start_ns=agent_start_ns,
        )
        self._meta = replace(meta, run_id=run_id, complete=False)
        self.folder = folder.absolute()  # the folder of this rank
        self._held = HeldFolder(self.folder)
        self._buffers = {name: TableBuffer(name) for name in schemas()}  # rows precede references to them
        self._streams: dict[str, TableStream] = {}
        self._tensors = TensorShards(self.folder, tensors or TensorOptions(), self._held.is_in_place)
        self._ring: CollectiveRing | None = None
        self._warned_of_tensors = False  # whether the user was warned that no more tensors are written
        self._ended: list[str] | None = None  # tables with an end-of-stream marker, once closed
        self._last_step = -1  # the last step in `steps` on disk
        self._flushed_ns: int | None = None
        self._state = _OPEN
        self._pid = os.getpid()
        try:
            write_meta(self.folder, self._meta, ended=None)
        except OSError as error:
            self.undo()
            raise RecordingError(f"{path}: cannot write here: {error.strerror or error}") from error

    @property
    def rows(self) -> int:
        """The number of rows in the files, including those of the next flush."""
        # A copy, as another thread may add a table meanwhile.
        written = sum(stream.rows for stream in list(self._streams.values()))
        return written + sum(buffer.rows for buffer in list(self._buffers.values()))

    @property
    def size_bytes(self) -> int:
        """The bytes of the tables and the whole tensors on disk."""
        return sum(stream.size_bytes for stream in list(self._streams.values())) + self._tensors.size_bytes

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        """Takes a batch of rows of one table; see `Sink.write`.

        Raises:
            ValueError: the columns do not fit the table.
            MisuseError: the recording has been closed.
        """
        schema(table)
        if self._state == _CLOSED:
            raise MisuseError(f"{self.path}: rows of {table!r} come after the recording was closed")
        if not self._is_open():
            return
        rows = self._buffers[table].append(columns).num_rows
        if table == "steps":
            self.steps += rows

    def put_tensor(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int], *, step: int | None = None
    ) -> str | None:
        """Takes a copy of a whole tensor, which is written later; see `Sink.put_tensor`.

        Raises:
            ValueError: the array does not hold a tensor of this dtype and shape.
            MisuseError: the recording has been closed.
        """
        if self._state == _CLOSED:
            raise MisuseError(f"{self.path}: the tensor {name!r} comes after the recording was closed")
        if not self._is_open():
            return None
        return self._tensors.put(name, array, dtype, shape, self.steps if step is None else step)

    def open_ring(self) -> CollectiveRing | None:
        """Makes the file with the newest collectives, which the close deletes; None if it cannot be made."""
        with contextlib.suppress(OSError):
            if self._is_open() and self._ring is None:
                self._ring = CollectiveRing(self.folder)
        return self._ring

    def wait_for_tensors(self) -> None:
        """Waits until all whole tensors so far are in their files, where a `FolderReader` finds them."""
        if self._is_open():
            self._tensors.wait()

    def end_step(self, now_ns: int, *, force: bool = False) -> None:
        """Writes the rows so far to the files if 100 ms have passed since the last write, or if there are many.

        Args:
            now_ns: `time.perf_counter_ns()` at this moment.
            force: writes them in any case.

        Raises:
            RecordingError: they, or a whole tensor, cannot be written (`strict` only).
        """
        is_due = force or self._flushed_ns is None or now_ns - self._flushed_ns >= _FLUSH_AFTER_NS
        is_due = is_due or sum(buffer.size_bytes for buffer in self._buffers.values()) > _FLUSH_BYTES
        if self._is_open() and is_due and self._is_in_place():
            self._flush()
            self._flushed_ns = now_ns
        self._warn_of_tensors()

    def mark(self, text: str) -> None:
        """Stores a mark in `meta.json`: what is missing or went wrong, once for each text."""
        if text in self._meta.marks or not self._is_ours():
            return
        self._meta = replace(self._meta, marks=(*self._meta.marks, text), complete=False)
        self._save_meta()

    def note(self, note: Note) -> None:
        """Stores a note in `meta.json` on an event that is not damage."""
        if self._is_ours():
            self._meta = replace(self._meta, notes=(*self._meta.notes, note))
            self._save_meta()

    def close(self) -> None:
        """Writes what is left, waits for the whole tensors and finishes the files. A second call does nothing.

        Raises:
            RecordingError: what is left cannot be written (`strict` only). The files are finished nevertheless.
        """
        if self._state == _CLOSED or not self._is_ours():
            return
        try:
            if self._is_in_place() and self._state == _OPEN:
                self._flush()
        finally:
            self.delete_replaced()
            try:
                self._close_tensors()
            finally:
                self._make_final()
                self._held.close()

    def delete_replaced(self) -> None:
        """Deletes permanently what this recording replaces. Until then, `undo` can restore it."""
        if self._held.is_in_place():
            delete_replaced(self.path)

    def undo(self) -> None:
        """Deletes the folder again, and restores what it was to replace, because nothing was recorded."""
        is_in_place = self._held.is_in_place()
        self.abandon()
        if is_in_place:
            undo_rank_folder(self.path, self.folder, is_only_rank=self._meta.world_size == 1)

    def abandon(self) -> None:
        """Closes the files without writing, because this process is a fork and the recording is its parent's."""
        if self._state in (_OPEN, _STOPPED, _LOST):
            self._abandon_streams()
            self._tensors.abandon()
            self._held.close()
            self._close_ring(keep=True)
        self._state = _ABANDONED

    def _is_open(self) -> bool:
        return self._is_ours() and self._state == _OPEN

    def _is_ours(self) -> bool:
        """Returns whether this process may write. In a forked child it abandons the recording."""
        if os.getpid() != self._pid and self._state != _ABANDONED:
            self.abandon()
        return self._state != _ABANDONED

    def _is_in_place(self) -> bool:
        """Returns whether the folder is still at its path. If it is not, the recording ends, and a warning says so."""
        if self._state == _LOST or self._held.is_in_place():
            return self._state != _LOST
        self._state = _LOST
        self._abandon_streams()
        self._tensors.give_up()
        what = "another run has replaced it" if self.folder.parent.exists() else "it was moved or deleted"
        text = f"{self.path}: the recording stops at step {self._last_step + 1}: {what} while it was written."
        if self._strict:
            raise RecordingReplacedError(text)
        warnings.warn(f"{text} The run goes on, unrecorded.", ModtraceWarning, 3)
        return False

    def _abandon_streams(self) -> None:
        for stream in self._streams.values():
            stream.abandon()
        self._streams = {}
        self._drop_buffers()

    def _flush(self) -> None:
        for table, buffer in self._buffers.items():
            if not buffer.rows:
                continue
            try:
                self._flush_table(table, buffer)
            except OSError as error:
                why = error.strerror or str(error)
                self._stop(table, why)
                text = (
                    f"{self.path}: the recording stops at step {self._last_step + 1}: {why} ({table}.arrow)."
                )
                if self._strict:
                    raise RecordingError(text) from error
                rest = "The run goes on; what was written before stays readable."
                warnings.warn(f"{text} {rest}", ModtraceWarning, 2)
                return
            except BaseException as error:  # it is unknown how much of the batch is in the file
                self._stop(table, repr(error))
                raise

    def _flush_table(self, table: str, buffer: TableBuffer) -> None:
        if table not in self._streams:
            self._streams[table] = TableStream(table_file(self.folder, table), schema(table))
        batch = buffer.take()
        self._streams[table].write(batch)
        if buffer.entries > _MOST_ENTRIES or buffer.dictionaries_size_bytes > _MOST_DICTIONARY_BYTES:
            buffer.forget_dictionaries()
        if table == "steps":
            self._last_step = max(self._last_step, pc.max(batch.column("step")).as_py())

    def _stop(self, table: str, why: str) -> None:
        """Stops writing, because the stream may lack dictionary entries to which later batches refer."""
        self._state = _STOPPED
        self._drop_buffers()
        self.mark(f"incomplete from step {self._last_step + 1}: {why} ({table}.arrow)")

    def _close_tensors(self) -> None:
        try:
            self._tensors.close()
        except BaseException:  # KeyboardInterrupt: the thread continues as long as the process
            self.mark("whole tensors may be missing: the close was interrupted before all were written")
            raise
        dropped = self._tensors.dropped
        if dropped.tensors:
            self.mark(
                f"{dropped.tensors} whole tensors ({dropped.size_bytes} bytes) were dropped from step "
                f"{dropped.first_step} on: they came faster than they could be written"
            )
        self._warn_of_tensors()

    def _warn_of_tensors(self) -> None:
        """Warns, once, that no more tensors are written."""
        failure = self._tensors.failure
        if failure is None or self._warned_of_tensors or not self._is_ours() or not self._is_in_place():
            return
        self._warned_of_tensors = True
        where = f"{failure.why} ({failure.file}; the first that is missing is {failure.name})"
        self.mark(f"whole tensors are incomplete from step {failure.step}: {where}")
        text = f"{self.path}: no more whole tensors are written from step {failure.step} on: {where}."
        if self._strict:
            raise RecordingError(text) from failure.error
        warnings.warn(f"{text} The run and the recording go on without them.", ModtraceWarning, 2)

    def _close_ring(self, *, keep: bool) -> None:
        if self._ring is not None:
            self._ring.close(keep=keep)

    def _drop_buffers(self) -> None:
        self._buffers = {name: TableBuffer(name) for name in self._buffers}

    def _make_final(self) -> None:
        was, self._state = self._state, _CLOSED
        self._close_ring(keep=was != _OPEN)
        if was == _LOST:
            return
        self._ended = []
        for table, stream in self._streams.items():
            with contextlib.suppress(OSError):  # then only the marker is missing
                if stream.finish():
                    self._ended.append(table)
        self._meta = replace(self._meta, complete=not self._meta.marks)
        self._save_meta()
        if was == _OPEN:
            self._compact()

    def _compact(self) -> None:
        for table, stream in self._streams.items():
            if not self._held.is_in_place():
                return
            if stream.batches > 1 and stream.rows < _COMPACT_BELOW_ROWS * stream.batches:
                with contextlib.suppress(OSError, pa.ArrowException):  # small batches are only slower to read
                    stream.size_bytes = compact(table_file(self.folder, table))

    def _save_meta(self) -> None:
        if not self._is_in_place():
            return
        try:
            shards = None if self._ended is None else self._tensors.files
            write_meta(self.folder, self._meta, ended=self._ended, shards=shards)
        except OSError as error:
            warnings.warn(
                f"{self.path}: meta.json cannot be written: {error.strerror or error}. "
                "The run goes on; the recording will not tell that it is closed, nor its marks.",
                ModtraceWarning,
                2,
            )
