"""Writes whole tensors to files beside the tables, on its own thread."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from ..recording.options.tensor_options import TensorOptions
from ..recording.raw_tensor import check_raw, copy_raw
from .shard_file import ShardFile, header_bytes, shard_file
from .tensor_ring import TensorPart, TensorRing, split

#: The space for the first shard's header. If a shard ends because its header is full, the next one has space for four
#: times as many names, up to about 8,000: names are kept in memory until the header is written (2 MB; with space for 16
#: MiB it was 34 MB).
_RESERVE_BYTES = 64 * 1024
_MOST_RESERVE_BYTES = 2**20
_HEADER_FRAME_BYTES = 256  # the size of a header without tensors

_LOOK_AFTER_S = 1.0  # the longest time that a signal may wait


class WriteFailure(NamedTuple):
    """Why no more tensors are written, and the first one that is missing in the files."""

    name: str
    step: int
    file: str
    why: str
    error: BaseException


class Dropped(NamedTuple):
    """Tensors that were left out because the buffer was full."""

    tensors: int = 0
    size_bytes: int = 0
    first_step: int = 0


class _Plan(NamedTuple):
    """The position that the next tensor will have."""

    number: int = 0
    shard: int = 0
    reserve_bytes: int = _RESERVE_BYTES
    data_bytes: int = 0  # the bytes in the shard so far
    header_bytes: int = _HEADER_FRAME_BYTES


class TensorShards:
    """The whole tensors of a rank. Any thread may call `put`; the first tensor starts the thread that writes.

    A tensor is copied into a ring while `put` runs, and written later. If writing fails, no more tensors are taken;
    what was written stays readable.
    """

    def __init__(
        self, folder: Path, options: TensorOptions, is_in_place: Callable[[], bool] = lambda: True
    ) -> None:
        """Creates the writer, which makes no file before the first tensor.

        Args:
            folder: the folder of the rank.
            options: how tensors are kept.
            is_in_place: returns whether the folder is still the one at its path. If not, no file is made there.
        """
        self.failure: WriteFailure | None = None
        self.dropped = Dropped()
        self._folder = folder
        self._options = options
        self._is_in_place = is_in_place
        self._ring = TensorRing(options.max_bytes)
        self._plan = _Plan()
        self._putting = threading.RLock()
        self._is_putting = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        # An interrupted join() treats a running thread as ended (CPython 3.11), so an event is used.
        self._is_done = threading.Event()
        self._file: ShardFile | None = None  # used only by the writing thread
        self._finished_bytes = 0
        self.files = 0  # how many files were made

    @property
    def size_bytes(self) -> int:
        """The bytes of the files on disk so far."""
        file = self._file
        return self._finished_bytes + (0 if file is None else file.size_bytes)

    def put(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int], step: int
    ) -> str | None:
        """Takes a copy of a tensor; see `Sink.put_tensor`.

        Raises:
            ValueError: the array does not hold a tensor of this dtype and shape.
        """
        check_raw(name, array, dtype, shape)
        with self._putting:
            if self.failure is not None or self._is_closed:
                return None
            if self._is_putting:  # a signal handler or destructor runs within a `put` of this thread
                self._drop(array.nbytes, step)
                return None
            try:
                self._is_putting = True
                return self._put(name, array, dtype, tuple(shape), step)
            finally:
                self._is_putting = False

    def wait(self) -> None:
        """Waits until all tensors so far are in the files, or writing has failed."""
        with self._putting:
            while not self._ring.is_empty and self._is_written():
                self._ring.wait_for_room(_LOOK_AFTER_S)

    def close(self) -> None:
        """Waits until all tensors are written, and finishes the files."""
        try:
            with self._putting:  # a tensor that another thread puts is complete or left out
                self._is_closed = True
        finally:
            self._ring.close()
        if self._thread is not None and self._thread.ident is not None:
            while not self._is_done.is_set():  # a signal that another thread receives does not end a wait
                self._is_done.wait(_LOOK_AFTER_S)
            self._thread.join()
        self._ring.abandon()

    def abandon(self) -> None:
        """Closes the files without writing, because this process is a fork, which lacks the parent's threads."""
        if self._file is not None:
            self._file.abandon()
        self._file = self._thread = None
        self._ring.abandon()

    def give_up(self) -> None:
        """Takes and writes no more tensors. `close` must still be called."""
        self._fail("", 0, OSError(errno.ENOENT, os.strerror(errno.ENOENT)))

    def _put(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: tuple[int, ...], step: int
    ) -> str | None:
        if (self._thread is None or self._thread.ident is None) and not self._start(name, step):
            return None
        if self._options.when_full == "drop" and self._ring.place(array.nbytes) is None:
            self._drop(array.nbytes, step)
            return None
        plan = self._plan
        # A name that is unique in the recording, and that JSON can hold.
        name = f"{plan.number:06d}.{name.encode('utf-8', 'replace').decode()}"
        plan = _with_tensor(plan, array.nbytes, header_bytes(name, dtype, shape), self._options.shard_bytes)
        self._plan = plan
        done = 0
        for piece in split(array, self._ring.size_bytes):
            start = self._wait_for_place(piece.nbytes)
            if start is None:
                return None
            copy_raw(piece, self._ring.view(start, piece.nbytes))
            first, done = done == 0, done + piece.nbytes
            self._ring.append(
                TensorPart(
                    *(plan.shard, plan.reserve_bytes, name, dtype, shape, step, start, piece.nbytes),
                    is_first=first,
                    is_last=done == array.nbytes,
                )
            )
        return f"{shard_file(self._folder, plan.shard).name}:{name}"

    def _start(self, name: str, step: int) -> bool:
        try:
            self._ring.allocate()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="modtrace tensors", daemon=True)
            self._thread.start()
        except (MemoryError, RuntimeError) as error:  # RuntimeError: the system has no more threads
            self._fail(name, step, error)
        return self.failure is None

    def _wait_for_place(self, size_bytes: int) -> int | None:
        """Waits for space and returns the position for this many bytes; None if writing has failed."""
        while True:
            start = self._ring.place(size_bytes)
            if start is not None or not self._is_written():
                return start
            self._ring.wait_for_room(_LOOK_AFTER_S)

    def _is_written(self) -> bool:
        return self.failure is None and not self._is_done.is_set()

    def _drop(self, size_bytes: int, step: int) -> None:
        count, dropped_bytes, first_step = self.dropped
        first_step = min(step, first_step) if count else step  # steps of several threads may overlap
        self.dropped = Dropped(count + 1, dropped_bytes + size_bytes, first_step)

    # The following methods run on the writing thread.

    def _run(self) -> None:
        try:
            try:
                for batch in self._ring.batches():
                    if self.failure is None:
                        try:
                            self._write(batch)
                        except BaseException as error:
                            self._fail(batch[0].name, batch[0].step, error)
            except BaseException as error:  # there was no memory for a list
                oldest = self._ring.oldest
                self._fail(*(("unknown", 0) if oldest is None else (oldest.name, oldest.step)), error)
            with contextlib.suppress(Exception):  # the index that remains lists what is in the file
                self._finish_file()
        finally:
            self._is_done.set()

    def _write(self, batch: Sequence[TensorPart]) -> None:
        first = batch[0]
        file = self._file_of(first)
        if first.is_whole:
            file.add([(part.name, part.dtype, part.shape, self._view(part)) for part in batch])
            return
        file.add_part(
            *(first.name, first.dtype, first.shape, self._view(first)),
            is_first=first.is_first,
            is_last=first.is_last,
        )

    def _file_of(self, part: TensorPart) -> ShardFile:
        if self._file is None or self._file.number != part.shard:
            self._finish_file()
            if not self._is_in_place():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._file = ShardFile(self._folder, part.shard, part.reserve_bytes)
            self.files = part.shard + 1
        return self._file

    def _finish_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._finished_bytes += file.size_bytes
            file.finish()

    def _view(self, part: TensorPart) -> memoryview:
        return self._ring.view(part.start, part.size_bytes).data

    def _fail(self, name: str, step: int, error: BaseException) -> None:
        if self.failure is None:
            file = shard_file(self._folder, self._plan.shard) if self._file is None else self._file.path
            why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            self.failure = WriteFailure(name, step, file.name, why, error)


def _with_tensor(plan: _Plan, data_bytes: int, entry_bytes: int, shard_bytes: int) -> _Plan:
    """Returns the plan with one more tensor, which is in the next shard if this one is full."""
    is_long = plan.header_bytes + entry_bytes > plan.reserve_bytes
    is_full = plan.data_bytes > 0 and plan.data_bytes + data_bytes > shard_bytes
    if is_long or is_full:
        reserve_bytes = min(4 * plan.reserve_bytes, _MOST_RESERVE_BYTES) if is_long else plan.reserve_bytes
        reserve_bytes = max(reserve_bytes, _HEADER_FRAME_BYTES + entry_bytes)
        plan = _Plan(plan.number, plan.shard + (plan.number > 0), reserve_bytes)
    return plan._replace(
        number=plan.number + 1,
        data_bytes=plan.data_bytes + data_bytes,
        header_bytes=plan.header_bytes + entry_bytes,
    )
