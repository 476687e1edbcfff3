"""Measures tensors on CUDA devices by kernels of our own, with one launch for each tensor.

A kernel writes its row into main memory, so nothing is copied and nobody waits for the device; see `ArrivingRows`.
"""

import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...errors import describe_error
from ...recording.statistics.fingerprints import SKETCH_SIZE, block_signs, block_swaps
from ...recording.statistics.number_formats import FLOAT8, float8_table
from ...recording.statistics.tier2 import BINS
from ...torch_internals.device_events import current_stream
from ...torch_internals.modes import tracing_state
from ...torch_internals.tensors import dispatch_keys
from ..dtypes import KINDS, Format, format_of
from ..moments.rows import AWAITED, WIDTH, ArrivingRows, plain_allocation
from ..tier2.tier2 import MOST_CHANNELS
from .nvrtc import compile_program

#: The compiled part. None: there was no C compiler at installation, or the system is not one of POSIX.
driver: Any
try:
    from . import _cuda_launch as driver
except ImportError:
    driver = None

#: The numbers of dtypes in numbers.cuh. A complex number is two numbers.
_KINDS = {
    **KINDS,
    torch.bool: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.uint16: 7,
    torch.int16: 8,
    torch.uint32: 9,
    torch.int32: 10,
    torch.uint64: 11,
    torch.int64: 12,
}
_TABLE = 13
_FLOAT8 = {getattr(torch, name): name for name in FLOAT8}

_DRIVER = "libcuda.so.1"
_MEASURE = Path(__file__).parents[1]
_STREAM_PER_THREAD = 2
_FUNCTIONS = ("measure_one", "measure_many")


class Kernel(NamedTuple):
    """What one launch measures of a tensor, and how it is cut into parts. Words have 8 bytes."""

    source: str  # the file that it is in
    part_bytes: int  # the least of a tensor that a block measures
    most_parts: int
    found_bytes: int  # of what is found in a part
    row_width: int  # of the result
    total_width: int  # of what the parts of a tensor add up to
    most_channels: int = 0  # whose maxima stand behind that, two in a word
    definitions: Callable[[], str] = str  # returns what stands in front of the source; `str()` is empty


def _tables_of_sketch() -> str:
    signs, swaps = (",".join(map(hex, table.tolist())) for table in (block_signs(), block_swaps()))
    return f"#define BLOCK_SIGNS {signs}\n#define BLOCK_SWAPS {swaps}\n"


#: The kernels. A tensor is cut in the same way on every card, which gives the same bits on every card. For a sketch the
#: last block reads 512 bytes of each part alone, so that there are few parts: as many as an H100 runs at once.
MOMENTS = Kernel("moments/moments.cu", 2**15, 2048, found_bytes=56, row_width=WIDTH, total_width=1)
TIER2 = Kernel("tier2/tier2.cu", 2**16, 512, 40, BINS + 4, BINS + 1, MOST_CHANNELS)
FINGERPRINT = Kernel(
    "fingerprints/fingerprint.cu",
    2**16,
    512,
    8 * SKETCH_SIZE,
    SKETCH_SIZE + 2,
    2,
    definitions=_tables_of_sketch,
)
SAMPLES = Kernel("tier2/sample.cu", 2**16, 1, found_bytes=8, row_width=1, total_width=1)


@cache
def find_kernels(device: torch.device, kernel: Kernel = MOMENTS) -> "CudaKernels | None":
    """Returns a kernel for each dtype on a device; None if it has none."""
    return CudaKernels(device, kernel) if device.type == "cuda" and why_no_kernels() is None else None


def describe_path(device: torch.device) -> str:
    """Returns how tensors on a device are measured. It compiles a kernel if none has been compiled yet."""
    kernels = find_kernels(device)
    if kernels is None:
        reason = why_no_kernels() if device.type == "cuda" else f"there are none for {device.type}"
    elif kernels.new_batch(torch.float32) is not None:
        return "by one kernel for each tensor"
    else:
        reason = kernels.problem
    return f"by torch's ops, which takes many times as long, without kernels of modtrace's own: {reason}"


@cache
def why_no_kernels() -> str | None:
    """Returns the reason why no CUDA device can have kernels of our own; None if they can."""
    if driver is None:
        return "modtrace was built without a C compiler"
    if torch.version.cuda is None:
        return "torch is built without CUDA"
    try:
        driver.open(_DRIVER)
    except OSError as error:
        return str(error)
    return None


def launcher(kinds: tuple[int, ...], kind: type, paths: dict[torch.device, tuple[Any, ...]]) -> Any:
    """Returns a `Launcher` of _cuda_launch.c, which measures a tensor in 3 us where Python takes 5.

    Args:
        kinds: `kind_of` the tensors that it measures.
        kind: the class of measurements: with rows, row, shape, dtype, note, start_ns and extra.
        paths: `CudaKernels.path` of each device.
    """
    types = torch.Tensor, torch.nn.Parameter
    return driver.Launcher(types, kinds, dispatch_keys, tracing_state, current_stream, kind, paths)


class _Program(NamedTuple):
    """A kernel for a dtype, as _cuda_launch.c reads it."""

    context: int
    measure_one: int
    measure_many: int
    number_bytes: int
    part_bytes: int
    parts: int  # numbers of an element
    most_parts: int
    row_width: int
    total_width: int


class _Scratch(NamedTuple):
    """The addresses of memory in which the blocks of a launch leave what they find. Launches of a stream share it."""

    parts: int
    totals: int  # 0 before and after each launch


class _ScratchOfMany(NamedTuple):
    """The same of launches for many tensors, with the table of the tensors."""

    memory: torch.Tensor
    sizes: tuple[int, int, int]  # bytes of the table, blocks, words of the totals
    addresses: tuple[int, int, int]  # of the table, the parts and the totals

    @classmethod
    def allocate(
        cls, device: torch.device, found_bytes: int, sizes: tuple[int, int, int]
    ) -> "_ScratchOfMany":
        table_bytes, blocks, totals = sizes
        table_bytes += -table_bytes % 8
        with plain_allocation():
            memory = torch.zeros(
                table_bytes + found_bytes * blocks + 8 * totals, dtype=torch.uint8, device=device
            )
            table = memory.data_ptr()
        parts = table + table_bytes
        return cls(memory, sizes, (table, parts, parts + found_bytes * blocks))


class _Table(NamedTuple):
    """Pinned memory for the table of a launch. Its own row is awaited until the device has read it."""

    memory: torch.Tensor
    size_bytes: int
    address: int
    row: npt.NDArray[np.uint64]

    @classmethod
    def allocate(cls, size_bytes: int, row_width: int) -> "_Table":
        with plain_allocation():
            memory = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
            row = memory.numpy()[: 8 * row_width].view(np.uint64)
        return cls(memory, size_bytes, row.ctypes.data, row)

    @property
    def is_free(self) -> bool:
        return not (self.row == AWAITED).any()


class Task(NamedTuple):
    """Dense memory that is measured."""

    address: int
    numbers: int
    repeats: int
    parts: int  # numbers of an element; 0: the index of the first one that is not finite is not known
    row_address: int
    wanted: int = 0  # as fingerprint.cu numbers it
    channels: int = 0  # whose largest magnitudes are wanted
    inner: int = 0  # numbers of a channel that lie side by side


class CudaKernels:
    """A kernel on one CUDA device, for each dtype."""

    def __init__(
        self,
        device: torch.device,
        kernel: Kernel = MOMENTS,
        compiles: Callable[..., bytes] | None = None,
    ) -> None:
        """Compiles nothing before the first tensor of a dtype.

        Args:
            device: a CUDA device with an index.
            kernel: what it measures.
            compiles: returns the code for the source and the options of a program, in place of NVRTC.
        """
        self.device = device
        self.kernel = kernel
        self._problems: dict[torch.dtype, str] = {}  # why there is no kernel
        self._compiles = compiles or partial(_compile_for, device)
        self._programs: dict[torch.dtype, _Program] = {}
        self._scratch: dict[int, _Scratch] = {}  # by stream
        self._memory: list[torch.Tensor] = []  # of the scratch
        self._of_many: dict[int, _ScratchOfMany] = {}
        self._tables: list[_Table] = []
        self._lock = threading.Lock()
        self._launching = threading.Lock()

    def may_measure(self, dtype: torch.dtype) -> bool:
        """Returns whether there is a kernel for a dtype, or there may be one."""
        return dtype not in self._problems

    @property
    def problem(self) -> str | None:
        """The reason why there is no kernel for the first dtype that lacks one; None if all have one."""
        return next(iter(self._problems.values()), None)

    def path(self, rows: ArrivingRows) -> tuple[Any, ...]:
        """Returns a `Path` of _cuda_launch.c: how tensors on this device are measured into rows."""
        forms = {dtype: format_of(dtype) for dtype in (*_KINDS, *_FLOAT8)}
        notes = {dtype: form.note for dtype, form in forms.items() if form is not None}
        return self.device.index, self._programs, notes, self._scratch, *rows.path()

    def measure(self, task: "Task", dtype: torch.dtype) -> bool:
        """Launches the kernel for memory that is dense.

        Returns:
            False if nothing is launched: the stream is being captured, or this dtype has no kernel.

        Raises:
            RuntimeError: the driver refuses.
        """
        program = self._programs.get(dtype) or self._load(dtype)
        if program is None:
            return False
        stream = current_stream(self.device.index)
        if stream == _STREAM_PER_THREAD:  # one handle for several streams, which must not share their scratch
            return False
        scratch = self._scratch.get(stream) or self._new_scratch(stream)
        return bool(driver.measure(task, program, stream, scratch))

    def new_batch(self, dtype: torch.dtype) -> Any:
        """Returns an empty `Batch` of _cuda_launch.c for tensors of a dtype; None if the dtype has no kernel."""
        program = self._programs.get(dtype) or self._load(dtype)
        is_shared = current_stream(self.device.index) == _STREAM_PER_THREAD
        return None if program is None or is_shared else driver.Batch(program)

    def launch(self, batch: Any) -> bool:
        """Launches one kernel for all tensors of a batch on the current stream.

        Nothing may write to the tensors, or free them, before this has returned.

        Returns:
            False if nothing is launched: the stream is being captured in a CUDA graph.

        Raises:
            RuntimeError: the driver refuses.
        """
        stream = current_stream(self.device.index)
        sizes: tuple[int, int, int] = batch.sizes()
        with self._launching:  # two threads may use one stream, whose table is overwritten by each launch
            scratch = self._scratch_of_many(stream, sizes)
            table = self._free_table(sizes[0])
            return bool(batch.launch(stream, table.address, *scratch.addresses))

    def _free_table(self, size_bytes: int) -> _Table:
        """Returns a table that no earlier launch is going to read."""
        for table in self._tables:
            if table.size_bytes >= size_bytes and table.is_free:
                return table
        table = _Table.allocate(2 * size_bytes, self.kernel.row_width)
        self._tables.append(table)
        return table

    def _scratch_of_many(self, stream: int, sizes: tuple[int, int, int]) -> "_ScratchOfMany":
        scratch = self._of_many.get(stream)
        if scratch is None or any(has < needs for has, needs in zip(scratch.sizes, sizes, strict=True)):
            table_bytes, blocks, totals = sizes
            scratch = self._of_many[stream] = _ScratchOfMany.allocate(
                self.device, self.kernel.found_bytes, (2 * table_bytes, 2 * blocks, 2 * totals)
            )
        return scratch

    def _load(self, dtype: torch.dtype) -> _Program | None:
        form = format_of(dtype)
        with self._lock:
            if dtype not in self._programs and dtype not in self._problems and form is not None:
                try:
                    code = self._compiles(_source(self.kernel), _definitions(dtype))
                    functions = driver.load(self.device.index, code, _FUNCTIONS)
                    self._programs[dtype] = self._program(form, functions)
                except Exception as error:  # no NVRTC, a driver that is older than it: torch's ops do as well
                    self._problems[dtype] = describe_error(error)
        return self._programs.get(dtype)

    def _program(self, form: Format, functions: tuple[int, int, int]) -> _Program:
        of = self.kernel
        number_bytes = np.dtype(form.raw).itemsize
        return _Program(
            *functions, number_bytes, of.part_bytes, form.parts, of.most_parts, of.row_width, of.total_width
        )

    def _new_scratch(self, stream: int) -> _Scratch:
        of = self.kernel
        parts_bytes, totals = of.found_bytes * of.most_parts, of.total_width + of.most_channels // 2
        with plain_allocation():
            memory = torch.zeros(parts_bytes + 8 * totals, dtype=torch.uint8, device=self.device)
            address = memory.data_ptr()
        self._memory.append(memory)
        scratch = self._scratch[stream] = _Scratch(address, address + parts_bytes)
        return scratch


def _compile_for(device: torch.device, source: str, options: tuple[str, ...]) -> bytes:
    return compile_program(source, torch.cuda.get_device_capability(device), options)


def _definitions(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype not in _FLOAT8:
        return (f"-DKIND={_KINDS[dtype]}",)
    bits = float8_table(_FLOAT8[dtype]).astype(np.float32).view(np.uint32)
    return f"-DKIND={_TABLE}", f"-DNUMBER_BITS={','.join(map(hex, bits.tolist()))}"


@cache
def _source(kernel: Kernel) -> str:
    files = ((_MEASURE / name).read_text() for name in ("cuda/numbers.cuh", kernel.source))
    return "\n".join((kernel.definitions(), *files))
