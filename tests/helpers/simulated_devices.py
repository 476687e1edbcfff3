"""Devices, simulated by main memory, that work late: kernels run when those issued before on their stream have run.

A float64 tensor lies on device 1, another one of floats on device 0, one of integers on none. Time passes when somebody
asks for it, and when somebody sleeps.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from modtrace.collect.log import device_clock, device_times


@dataclass(eq=False)
class SimulatedEvent:
    """Stands for `torch.cuda.Event`."""

    device: int
    passes_ns: int = -1  # on the clock of the host


@dataclass(frozen=True)
class Kernel:
    """What a device did, on the clock of the host."""

    name: str
    device: int
    stream: int
    start_ns: int
    end_ns: int


class SimulatedTime:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000_000
        self.sleepers: list[str] = []  # the names of threads
        self._lock = threading.Lock()

    def perf_counter_ns(self) -> int:
        with self._lock:
            self.now_ns += 500
            return self.now_ns

    def monotonic(self) -> float:
        return self.perf_counter_ns() / 1e9

    def sleep(self, seconds: float) -> None:
        self.sleepers.append(threading.current_thread().name)
        with self._lock:
            self.now_ns += int(seconds * 1e9)


class SimulatedDevices:
    """Stands for `TorchEvents`. The clock of a device began later than the host's, and runs at another speed."""

    DRIFT = 3e-5

    def __init__(self) -> None:
        self.time = SimulatedTime()
        self.kernels: list[Kernel] = []
        self.made: list[SimulatedEvent] = []
        self.recorded = 0
        self.asked = 0  # calls of any method
        self.failing: str | None = None  # what raises
        self.is_capturing = False
        self._aside_until_ns = 0
        self._busy_until_ns: dict[tuple[int, int], int] = defaultdict(int)
        self._stream = 0

    # What programs do.

    def launch(self, name: str, tensor: torch.Tensor, took_ns: int) -> None:
        """Issues a kernel on the current stream of the tensor's device."""
        device = self.device_of((tensor,))
        key = device, self._stream
        start_ns = max(self.time.perf_counter_ns(), self._busy_until_ns[key])
        self._busy_until_ns[key] = start_ns + took_ns
        self.kernels.append(Kernel(name, device, self._stream, start_ns, start_ns + took_ns))

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        before, self._stream = self._stream, number
        try:
            yield
        finally:
            self._stream = before

    def block_aside(self, seconds: float) -> None:
        """Keeps the stream on which nothing else should run from being worked on."""
        self._aside_until_ns = self.time.now_ns + int(seconds * 1e9)

    # What stands for `TorchEvents`.

    def is_in_use(self) -> bool:
        self._ask("is_in_use")
        return True

    def device_of(self, values) -> int:
        self._ask("device_of")
        for value in values:
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                return int(value.dtype == torch.float64)
        return -1

    def current_stream(self, device: int) -> int | None:
        self._ask("current_stream")
        return None if self.is_capturing else self._stream

    def record(self, event: SimulatedEvent | None, device: int, stream: int) -> SimulatedEvent:
        self._ask("record")
        assert not self.is_capturing
        self.recorded += 1
        return self._record(event, device, self._busy_until_ns[device, stream])

    def record_aside(self, event: SimulatedEvent | None, device: int) -> SimulatedEvent:
        self._ask("record_aside")
        return self._record(event, device, max(self.time.now_ns + 8_000, self._aside_until_ns))

    def has_passed(self, event: SimulatedEvent) -> bool:
        self._ask("has_passed")
        return self.time.perf_counter_ns() >= event.passes_ns

    def elapsed_ns(self, first: SimulatedEvent, second: SimulatedEvent) -> float:
        self._ask("elapsed_ns")
        assert first.device == second.device
        now_ns = self.time.perf_counter_ns()
        assert max(first.passes_ns, second.passes_ns) <= now_ns, "CUDA error: device not ready"
        milliseconds = (second.passes_ns - first.passes_ns) * (1 + self.DRIFT) / 1e6
        return float(torch.tensor(milliseconds, dtype=torch.float32)) * 1e6

    def _record(self, event: SimulatedEvent | None, device: int, busy_until_ns: int) -> SimulatedEvent:
        if event is None:
            event = SimulatedEvent(device)
            self.made.append(event)
        assert event.device == device
        event.passes_ns = max(self.time.perf_counter_ns(), busy_until_ns)
        return event

    def _ask(self, what: str) -> None:
        self.asked += 1
        if self.failing == what:
            raise RuntimeError(f"CUDA error: an illegal memory access was encountered ({what})")


@contextmanager
def simulated_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevices]:
    """Lets recordings meet the devices, whose clock is that of the whole process meanwhile."""
    devices = SimulatedDevices()
    with monkeypatch.context() as patch:
        patch.setattr(device_times, "TorchEvents", lambda: devices)
        patch.setattr("time.perf_counter_ns", devices.time.perf_counter_ns)
        for module in (device_times, device_clock):
            patch.setattr(module, "time", devices.time)
        yield devices
