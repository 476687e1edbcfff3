"""Rows for raw statistics, which are preallocated and reused."""

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...torch_internals.graph_captures import BEING_CAPTURED, graph_captures
from ...torch_internals.modes import unseen
from ...torch_internals.transforms import plain_ops
from .cpu_kernel import RawStatistics

Table = npt.NDArray[np.float64]

#: The column with the index of the first element that is not finite, -1 where it is not known. It has no meaning where
#: all are finite, because nothing writes it then.
FIRST_INDEX = len(RawStatistics._fields)

#: Columns of a row: the fields of `RawStatistics`, and that index.
WIDTH = FIRST_INDEX + 1

#: The columns that count what is not finite.
COUNTS = [RawStatistics._fields.index(name) for name in ("nan_count", "inf_count")]

#: Rows allocated at a time, and the most bytes of them: 66 kB of the rows of statistics, 1,024 of which are a block.
_MOST_ROWS, _MOST_BYTES = 1024, 2**19

#: What a word of a row holds until a kernel has written it: a NaN that no arithmetic gives. As in _cuda_launch.c.
AWAITED = 0x7FF8_A3A1_7ED0_0001

#: A device whose rows have not come for so long is asked whether it still works.
_PATIENCE_S = 10.0


class _Blocks:
    """Numbers of free rows, and blocks of rows, which are added when no row is free. It is thread-safe."""

    def __init__(self, make_block: Callable[[], Any], width: int = WIDTH) -> None:
        self.blocks: list[Any] = []
        self._block_rows = min(_MOST_ROWS, max(1, _MOST_BYTES // (8 * width)))
        self._make_block = make_block
        self._free: list[int] = []
        self._lock = threading.RLock()

    def take(self) -> int:
        try:
            return self._free.pop()  # atomic
        except IndexError:
            with self._lock:
                if self._free or self._reclaim():  # another thread has just added a block
                    return self.take()
                first = len(self.blocks) * self._block_rows
                self.blocks.append(self._make_block())
                self._free.extend(range(first + self._block_rows - 1, first, -1))
                return first

    def free(self, rows: Sequence[int]) -> None:
        """Frees rows for other tensors."""
        self._free.extend(rows)

    def untake(self, row: int) -> None:
        """Frees a row that nothing writes to after all."""
        block, place = divmod(row, self._block_rows)
        self.blocks[block][place] = 0
        self._free.append(row)

    def _reclaim(self) -> bool:
        """Returns whether there are free rows after all."""
        return False


class HostRows(_Blocks):
    """Rows in main memory."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(self._make_host_block, width)
        self.width = width
        self._addresses: list[int] = []  # of the blocks

    def put(self, statistics: RawStatistics) -> int:
        """Writes a row, and returns its number. It takes 0.3 us."""
        row = self.take()
        block, place = divmod(row, self._block_rows)
        _pack_into(self.blocks[block], _ROW_BYTES * place, *statistics)
        return row

    def put_first_index(self, row: int, index: int) -> None:
        """Writes the index of the first element that is not finite into a row."""
        block, place = divmod(row, self._block_rows)
        self.blocks[block][place, FIRST_INDEX] = index

    def path(self) -> tuple[Any, ...]:
        """Returns what C code needs to take a free row by itself.

        That is this object, the numbers of free rows, the addresses of blocks, the rows of a block, and the bytes of a
        row.
        """
        return self, self._free, self._addresses, self._block_rows, 8 * self.width

    def address(self, row: int) -> int:
        """Returns the address of a row in memory."""
        block, place = divmod(row, self._block_rows)
        return self._addresses[block] + 8 * self.width * place

    def read(self, rows: Sequence[int]) -> Table:
        """Returns the rows, `[rows, width]`."""
        return _gather(self.blocks, rows)

    def _make_host_block(self) -> Table:
        block = np.zeros((self._block_rows, self.width))
        self._keep_address(block)
        return block

    def _keep_address(self, block: Table) -> None:
        # Not `append`: Ctrl-C may come right behind, and the block is lost.
        self._addresses[len(self.blocks) :] = [block.ctypes.data]


@contextmanager
def plain_allocation() -> Iterator[None]:
    """Makes tensors inside the block ordinary ones, which no mode and no transform of the user's sees."""
    with torch.inference_mode(False), plain_ops():
        yield


@cache
def arriving_rows(device: torch.device, width: int = WIDTH) -> "ArrivingRows":
    """Returns the rows of a device. They live as long as the process: a kernel may write one at any time."""
    return ArrivingRows(device, width)


class ArrivingRows(HostRows):
    """Rows in main memory that kernels on a device write themselves, at any time after their launch.

    The launch fills a row with `AWAITED`, which no kernel writes; a row has arrived when it has none any more. So
    rows are read without a call of the device's driver, which might end the capture of a CUDA graph.
    """

    def __init__(self, device: torch.device, width: int = WIDTH) -> None:
        super().__init__(width)
        self.device = device
        self._left: list[int] = []  # free as soon as they have arrived
        self._memory: list[torch.Tensor] = []  # of the blocks

    def read(self, rows: Sequence[int]) -> Table:
        """Returns the rows, `[rows, width]`, when all have arrived. It is never called during a step.

        Raises:
            RuntimeError: the device has failed, or it has ended its work without writing them.
        """
        table = _gather(self.blocks, rows)
        awaited = np.flatnonzero(_are_awaited(table))
        pause_s, ask_at_s = 2e-5, time.monotonic() + _PATIENCE_S
        while len(awaited):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
            has_ended = False
            if time.monotonic() > ask_at_s:
                has_ended, ask_at_s = self._has_ended_work(), time.monotonic() + _PATIENCE_S
            table[awaited] = _gather(self.blocks, [rows[at] for at in awaited.tolist()])
            awaited = awaited[_are_awaited(table[awaited])]
            if has_ended and len(awaited):
                raise RuntimeError(
                    f"{len(awaited)} of {len(rows)} rows of statistics never came from {self.device}"
                )
        return table

    def free(self, rows: Sequence[int]) -> None:
        with self._lock:
            are_awaited = _are_awaited(_gather(self.blocks, rows)).tolist()
            super().free([row for row, awaited in zip(rows, are_awaited, strict=True) if not awaited])
            self._left += [row for row, awaited in zip(rows, are_awaited, strict=True) if awaited]

    def _reclaim(self) -> bool:
        left, self._left = self._left, []
        self.free(left)
        return bool(self._free)

    def _has_ended_work(self) -> bool:
        """Returns whether all work of the device has ended. It waits for that, unless a CUDA graph is captured."""
        with graph_captures.device_work() as is_allowed:
            if is_allowed:
                torch.get_device_module(self.device).synchronize(self.device)
        return is_allowed

    def _make_host_block(self) -> Table:
        with graph_captures.device_work() as is_allowed, plain_allocation():
            if not is_allowed:
                raise RuntimeError(BEING_CAPTURED)
            memory = torch.zeros((self._block_rows, self.width), dtype=torch.float64, pin_memory=True)
            block: Table = memory.numpy()
        self._memory.append(memory)
        self._keep_address(block)
        return block


class Parts(NamedTuple):
    """What the host knows of a tensor whose statistics lie in rows of a device.

    The rows lack what this says: their first column is not written, they have the sums of each element once, all that
    is not finite in place of what is infinite, and the index as an integer, which counts from the start of the part.
    """

    rows: tuple[int, ...]  # of the parts of the tensor, in its order; it is read by the first
    numbers: int  # in the tensor, those of a repeated element once
    part_size: int  # numbers in each part but the last
    repeats: int  # how often each number counts
    divisor: int  # numbers of an element; 0: the index is not one in the tensor


class DeviceRows(_Blocks):
    """Rows in the memory of a device, which are written and read in the order of its streams."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._make_device_block)
        self.device = device
        self._parts: dict[int, Parts] = {}  # by first row
        self._fetched: list[Table] | None = None  # the blocks on the host, while a CUDA graph is captured
        graph_captures.add(self)

    def row(self, number: int) -> torch.Tensor:
        """Returns the row with this number, `[WIDTH]` of float64, to be written."""
        block, place = divmod(number, self._block_rows)
        written: torch.Tensor = self.blocks[block][place]
        return written

    def join(self, parts: Parts) -> int:
        """Returns the row that has the statistics of a tensor when it is read. It frees them all."""
        self._parts[parts.rows[0]] = parts
        return parts.rows[0]

    def free(self, rows: Sequence[int]) -> None:
        joined = [self._parts.pop(row, None) for row in rows]
        super().free([*rows, *(row for parts in joined if parts is not None for row in parts.rows[1:])])

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
        return self._joined(_gather(blocks, rows), rows, blocks)

    def _joined(self, table: Table, rows: Sequence[int], blocks: Sequence[Table]) -> Table:
        """Returns the table with what the host knows of the tensors."""
        known = [(at, self._parts[row]) for at, row in enumerate(rows) if row in self._parts]
        if known:
            for at, parts in known:
                if len(parts.rows) > 1:
                    table[at] = _fold(_gather(blocks, parts.rows), parts.part_size)
            places = [at for at, _ in known]
            table[places] = _complete(table[places], [parts for _, parts in known])
        return table

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
            return torch.zeros((self._block_rows, WIDTH), dtype=torch.float64, device=self.device)


#: The rows of one device.
Rows = HostRows | DeviceRows


def _are_awaited(table: Table) -> npt.NDArray[np.bool_]:
    awaited: npt.NDArray[np.bool_] = (table.view(np.uint64) == AWAITED).any(axis=1)
    return awaited


def _fold(table: Table, part_size: int) -> npt.NDArray[np.float64]:
    """Returns one row for the parts of a tensor."""
    row = np.empty(WIDTH)
    row[_MIN], row[_MAX] = table[:, _MIN].min(), table[:, _MAX].max()  # NaN if one of them is
    with np.errstate(invalid="ignore"):  # infinities of both signs
        row[_SUMS] = table[:, _SUMS].sum(axis=0)
    first = int(np.argmax(table[:, _NONFINITE] > 0))
    row.view(np.int64)[FIRST_INDEX] = first * part_size + table.view(np.int64)[first, FIRST_INDEX]
    return row


def _complete(table: Table, parts: Sequence[Parts]) -> Table:
    """Returns rows of tensors, one for each, as a kernel of modtrace's own would have written them."""
    counts, _, repeats, divisors = np.array([known[1:] for known in parts]).T
    indices = table.view(np.int64)[:, FIRST_INDEX] // np.maximum(divisors, 1)
    has_index = (divisors > 0) & (table[:, _NONFINITE] > 0)
    table[:, FIRST_INDEX] = np.where(has_index, indices, -1)
    table[:, _NONFINITE] -= table[:, _NONFINITE - 1]
    table[:, 0] = counts
    table[counts == 0] = _OF_NOTHING
    table[:, 0] *= repeats
    table[:, _SUMS] *= repeats[:, None]
    return table


def _gather(blocks: Sequence[Table], rows: Sequence[int]) -> Table:
    if not rows:
        return np.zeros((0, WIDTH))
    block_rows, width = blocks[0].shape
    numbers = np.array(rows)
    table = np.empty((len(numbers), width))
    for at in np.unique(numbers // block_rows).tolist():
        is_of_block = numbers // block_rows == at
        table[is_of_block] = blocks[at][numbers[is_of_block] % block_rows]
    return table


_MIN, _MAX, _SUMS = 1, 2, slice(3, FIRST_INDEX)  # the sums, and what is not finite
_NONFINITE = FIRST_INDEX - 1  # behind the count of NaN
_OF_NOTHING = (0, np.nan, np.nan, 0, 0, 0, 0, -1)
_ROW_BYTES = 8 * WIDTH
_pack_into = struct.Struct(f"{FIRST_INDEX}d").pack_into
