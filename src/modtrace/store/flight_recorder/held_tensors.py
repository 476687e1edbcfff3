"""Holds copies of whole tensors in memory, until their step is written or dropped."""

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

#: Prefix of the references of tensors that are not written yet.
_PREFIX = "held:"


class HeldTensor(NamedTuple):
    """A whole tensor, with the arguments for `Sink.put_tensor`."""

    name: str
    array: npt.NDArray[Any]
    dtype: str
    shape: tuple[int, ...]
    step: int


class HeldTensors:
    """Tensors to which no row refers yet, because rows are written when their step ends. Any thread may add one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: dict[str, HeldTensor] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._size_bytes = 0
        self._ended = -1  # the last step that has ended
        self.left_out = 0  # the number of tensors without room
        self.left_out_bytes = 0

    def put(
        self, name: str, array: npt.NDArray[Any], dtype: str, shape: Sequence[int], step: int | None
    ) -> str | None:
        """Keeps a copy; see `Sink.put_tensor`. Returns None if the open steps' tensors fill `max_bytes`."""
        with self._lock:
            if self._size_bytes + array.nbytes > self._max_bytes:
                self.left_out += 1
                self.left_out_bytes += array.nbytes
                return None
            self._size_bytes += array.nbytes
        try:
            own = np.array(array, order="C")  # outside of the lock, so that other threads can copy meanwhile
        except BaseException:
            with self._lock:
                self._size_bytes -= array.nbytes
            raise
        reference = f"{_PREFIX}{next(self._numbers)}"
        with self._lock:
            number = self._ended + 1 if step is None else step
            self._waiting[reference] = HeldTensor(name, own, dtype, tuple(shape), number)
        return reference

    def claim(self, references: Iterable[str | None]) -> dict[str, HeldTensor]:
        """Removes and returns the tensors to which rows refer."""
        with self._lock:
            claimed = {
                reference: self._waiting.pop(reference)
                for reference in references
                if reference and reference in self._waiting
            }
            self._size_bytes -= sum(tensor.array.nbytes for tensor in claimed.values())
        return claimed

    def end_step(self, number: int) -> None:
        """Ends a step. Tensors of earlier steps to which no row refers are dropped, since their steps are not kept."""
        with self._lock:
            self._ended = number
            # A step may still be divided, so a tensor of this step may belong to the next one.
            self.claim(
                [reference for reference, tensor in list(self._waiting.items()) if tensor.step + 1 < number]
            )

    def clear(self) -> None:
        """Drops all tensors."""
        self._waiting, self._size_bytes = {}, 0
