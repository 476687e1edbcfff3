"""Wraps streams of CUDA devices and events on them, whose times a device notes once the work before is done."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .modes import DisableTorchFunction, has_function_modes
from .tensors import device_of as device_of_tensor

#: Returns the handle of the current stream of a device, given by index, in 0.1 us.
current_stream: Callable[[int], int]

try:
    current_stream = torch._C._cuda_getCurrentRawStream
except AttributeError:  # a torch without CUDA, or with other names: 3 us

    def current_stream(device: int) -> int:
        handle: int = torch.cuda.current_stream(device).cuda_stream
        return handle


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class TorchEvents:
    """The events of all CUDA devices, as torch provides them. Events are reused, each on its own device.

    No method waits for a device. On ROCm torch names everything as on CUDA.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], Any] = {}  # by device and handle: making one takes 2 us
        self._aside: dict[int, Any] = {}

    def is_in_use(self) -> bool:
        """Returns whether the program uses a device; it takes 0.1 us."""
        is_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return is_in_use

    def device_of(self, values: Iterable[object]) -> int:
        """Returns the index of the device of the first tensor on one; -1 if there is none. It takes 0.4 us.

        For a list among the values, its first element counts.
        """
        if has_function_modes():
            with DisableTorchFunction():
                return _first_device(values)
        return _first_device(values)

    def current_stream(self, device: int) -> int | None:
        """Returns the handle of a device's current stream; None while work that is issued here is being captured."""
        return None if torch.cuda.is_current_stream_capturing() else current_stream(device)

    def record(self, event: Any, device: int, stream: int) -> Any:
        """Records an event on the current stream of a device and returns it; it takes some 2 us.

        Args:
            event: an event of the device to reuse; None for a new one.
            stream: the handle of the current stream.
        """
        known = self._streams.get((device, stream))
        if known is None:
            known = self._streams[device, stream] = torch.cuda.current_stream(device)
        return _record(event, known)

    def record_aside(self, event: Any, device: int) -> Any:
        """Records an event on a stream of our own, without other work, and returns it."""
        stream = self._aside.get(device)
        if stream is None:
            stream = self._aside[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        return _record(event, stream)

    def has_passed(self, event: Any) -> bool:
        """Returns whether the device has finished the work that was issued before the event."""
        return bool(event.query())

    def elapsed_ns(self, first: Any, second: Any) -> float:
        """Returns the time between two events of one device; negative if the second came before the first.

        Both events must have passed. CUDA has a resolution of 0.5 us, and returns milliseconds as a 32-bit float, which
        holds 1 us for 16 s.
        """
        return float(first.elapsed_time(second)) * 1e6


def _record(event: Any, stream: Any) -> Any:
    if event is None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _first_device(values: Iterable[object]) -> int:
    for value in values:
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, torch.Tensor):
            device = _device_of(value)
            if device.type == "cuda":
                return device.index or 0
    return -1


def _device_of(tensor: torch.Tensor) -> torch.device:
    if type(tensor) in _PLAIN:
        return device_of_tensor(tensor)
    with DisableTorchFunction():  # a user's subclass would see the reading
        return device_of_tensor(tensor)
