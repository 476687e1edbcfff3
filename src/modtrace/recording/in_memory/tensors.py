"""Keeps whole tensors in memory. If they are too large, the oldest are dropped."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import RecordingError
from ..raw_tensor import RawTensor, check_raw, copy_raw

#: Used in place of the file's name in references to tensors in memory.
IN_MEMORY = "memory"

_LEAST_BYTES = 512  # roughly what a tensor takes besides its elements


class TensorMemory:
    """The whole tensors of a recording in memory. Any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._kept: dict[str, _Kept] = {}  # by reference, oldest first
        self._count = 0
        self._last_dropped_step = -1
        self._lock = threading.RLock()

    @property
    def marks(self) -> tuple[str, ...]:
        """A sentence on what was dropped; empty if nothing was."""
        if self._last_dropped_step < 0:
            return ()
        return (
            f"whole tensors of steps before {self._last_dropped_step + 1} were dropped "
            f"to stay within max_bytes={self._max_bytes}",
        )

    def put(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int], step: int
    ) -> str | None:
        """Keeps a copy of a tensor; see `Sink.put_tensor`."""
        check_raw(name, array, dtype, shape)
        size_bytes = max(array.nbytes, _LEAST_BYTES)
        if size_bytes > self._max_bytes:
            self._note_dropped(step)
            return None
        own = np.empty(array.nbytes, np.uint8)
        copy_raw(array, own)
        raw = RawTensor(dtype=dtype, shape=tuple(shape), data=own.data.toreadonly())
        with self._lock:
            blob = f"{IN_MEMORY}:{self._count:06d}.{name}"
            self._count += 1
            self._kept[blob] = _Kept(raw, step, size_bytes)
            self.size_bytes += size_bytes
            self._drop_oldest()
        return blob

    def get(self, blob: str) -> RawTensor:
        """Returns the tensor with a reference that `put` returned.

        Raises:
            RecordingError: it was dropped, or never kept.
        """
        kept = self._kept.get(blob)
        if kept is None:
            why = self.marks[0] if self.marks else "the recording in memory has none of this name"
            raise RecordingError(f"{blob}: this tensor is not here: {why}.")
        return kept.raw

    def clear(self) -> None:
        """Drops all tensors."""
        self._kept = {}
        self.size_bytes = 0

    def _drop_oldest(self) -> None:
        while self.size_bytes > self._max_bytes:
            dropped = self._kept.pop(next(iter(self._kept)))
            self.size_bytes -= dropped.size_bytes
            self._note_dropped(dropped.step)

    def _note_dropped(self, step: int) -> None:
        self._last_dropped_step = max(step, self._last_dropped_step)


class _Kept(NamedTuple):
    raw: RawTensor
    step: int
    size_bytes: int
