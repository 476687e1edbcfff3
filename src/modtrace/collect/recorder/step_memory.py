"""Reads how much memory is in use when a step ends."""

import os
import time
from collections.abc import Sequence
from types import ModuleType

from ...torch_internals.device_memory import find_device_modules, read_device_bytes

#: Reading the memory of devices may take this part of the time at most: torch takes 0.1 ms for it.
_MOST_TIME = 0.002


class StepMemory:
    """Reads the memory of the process, in 2 us, and that of devices, less often the longer it takes."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._page_bytes = 0
        self._devices: Sequence[ModuleType] = ()
        self._devices_from_ns = 0  # when devices may be read again

    def start(self) -> None:
        """Opens the file that tells the memory of the process, which Linux has, and finds devices."""
        self._devices = find_device_modules()
        try:
            self._page_bytes = os.sysconf("SC_PAGE_SIZE")
            self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError, AttributeError):
            self._file = None

    def stop(self) -> None:
        """Closes the file, also in a forked child."""
        file, self._file = self._file, None
        if file is None:
            return
        try:  # a program that closed all files may have opened another one of this number
            if os.readlink(f"/proc/self/fd/{file}").endswith("/statm"):
                os.close(file)
        except OSError:
            return

    def read(self) -> tuple[int | None, int | None]:
        """Returns the bytes of the process, and those in use by tensors on devices; None for what is not known."""
        return self._read_resident(), self._read_devices()

    def _read_resident(self) -> int | None:
        if self._file is None:
            return None
        try:
            return int(os.pread(self._file, 80, 0).split()[1]) * self._page_bytes
        except (OSError, ValueError, IndexError):  # the program has closed all files
            self._file = None
            return None

    def _read_devices(self) -> int | None:
        began_ns = time.perf_counter_ns() if self._devices else 0
        if not self._devices or began_ns < self._devices_from_ns:
            return None
        try:
            return read_device_bytes(self._devices)
        except RuntimeError:  # a device that has failed, which the program's next op will tell
            return None
        finally:
            now_ns = time.perf_counter_ns()
            self._devices_from_ns = now_ns + int((now_ns - began_ns) / _MOST_TIME)
