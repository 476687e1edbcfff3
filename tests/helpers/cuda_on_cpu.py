"""A device of CUDA that main memory stands for: kernels run on the CPU, each thread as a fiber."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from modtrace.measure.cuda import cuda_kernels
from modtrace.measure.cuda.cuda_kernels import FINGERPRINT, MOMENTS, SAMPLES, TIER2, CudaKernels, Kernel
from modtrace.measure.measurers import cuda_extras, extras, measurer
from modtrace.measure.moments import rows
from modtrace.torch_internals.tensors import plain_kinds

_HERE = Path(__file__).parent
_SOURCES = Path(cuda_kernels.__file__).parent
_FLAGS = ("-O1", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC")
_COMPILER = shutil.which("g++") or shutil.which("clang++")

#: Holds what was compiled, under the hash of what it was compiled from: it takes seconds, in each process of tests.
_BUILT = _HERE.parents[1] / "build" / "cuda_on_cpu"

KERNELS = (MOMENTS, TIER2, FINGERPRINT, SAMPLES)

needs_compiler = pytest.mark.skipif(
    _COMPILER is None or cuda_kernels.driver is None, reason="there is no compiler of C++"
)


class FakeCuda:
    """The driver in `fake_cuda.cpp`."""

    def __init__(self) -> None:
        self.path = self._compile("fake_cuda.cpp")
        self._library = ctypes.CDLL(str(self.path))
        self.reset()

    def __enter__(self) -> "FakeCuda":
        return self

    def __exit__(self, *raised: object) -> None:
        """A device that there is has its own driver again, and the next user of this one starts anew."""
        self.surround()
        for kept in (cuda_kernels.find_kernels, cuda_kernels.why_no_kernels, rows.arriving_rows):
            kept.cache_clear()

    def compile(self, source: str, options: Sequence[str]) -> bytes:
        """Takes the place of `compile_program`."""
        return str(self._compile("kernels_on_cpu.cpp", source, *options)).encode() + b"\0"

    def kernels(self, device: int = 0, kernel: Kernel = MOMENTS) -> CudaKernels:
        return CudaKernels(torch.device("cpu", device), kernel, self.compile)

    def reset(self, seed: int = 0) -> None:
        """Forgets all launches; blocks run in another order for each seed.

        Whatever uses the driver now uses this one: the process has one driver, and tests of other files open theirs.
        """
        cuda_kernels.driver.open(str(self.path))
        self._library.fake_reset(seed)

    def capture(self, stream: int) -> None:
        self._library.fake_capture(ctypes.c_uint64(stream))

    def defer(self, whether: bool = True) -> None:
        """Kernels run only in `run()`."""
        self._library.fake_defer(whether)

    def run(self) -> None:
        self._library.fake_run()

    def fail(self, status: int) -> None:
        """Lets the next launch fail."""
        self._library.fake_fail(status)

    def surround(self, begin: object = None, end: object = None) -> None:
        """Calls two C functions around each kernel and copy: `begin(stream, is_copy)` and `end()`."""
        self._library.fake_surround(begin, end)

    def stream(self, device: int) -> int:
        """Returns the default stream of a device."""
        return (ctypes.c_uint64 * 2).in_dll(self._library, "fake_streams")[device]

    @property
    def launches(self) -> int:
        return ctypes.c_uint64.in_dll(self._library, "fake_launches").value

    @property
    def copies(self) -> int:
        return ctypes.c_uint64.in_dll(self._library, "fake_copies").value

    @property
    def refused(self) -> int:
        return ctypes.c_uint64.in_dll(self._library, "fake_refused").value

    def _compile(self, program: str, kernels: str = "", *options: str) -> Path:
        read = [_HERE / program, _HERE / "cuda_on_cpu.h", *sorted(_SOURCES.glob("*.cuh"))]
        parts = [*(file.read_text() for file in read), kernels, str(_COMPILER), *_FLAGS, *options]
        path = _BUILT / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
        if not path.exists():
            _BUILT.mkdir(parents=True, exist_ok=True)
            own = path.with_suffix(f".{os.getpid()}.so")  # another process may compile the same
            source = own.with_suffix(".cu")
            source.write_text(kernels)
            arguments = (*_FLAGS, f'-DSOURCE="{source}"', *options, "-I", str(_SOURCES), str(_HERE / program))
            subprocess.run([_COMPILER, *arguments, "-o", str(own)], check=True)
            own.rename(path)
        return path


def as_device(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has tensors of main memory measured as those of a device with kernels."""
    kernels, zeros = {kernel: fake.kernels(kernel=kernel) for kernel in KERNELS}, torch.zeros
    rows.arriving_rows.cache_clear()
    monkeypatch.setattr(cuda_kernels, "current_stream", fake.stream)
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(rows.ArrivingRows, "_has_ended_work", lambda self: True)
    for module in (measurer, extras):
        monkeypatch.setattr(module, "is_on_device", lambda tensor: True)
        monkeypatch.setattr(module, "plain_kinds", lambda device="": plain_kinds(device) if device else ())
    for module in (measurer, cuda_extras):
        monkeypatch.setattr(module, "find_kernels", lambda device, kernel=MOMENTS: kernels[kernel])
