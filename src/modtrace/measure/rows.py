"""Rows for raw statistics, which are preallocated and reused."""

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..torch_internals.graph_captures import BEING_CAPTURED, graph_captures
from ..torch_internals.modes import unseen
from .cpu_kernel import RawStatistics

Table = npt.NDArray[np.float64]

#: The column with the index of the first element that is not finite, -1 where it is not known. It has no meaning where
#: all are finite, because nothing writes it then.
FIRST_INDEX = len(RawStatistics._fields)

#: Columns of a row: the fields of `RawStatistics`, and that index.
WIDTH = FIRST_INDEX + 1

#: The columns that count what is not finite.
COUNTS = [RawStatistics._fields.index(name) for name in ("nan_count", "inf_count")]

#: Rows allocated at a time: 66 kB.
_BLOCK_ROWS = 1024


class _Blocks:
    """Numbers of free rows, and blocks of rows, which are added when no row is free. It is thread-safe."""

    def __init__(self, make_block: Callable[[], Any]) -> None:
        self.blocks: list[Any] = []
        self._make_block = make_block
        self._free: list[int] = []
        self._lock = threading.RLock()

    def take(self) -> int:
        try:
            return self._free.pop()  # atomic
        except IndexError:
            with self._lock:
                if self._free:  # another thread has just added a block
                    return self.take()
                first = len(self.blocks) * _BLOCK_ROWS
                self.blocks.append(self._make_block())
                self._free.extend(range(first + _BLOCK_ROWS - 1, first, -1))
                return first

    def free(self, rows: Sequence[int]) -> None:
        """Frees rows for other tensors."""
        self._free.extend(rows)


class HostRows(_Blocks):
    """Rows in main memory."""

    def __init__(self) -> None:
        super().__init__(self._make_host_block)
        self._addresses: list[int] = []  # of the blocks

    def put(self, statistics: RawStatistics) -> int:
        """Writes a row, and returns its number. It takes 0.3 us."""
        row = self.take()
        block, place = divmod(row, _BLOCK_ROWS)
        _pack_into(self.blocks[block], _ROW_BYTES * place, *statistics)
        return row

    def put_first_index(self, row: int, index: int) -> None:
        """Writes the index of the first element that is not finite into a row."""
        block, place = divmod(row, _BLOCK_ROWS)
        self.blocks[block][place, FIRST_INDEX] = index

    def address(self, row: int) -> int:
        """Returns the address of a row in memory."""
        block, place = divmod(row, _BLOCK_ROWS)
        return self._addresses[block] + _ROW_BYTES * place

    def read(self, rows: Sequence[int]) -> Table:
        """Returns the rows, `[rows, WIDTH]`."""
        return _gather(self.blocks, rows)

    def _make_host_block(self) -> Table:
        block = np.zeros((_BLOCK_ROWS, WIDTH))
        self._addresses.append(block.ctypes.data)
        return block


class DeviceRows(_Blocks):
    """Rows in the memory of a device, which are written and read in the order of its streams."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._make_device_block)
        self.device = device
        self._fetched: list[Table] | None = None  # the blocks on the host, while a CUDA graph is captured
        graph_captures.add(self)

    def row(self, number: int) -> torch.Tensor:
        """Returns the row with this number, `[WIDTH]` of float64, to be written."""
        block, place = divmod(number, _BLOCK_ROWS)
        written: torch.Tensor = self.blocks[block][place]
        return written

    def read(self, rows: Sequence[int]) -> Table:
        """Returns the rows, `[rows, WIDTH]`, after all work of the device so far. It is never called during a step.

        While a CUDA graph is captured, they are what they were when the capture began; nothing writes to them then.

        Raises:
            RuntimeError: a graph is captured, and the rows could not be fetched before.
        """
        with graph_captures.device_work() as is_allowed:
            blocks = self._fetched
            if is_allowed:
                self._fetched, blocks = None, self._copy_blocks()
        if blocks is None:
            raise RuntimeError(f"statistics were not read from {self.device}: {BEING_CAPTURED}")
        return _gather(blocks, rows)

    def fetch(self) -> None:
        """Copies all rows to the host."""
        try:
            self._fetched = self._copy_blocks()
        except Exception:  # a device that has failed: reading them says so
            self._fetched = None

    def _copy_blocks(self) -> list[Table]:
        with unseen(), torch.no_grad():
            if self.device.type not in ("cpu", "meta"):
                torch.get_device_module(self.device).synchronize(self.device)
            return [block.cpu().numpy() for block in self.blocks]

    def _make_device_block(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros((_BLOCK_ROWS, WIDTH), dtype=torch.float64, device=self.device)


#: The rows of one device.
Rows = HostRows | DeviceRows


def _gather(blocks: Sequence[Table], rows: Sequence[int]) -> Table:
    if not rows:
        return np.zeros((0, WIDTH))
    numbers = np.array(rows)
    table = np.empty((len(numbers), WIDTH))
    for at in np.unique(numbers // _BLOCK_ROWS).tolist():
        here = numbers // _BLOCK_ROWS == at
        table[here] = blocks[at][numbers[here] % _BLOCK_ROWS]
    return table


_ROW_BYTES = 8 * WIDTH
_pack_into = struct.Struct(f"{FIRST_INDEX}d").pack_into
