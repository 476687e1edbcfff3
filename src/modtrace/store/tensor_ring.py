"""Defines a ring buffer that takes the bytes of whole tensors from the training's threads to the writing thread."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64
_LEAST_BYTES = (
    512  # a smaller part counts as so many bytes of the ring, as its `TensorPart` takes about that much
)
_MOST_PARTS = 256  # the number of parts written at once, whose views fit into one `writev`
_MOST_BYTES = 8 * 2**20


class TensorPart(NamedTuple):
    """A tensor, or a part of one that is larger than the ring."""

    shard: int
    reserve_bytes: int  # the space for the header of the part's shard
    name: str
    dtype: str
    shape: tuple[int, ...]
    step: int
    start: int  # the position in the ring, in a count that never restarts
    size_bytes: int
    is_first: bool = True
    is_last: bool = True

    @property
    def is_whole(self) -> bool:
        """True if the part is a whole tensor."""
        return self.is_first and self.is_last


class TensorRing:
    """A ring buffer to which one thread at a time adds parts, and from which another removes them.

    It contains exactly the parts that were appended, from the oldest on. So nothing needs to be undone if an interrupt
    comes between any two lines of the adding thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self.size_bytes = max_bytes // _ALIGNMENT * _ALIGNMENT
        self._memory: npt.NDArray[np.uint8] | None = None
        self._parts: deque[TensorPart] = deque()
        self._lock = threading.Lock()
        self._room = threading.Event()
        self._ready = threading.Event()
        self._is_closed = False

    def place(self, size_bytes: int) -> int | None:
        """Returns the position for this many bytes; None if there is no space now, or never will be."""
        taken = _taken(size_bytes)
        if taken > self.size_bytes:
            return None
        with self._lock:
            if not self._parts:
                return 0
            tail, last = self._parts[0].start, self._parts[-1]
        start = last.start + _taken(last.size_bytes)
        if start % self.size_bytes + taken > self.size_bytes:
            start += -start % self.size_bytes  # a part must be contiguous
        return start if start + taken - tail <= self.size_bytes else None

    @property
    def is_empty(self) -> bool:
        """True if every part has been removed and released."""
        return not self._parts

    @property
    def oldest(self) -> TensorPart | None:
        """The part that is removed next."""
        return self._parts[0] if self._parts else None

    def wait_for_room(self, timeout_s: float) -> None:
        """Waits until a part is removed, or the time is over."""
        self._ready.set()
        self._room.wait(timeout_s)
        self._room.clear()

    def allocate(self) -> None:
        """Allocates the memory. The system provides its pages when they are first written to.

        Raises:
            MemoryError: there is not enough memory.
        """
        if self._memory is None:
            self._memory = np.empty(self.size_bytes, np.uint8)

    def view(self, position: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns the bytes at a position."""
        if self._memory is None:
            raise AssertionError("allocate() was not called")
        at = position % self.size_bytes
        return self._memory[at : at + size_bytes]

    def append(self, part: TensorPart) -> None:
        """Adds a part, whose bytes have been written to its position."""
        with self._lock:
            self._parts.append(part)
        if not self._ready.is_set():
            self._ready.set()

    def close(self) -> None:
        """Closes the ring: `batches` ends when all parts have been removed."""
        self._is_closed = True
        self._ready.set()

    def batches(self) -> Iterator[list[TensorPart]]:
        """Yields the parts in order and waits for them; several whole tensors of one shard at a time, or one part.

        The memory of a batch may be overwritten when the next batch is requested.
        """
        while True:
            self._ready.clear()
            batch = self._next_batch()
            if batch:
                yield batch
                self._release(len(batch))
            elif self._is_closed:
                return
            else:
                self._ready.wait()

    def abandon(self) -> None:
        """Drops the memory and all parts. It takes no lock, because in a fork no thread would release it."""
        self._memory = None
        self._parts = deque()

    def _next_batch(self) -> list[TensorPart]:
        batch: list[TensorPart] = []
        size_bytes = 0
        with self._lock:
            for part in self._parts:
                is_of_batch = part.is_whole and part.shard == batch[0].shard if batch else True
                if not is_of_batch or len(batch) == _MOST_PARTS or (batch and size_bytes > _MOST_BYTES):
                    break
                batch.append(part)
                size_bytes += part.size_bytes
                if not part.is_whole:
                    break
        return batch

    def _release(self, count: int) -> None:
        with self._lock:
            for _ in range(count):
                self._parts.popleft()
        self._room.set()


def split(array: npt.NDArray[Any], most_bytes: int) -> Iterator[npt.NDArray[Any]]:
    """Yields parts of the array of at most `most_bytes`, in row-major order.

    An array that fits is yielded unchanged.
    """
    if array.nbytes <= most_bytes:
        yield array
        return
    rows = most_bytes * len(array) // array.nbytes
    for start in range(0, len(array), rows or 1):
        yield from split(array[start : start + rows] if rows else array[start], most_bytes)


def _taken(size_bytes: int) -> int:
    return max(_LEAST_BYTES, size_bytes + -size_bytes % _ALIGNMENT)
