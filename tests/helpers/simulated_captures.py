"""A device, simulated by main memory, whose graphs are captured: whatever would end a capture raises, as CUDA does."""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from modtrace.measure.measurers import extras, measurer
from modtrace.measure.moments import rows
from modtrace.torch_internals import graph_captures as graph_captures_module
from modtrace.torch_internals.graph_captures import graph_captures

_ENDS_CAPTURES = ["item", "tolist", "__bool__", "__int__", "__float__", "cpu", "clone", "copy_"]


class SimulatedCaptures:
    """The captures that are open, on any thread, and what was done that would have ended one."""

    def __init__(self) -> None:
        self.open: list[SimulatedGraph] = []
        self.ended_by: list[str] = []

    def forbid(self, what: str) -> None:
        if self.open:
            self.ended_by.append(f"{what} on {threading.current_thread().name}")
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def collecting(self, phase: str, info: dict[str, int]) -> None:
        """Is called when the garbage collector runs, which may free another graph."""
        if phase == "start" and self.open and graph_captures._open:
            self.ended_by.append(f"the garbage collector on {threading.current_thread().name}")

    def forbidding(self, function, name: str):
        def forbidden(*args, **kwargs):
            self.forbid(name)
            return function(*args, **kwargs)

        return forbidden

    def is_capturing_here(self) -> bool:
        return any(graph.thread == threading.get_ident() for graph in self.open)

    @contextmanager
    def capture(self, graph: "SimulatedGraph | None" = None) -> Iterator["SimulatedGraph"]:
        """Stands for `torch.cuda.graph`."""
        graph = torch.cuda.CUDAGraph() if graph is None else graph
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()


class SimulatedGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    captures: SimulatedCaptures
    thread = -1

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.thread = threading.get_ident()
        self.captures.open.append(self)

    def capture_end(self):
        self.captures.open.remove(self)


@contextmanager
def simulated_captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCaptures]:
    """All tensors are on a device whose graphs can be captured."""
    simulated = SimulatedCaptures()
    kind = type("SimulatedGraph", (SimulatedGraph,), {**vars(SimulatedGraph), "captures": simulated})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(graph_captures_module, "_is_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", simulated.is_capturing_here)
    for name, module in list(sys.modules.items()):
        if name.startswith("modtrace."):
            if hasattr(module, "is_on_device"):
                monkeypatch.setattr(module, "is_on_device", lambda tensor: True)
            if hasattr(module, "plain_kinds"):
                monkeypatch.setattr(module, "plain_kinds", lambda: ())
    for name in _ENDS_CAPTURES:
        monkeypatch.setattr(torch.Tensor, name, simulated.forbidding(getattr(torch.Tensor, name), name))
    # These allocate on the device, and run on it.
    monkeypatch.setattr(
        measurer, "measure_on_device", simulated.forbidding(measurer.measure_on_device, "measuring")
    )
    for part, measure in extras._ON_DEVICE.items():
        monkeypatch.setitem(extras._ON_DEVICE, part, simulated.forbidding(measure, part))
    make_block = simulated.forbidding(rows.DeviceRows._make_device_block, "allocating")
    monkeypatch.setattr(rows.DeviceRows, "_make_device_block", make_block)
    originals = dict(vars(kind))
    gc.callbacks.append(simulated.collecting)
    threshold = gc.get_threshold()
    gc.set_threshold(50, 1_000, 1_000)  # the collector would run in each capture
    try:
        yield simulated
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(simulated.collecting)
    assert gc.isenabled()
    assert simulated.ended_by == []
    assert graph_captures._open == []
    assert dict(vars(kind)) == originals, "the class of graphs is still wrapped"
