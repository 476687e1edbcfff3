"""Builds the simulated accelerator of `sim.cpp`, and registers it with torch as the device "sim"."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_SOURCE = Path(__file__).with_name("sim.cpp")
_BUILD = Path(__file__).parents[2] / "build" / "sim"
_TORCH = Path(torch.__file__).parent
_FLAGS = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC")
_COMPILER = shutil.which("g++") or shutil.which("clang++")

#: Why there is no simulated device here; None: there is one.
WHY_MISSING = None if _COMPILER else "there is no compiler of C++"

#: Whether tests are skipped for that reason. Where `CI` is "true" they fail: all tests must run there.
IS_SKIPPED = WHY_MISSING is not None and os.environ.get("CI") != "true"


class Counts(NamedTuple):
    """What devices were asked for."""

    launches: int  # kernels, and copies on devices
    to_host: int  # copies, and numbers that are read
    to_device: int  # copies
    waits: int  # of the host, for a device

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(mine - its for mine, its in zip(self, other, strict=True)))


@cache
def simulated() -> "SimulatedDevices":
    """Returns the devices, which live as long as the process. The first call compiles them: 15 s."""
    return SimulatedDevices(_build())


class SimulatedDevices:
    """Two devices, `sim:0` and `sim:1`."""

    count = 2

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name in ("sim_allocated", "sim_peak", "sim_capacity"):
            getattr(self.library, name).restype = ctypes.c_size_t
        for name in ("sim_stream", "sim_waits_of"):
            getattr(self.library, name).restype = ctypes.c_uint64
        self.library.sim_setup()
        torch.utils.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", _Module(self))
        torch.utils.generate_methods_for_privateuse1_backend()

    @property
    def counts(self) -> Counts:
        """What has been asked for since `reset()`."""
        found = (ctypes.c_long * len(Counts._fields))()
        self.library.sim_counts(found)
        return Counts(*found)

    def reset(self) -> None:
        self.library.sim_reset()

    def waits_of(self, thread: threading.Thread) -> int:
        """Returns how often a thread has waited since `reset()`."""
        return int(self.library.sim_waits_of(ctypes.c_long(thread.native_id or 0)))

    def stream(self, device: int) -> int:
        """Returns the handle of the current stream of a device."""
        return int(self.library.sim_stream(device))

    def allocated(self, device: int) -> int:
        return int(self.library.sim_allocated(device))

    @contextmanager
    def capacity(self, free_bytes: int, device: int = 0) -> Iterator[None]:
        """Leaves a device so much memory inside the block, beside what is allocated."""
        before = self.library.sim_capacity(device)
        self.library.sim_set_capacity(device, ctypes.c_size_t(self.allocated(device) + free_bytes))
        try:
            yield
        finally:
            self.library.sim_set_capacity(device, ctypes.c_size_t(before))

    def violations(self) -> list[str]:
        """Returns what was found wrong where nothing could be raised, and forgets it."""
        text, found = ctypes.create_string_buffer(400), []
        while self.library.sim_next_violation(text, len(text)):
            found.append(text.value.decode())
        return found


class _Module(types.ModuleType):
    """`torch.sim`: what torch asks of the module of a device."""

    Stream = torch.Stream
    Event = torch.Event

    def __init__(self, devices: SimulatedDevices) -> None:
        super().__init__("torch.sim")
        self._devices = devices

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    is_bf16_supported = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = staticmethod(lambda: None)
    device_count = staticmethod(lambda: SimulatedDevices.count)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    get_device_name = staticmethod(lambda device=None: "simulated device")

    # Random numbers are those of the CPU's generator, which torch seeds and restores by itself.
    manual_seed = manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.random.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.random.set_rng_state(state))

    current_stream = staticmethod(torch.accelerator.current_stream)
    set_stream = staticmethod(torch.accelerator.set_stream)
    stream = staticmethod(lambda stream: stream)  # it is a context manager

    def current_device(self) -> int:
        return int(self._devices.library.sim_device())

    def set_device(self, device: "torch.device | str | int") -> None:
        torch.accelerator.set_device_index(device)

    def device(self, device: "torch.device | str | int") -> "torch.accelerator.device_index":
        return torch.accelerator.device_index(_index(device))

    def default_stream(self, device: "torch.device | str | int | None" = None) -> torch.Stream:
        index = self.current_device() if device is None else _index(device)
        return torch.Stream(stream_id=0, device_index=index, device_type=_DEVICE_TYPE)

    def synchronize(self, device: "torch.device | str | int | None" = None) -> None:
        torch.accelerator.synchronize(self.current_device() if device is None else _index(device))

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self, device: "torch.device | str | int | None" = None) -> int:
        return self._devices.allocated(self.current_device() if device is None else _index(device))

    def max_memory_allocated(self, device: "torch.device | str | int | None" = None) -> int:
        return int(
            self._devices.library.sim_peak(self.current_device() if device is None else _index(device), 0)
        )

    def reset_peak_memory_stats(self, device: "torch.device | str | int | None" = None) -> None:
        self._devices.library.sim_peak(self.current_device() if device is None else _index(device), 1)


_DEVICE_TYPE = 20  # PrivateUse1


def _index(device: "torch.device | str | int") -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _build() -> Path:
    """Returns the library for this source, torch and compiler. Processes may build it at the same time."""
    if _COMPILER is None:
        raise RuntimeError(WHY_MISSING)
    includes = [f"-I{_TORCH / 'include'}", f"-I{_TORCH / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-ltorch"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [_COMPILER, *_FLAGS, abi, *includes, str(_SOURCE), *libraries]
    described = "\0".join((_SOURCE.read_text(), torch.__version__, *command))
    path = _BUILD / f"{hashlib.sha256(described.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{threading.get_native_id()}")
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.replace(path)
    return path
