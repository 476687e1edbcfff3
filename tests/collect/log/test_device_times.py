"""Times of devices: when a device that works late has begun and ended each call, and that nobody waits for it."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.simulated_devices import SimulatedDevices, simulated_devices
from modtrace.collect.log import device_times
from modtrace.torch_internals.graph_captures import graph_captures

#: An event passes 8 us after it is recorded, so a time on the host's clock is wrong by at most half of that and what
#: the clocks drift between two comparisons.
ERROR_NS = 10_000


@pytest.fixture
def devices(monkeypatch) -> Iterator[SimulatedDevices]:
    with simulated_devices(monkeypatch) as simulated:
        yield simulated


class Launching(torch.autograd.Function):
    """One kernel in forward, one of twice the time in backward."""

    @staticmethod
    def forward(ctx, x, devices, name, took_ns):
        ctx.kernel = devices, name, took_ns
        devices.launch(f"{name} forward", x, took_ns)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        devices, name, took_ns = ctx.kernel
        devices.launch(f"{name} backward", grad, 2 * took_ns)
        return grad * 2, None, None, None


class Kernels(nn.Module):
    """Launches a kernel, then calls what is inside, each on its stream, and raises at the end if it shall."""

    def __init__(self, devices, took_ns=200_000, inside=(), stream=0, dtype=None, raises=False):
        super().__init__()
        self.devices, self.took_ns, self.stream, self.raises = devices, took_ns, stream, raises
        self.dtype = dtype
        self.inside = nn.ModuleList(inside)
        self.name = ""

    def forward(self, x):
        x = Launching.apply(x, self.devices, self.name, self.took_ns)
        for module in self.inside:
            with self.devices.stream(module.stream), suppress(ZeroDivisionError):
                x = module(x if module.dtype is None else x.to(module.dtype))
        if self.raises:
            raise ZeroDivisionError
        return x


def named(model: Kernels) -> Kernels:
    for path, module in model.named_modules():
        module.name = path
    return model


def three(devices) -> Kernels:
    return named(Kernels(devices, inside=[Kernels(devices, inside=[Kernels(devices)]), Kernels(devices)]))


def rows_of(recording) -> list[dict[str, Any]]:
    paths = {row["module_id"]: row["path"] for row in recording.table("modules").to_pylist()}
    rows = recording.table("calls").to_pylist()
    return [row | {"path": paths.get(row["module_id"], "(optimizer)")} for row in rows]


def train(model: nn.Module, steps: int = 1, x: torch.Tensor | None = None) -> None:
    x = torch.ones(2, requires_grad=True) if x is None else x
    for _ in range(steps):
        model(x).sum().backward()
        x.grad = None


def test_a_call_lasts_on_the_device_from_its_first_kernel_to_its_last(devices):
    model = three(devices)
    with modtrace.record(model, values=None, device_times=True, backward_times=True, strict=True) as rec:
        train(model, steps=3)
    rows = rows_of(rec)
    assert len(rows) == 3 * 2 * 4
    ends = [kernel.end_ns for kernel in devices.kernels]
    assert max(ends) > max(row["end_ns"] for row in rows) + 1_000_000  # the device works behind the host
    for phase in ("forward", "backward"):
        of_phase = [row for row in rows if (row["path"], row["phase"]) == ("inside.1", phase)]
        kernels = [kernel for kernel in devices.kernels if kernel.name == f"inside.1 {phase}"]
        for row, kernel in zip(of_phase, kernels, strict=True):
            assert row["device_start_ns"] == pytest.approx(kernel.start_ns, abs=ERROR_NS)
            assert row["device_end_ns"] == pytest.approx(kernel.end_ns, abs=ERROR_NS)


trees = st.recursive(
    st.builds(lambda **made: (made, ()), took_ns=st.integers(0, 300_000), stream=st.integers(0, 2)),
    lambda inside: st.tuples(
        st.fixed_dictionaries(
            {
                "took_ns": st.integers(0, 300_000),
                "stream": st.integers(0, 2),
                "dtype": st.sampled_from([None, None, torch.float32, torch.float64]),
                "raises": st.booleans(),
            }
        ),
        st.lists(inside, max_size=3),
    ),
    max_leaves=8,
)


def build(devices, tree) -> Kernels:
    made, inside = tree
    return Kernels(devices, inside=[build(devices, each) for each in inside], **made)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees, ops=st.booleans(), checkpointed=st.booleans())
def test_calls_nest_on_devices_and_hold_their_kernels_whatever_streams_they_use(
    monkeypatch, tree, ops, checkpointed
):
    with simulated_devices(monkeypatch) as devices:
        model = named(build(devices, ({**tree[0], "raises": False}, tree[1])))
        x = torch.ones(2, requires_grad=True)
        options = {"device_times": True, "backward_times": True, "values": None, "ops": ops, "strict": True}
        with modtrace.record(model, **options) as rec:
            for _ in range(2):
                y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
                y.sum().backward()
        rows = {row["call_id"]: row for row in rows_of(rec)}
        for row in rows.values():
            start_ns, end_ns = row["device_start_ns"], row["device_end_ns"]
            if end_ns is not None:
                assert start_ns <= end_ns
            outer = rows.get(row["parent_call_id"])
            if outer is not None and None not in (start_ns, outer["device_start_ns"]):
                assert outer["device_start_ns"] <= start_ns
            if outer is not None and None not in (end_ns, outer["device_end_ns"]):
                assert end_ns <= outer["device_end_ns"]
            if start_ns is not None:
                assert start_ns >= row["start_ns"] - ERROR_NS
        forward = [row for row in rows.values() if row["phase"] != "backward"]
        assert all(row["device_start_ns"] is not None for row in forward)
        assert all(row["device_end_ns"] is not None for row in forward)
        for kernel in devices.kernels:
            path, phase = kernel.name.rsplit(" ", 1)
            if phase == "forward":
                assert any(
                    row["device_start_ns"] - ERROR_NS <= kernel.start_ns
                    and kernel.end_ns <= row["device_end_ns"] + ERROR_NS
                    for row in forward
                    if row["path"] == path
                ), kernel


def test_a_step_of_an_optimizer_has_the_times_of_its_kernels(devices):
    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            devices.launch("optimizer", self.param_groups[0]["params"][0], 500_000)

    model = nn.Linear(2, 2)
    optimizer = Optimizer(model.parameters(), lr=0.1)
    with modtrace.record(model, values=None, device_times=True, strict=True) as rec:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = [row for row in rows_of(rec) if row["phase"] == "optimizer"]
    for row, kernel in zip(rows, devices.kernels, strict=True):
        assert row["device_start_ns"] == pytest.approx(kernel.start_ns, abs=ERROR_NS)
        assert row["device_end_ns"] == pytest.approx(kernel.end_ns, abs=ERROR_NS)


def test_each_op_that_is_given_a_tensor_of_a_device_has_times(devices):
    with modtrace.record(values=None, ops=True, device_times=True, strict=True) as rec:
        x = torch.arange(3)  # of integers: on no device
        y = (x + 1).float()
        devices.launch("before", y, 1_000_000)
        z = torch.cat([y, y])
        z.sum()
    rows = {row["name"]: row for row in rec.table("ops").to_pylist()}
    assert rows["aten.add.Tensor"]["device_start_ns"] is None
    cat, total = rows["aten.cat.default"], rows["aten.sum.default"]
    assert cat["device_start_ns"] == pytest.approx(devices.kernels[0].end_ns, abs=ERROR_NS)
    assert (
        cat["device_start_ns"] <= cat["device_end_ns"] <= total["device_start_ns"] <= total["device_end_ns"]
    )
    assert cat["device_start_ns"] > cat["end_ns"] + 900_000


def test_the_drift_of_the_clocks_does_not_add_up(devices):
    """In 60 s the clocks part by 1.8 ms."""
    model = three(devices)
    with modtrace.record(model, values=None, device_times=True, strict=True, to=None) as rec:
        for _ in range(60):
            model(torch.ones(2))
            rec.step()
            devices.time.now_ns += 1_000_000_000
            rec.data  # noqa: B018  # writes what has ended
    kernels = [kernel for kernel in devices.kernels if kernel.name == "inside.1 forward"]
    rows = [row for row in rows_of(rec) if row["path"] == "inside.1"]
    for row, kernel in zip(rows, kernels, strict=True):
        assert row["device_end_ns"] == pytest.approx(kernel.end_ns, abs=ERROR_NS + 1e9 * devices.DRIFT)


def test_the_training_thread_never_waits(devices, monkeypatch):
    model, main = three(devices), threading.current_thread().name
    monkeypatch.setattr(device_times, "_PATIENCE_S", 1e6)
    with modtrace.record(model, values=None, device_times=True, strict=True) as rec:
        train(model, steps=50)
        assert main not in devices.time.sleepers
    assert rec.table("calls")["device_end_ns"].null_count == 0


def test_events_are_used_again_however_many_steps_there_are(devices, monkeypatch):
    monkeypatch.setattr(device_times, "_MANY_EVENTS", 256)
    model = named(Kernels(devices, 0, inside=[Kernels(devices, 0)]))
    x = torch.ones(2)
    with modtrace.record(model, values=None, device_times=True, strict=True, max_bytes=10_000_000):
        for _ in range(2_000):
            model(x)
    assert devices.recorded == 2_000 * 4
    assert len(devices.made) < 1_000


def test_where_too_many_events_wait_calls_have_no_times(devices, monkeypatch):
    monkeypatch.setattr(device_times, "_MANY_EVENTS", 4)
    monkeypatch.setattr(device_times, "_MOST_EVENTS", 10)
    model = three(devices)
    model.took_ns = 1_000_000_000
    with modtrace.record(model, values=None, device_times=True, strict=True) as rec:
        model(torch.ones(2))
        model(torch.ones(2))
    known = [row["device_end_ns"] is not None for row in rows_of(rec)]
    assert True in known and False in known
    assert len(devices.made) < 16


def test_an_exception_in_forward_loses_no_event(devices):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Kernels(devices, raises=True)

        def forward(self, x):
            return self.inner(x)

    model = Outer()
    with modtrace.record(model, values=None, device_times=True, strict=True) as rec:
        for _ in range(50):
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(2))
            rec.step()
            rec.data  # noqa: B018  # writes what has ended
    rows = rows_of(rec)
    assert len(rows) == 100
    assert all(row["raised"] and row["device_end_ns"] is not None for row in rows)
    assert len(devices.made) < 25


def test_a_recording_that_does_not_ask_touches_no_event(devices):
    model = three(devices)
    asked = devices.asked
    with modtrace.record(model, ops=True, backward_times=True, strict=True) as rec:
        model(torch.ones(2, requires_grad=True)).sum().backward()
    launches = 2 * 4
    assert devices.asked == asked + launches  # each launch asks where its tensor is
    assert rec.table("calls")["device_start_ns"].null_count == rec.table("calls").num_rows


def test_what_lies_in_main_memory_records_no_event(devices):
    model = nn.Sequential(nn.Embedding(4, 2, dtype=torch.float16), nn.ReLU())
    devices.is_in_use = lambda: False
    with modtrace.record(model, device_times=True, ops=True, strict=True) as rec:
        model(torch.tensor([1, 2]))
    assert devices.recorded == 0 and not devices.made
    assert rec.table("calls")["device_start_ns"].null_count == rec.table("calls").num_rows == 3


def test_calls_while_a_graph_is_captured_have_no_times(devices, monkeypatch):
    model = three(devices)
    with modtrace.record(model, values=None, device_times=True, strict=True) as rec:
        model(torch.ones(2))
        devices.is_capturing = True  # the stream tells ...
        model(torch.ones(2))
        devices.is_capturing = False
        asked = devices.asked
        with monkeypatch.context() as patch:
            patch.setattr(graph_captures, "may_be_open", True)  # ... or a class of torch's does
            model(torch.ones(2))
        assert devices.asked - asked <= 4 * 4 + 4  # where tensors are; launches ask as well
        model(torch.ones(2))
    known = [row["device_end_ns"] is not None for row in rows_of(rec)]
    assert known == [True] * 4 + [False] * 8 + [True] * 4


@pytest.mark.parametrize("failing", ["record", "has_passed", "elapsed_ns", "current_stream"])
def test_a_device_that_fails_ends_the_times_and_nothing_else(devices, failing):
    model = three(devices)
    with (
        pytest.warns(modtrace.ModtraceWarning, match="a device gives no more times"),
        modtrace.record(model, values=None, device_times=True, strict=True) as rec,
    ):
        model(torch.ones(2))
        devices.failing = failing
        model(torch.ones(2))
    assert len(rows_of(rec)) == 8
    assert any("a device gives no more times" in mark for mark in rec.meta.marks)


def test_two_recordings_share_events_and_one_without_the_option_has_no_times(devices):
    model = three(devices)
    with modtrace.record(model, values=None, device_times=True, strict=True) as one:
        with (
            modtrace.record(model, values=None, device_times=True, strict=True) as other,
            modtrace.record(model, values=None, strict=True) as plain,
        ):
            model(torch.ones(2))
        model(torch.ones(2))
    assert devices.recorded == 2 * 8
    both = (
        one.table("calls")["device_end_ns"].to_pylist()[:4],
        other.table("calls")["device_end_ns"].to_pylist(),
    )
    assert np.allclose(*both, rtol=0, atol=ERROR_NS)
    assert plain.table("calls")["device_end_ns"].null_count == 4


def test_steps_on_disk_and_steps_that_were_held_have_times(devices, tmp_path):
    model = three(devices)
    with modtrace.record(model, tmp_path / "run", values=None, device_times=True, strict=True):
        train(model, steps=3)
    with modtrace.record(values=None, device_times=True, keep_last=2, strict=True) as held:
        for _ in range(5):
            model(torch.ones(2))
            held.step()
        held.dump()
    on_disk = modtrace.open_recording(tmp_path / "run").table("calls")
    assert (on_disk.num_rows, on_disk["device_end_ns"].null_count) == (3 * 4, 0)
    assert (held.table("calls").num_rows, held.table("calls")["device_end_ns"].null_count) == (2 * 4, 0)
