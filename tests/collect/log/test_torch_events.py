"""What is asked of torch about events, with classes in place of those of `torch.cuda`."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from modtrace.torch_internals import device_events
from modtrace.torch_internals.device_events import TorchEvents


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.streams: list[Any] = []

    def record(self, stream: Any) -> None:
        self.streams.append(stream)

    def query(self) -> bool:
        return bool(self.streams)

    def elapsed_time(self, other: "Event") -> float:
        return 0.25


@pytest.fixture
def events(monkeypatch) -> TorchEvents:
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(cuda, "Stream", lambda device, priority: ("aside", device, priority))
    monkeypatch.setattr(cuda, "current_stream", lambda device: ("current", device))
    monkeypatch.setattr(device_events, "current_stream", lambda device: 7 + device)
    return TorchEvents()


def on_cuda(index: int, *, parameter: bool = False) -> torch.Tensor:
    with FakeTensorMode():
        tensor = torch.empty(2, device=f"cuda:{index}")
        return torch.nn.Parameter(tensor) if parameter else tensor


def test_device_is_that_of_the_first_tensor_that_is_on_one(events):
    host = torch.ones(1)
    assert events.device_of(()) == -1
    assert events.device_of((host, 3, None, "x", [])) == -1
    assert events.device_of((host, on_cuda(1), on_cuda(0))) == 1
    assert events.device_of((3, [on_cuda(2)])) == 2
    assert events.device_of({"a": on_cuda(3, parameter=True)}.values()) == 3


def test_cuda_is_in_use_once_torch_has_initialized_it(events, monkeypatch):
    assert events.is_in_use()
    monkeypatch.undo()
    assert events.is_in_use() is torch.cuda.is_initialized()


def test_function_modes_of_the_user_see_nothing(events):
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = on_cuda(1)
    with Mode():
        assert events.device_of((tensor, torch.nn.Parameter)) == 1
    assert seen == []


def test_events_are_recorded_on_the_current_stream_and_aside(events):
    stream = events.current_stream(1)
    event = events.record(None, 1, stream)
    assert stream == 8 and events.record(event, 1, stream) is event
    assert event.streams == [("current", 1), ("current", 1)]
    aside = events.record_aside(None, 1)
    assert aside.streams == [("aside", 1, -1)]
    assert events.has_passed(event) is True
    assert events.elapsed_ns(event, aside) == 250_000.0


def test_there_is_no_current_stream_while_it_is_captured(events, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert events.current_stream(0) is None
