"""What a recording asks of a device: launches, copies and waits beyond those of the program."""

import threading
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn

import modtrace
from device.programs import on
from device.simulated import IS_SKIPPED, WHY_MISSING, Counts, simulated
from helpers.cuda_on_cpu import FakeCuda, needs_compiler
from modtrace.measure.cuda import cuda_kernels
from modtrace.measure.cuda.cuda_kernels import CudaKernels
from modtrace.measure.measurers import measurer
from modtrace.measure.moments import rows

pytestmark = [
    pytest.mark.device,
    needs_compiler,
    pytest.mark.skipif(IS_SKIPPED, reason=str(WHY_MISSING)),
]


@pytest.fixture
def devices():
    devices = simulated()
    yield devices
    assert devices.violations() == []


class Training:
    """Steps of three layers."""

    def __init__(self, device: str = "sim") -> None:
        with on(device):
            self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
            self.x = torch.ones(3, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.x).sum().backward()
        self.optimizer.step()


def asked(devices, steps: int, **options) -> "tuple[Counts, modtrace.Recording]":
    """Returns what `steps` recorded steps ask of the devices beyond what plain ones do."""
    plain, _ = counted(devices, steps, nullcontext())
    recording = modtrace.record(strict=True, **options)
    recorded, _ = counted(devices, steps, recording)
    return recorded - plain, recording


def counted(devices, steps: int, around) -> "tuple[Counts, Training]":
    training = Training()
    training.step()
    with around:
        training.step()  # rows are allocated
        devices.reset()
        for _ in range(steps):
            training.step()
        found = devices.counts
        assert devices.waits_of(threading.current_thread()) == 0, "the thread that trains waits for nothing"
    return found, training


def test_tensor_takes_eight_launches_where_there_is_no_kernel_of_our_own(devices):
    roles = modtrace.Capture(roles=["output", "grad_output"])
    found, recording = asked(devices, 3, values=roles)
    tensors = 3 + 3  # the output of the model is that of its last layer
    assert found.launches == 3 * tensors * 8
    assert found.to_device == 0
    assert found.waits == 2 * found.to_host, (
        "who writes rows waits for the device, then copies each block of rows"
    )
    assert recording.table("values").num_rows == 4 * (tensors + 2)


def test_kernels_of_our_own_take_one_launch_for_each_tensor(devices, fake):
    found, recording = asked(devices, 3)
    assert found.waits == found.to_host == 0
    assert fake.refused == 0
    outputs = 3  # that of the model is that of its last layer
    assert found.launches == 3 * (2 * outputs + 1 + 1)  # and the loss
    assert found.to_device == 3  # the table of all parameters and gradients
    assert recording.meta.marks == ()


@pytest.fixture
def fake(devices, monkeypatch):
    """Kernels of our own, under a driver whose devices are the simulated ones."""
    with FakeCuda() as fake:
        fake.surround(devices.library.sim_begin_work, devices.library.sim_end_work)
        kernels = {
            torch.device("sim", index): CudaKernels(torch.device("sim", index), compiles=fake.compile)
            for index in range(devices.count)
        }
        monkeypatch.setattr(measurer, "find_kernels", kernels.__getitem__)
        monkeypatch.setattr(cuda_kernels, "current_stream", devices.stream)
        rows.arriving_rows.cache_clear()
        yield fake
        fake.surround()
        assert fake.refused == 0


def test_two_devices_are_recorded_from_two_threads(devices, fake):
    trainings = [Training("sim:0"), Training("sim:1")]

    def train(training: Training) -> None:
        stream = torch.Stream(training.x.device)
        stream.wait_stream(torch.sim.default_stream(training.x.device))
        with stream:
            for _ in range(3):
                training.step()
        stream.synchronize()

    values = modtrace.Capture(roles=["output", "grad_output"])
    with modtrace.record([training.model for training in trainings], values=values, strict=True) as rec:
        threads = [threading.Thread(target=train, args=(training,)) for training in trainings]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    table = rec.table("values")
    assert rec.meta.marks == ()
    assert table.column("note").null_count == table.num_rows
    sums = sorted(table.column("sum").to_pylist())
    assert len(sums) == 2 * 3 * 8
    assert sums[::2] == pytest.approx(sums[1::2]), "both devices do the same"


def test_tensor_that_finds_no_memory_for_its_statistics_says_so(devices):
    x = torch.ones(1000, 1000, device="sim")
    with modtrace.record(model := nn.Identity(), strict=True) as rec, devices.capacity(10_000_000):
        model(x)  # its statistics need 32 MB
    [note] = set(rec.table("values").column("note").to_pylist())
    assert note.startswith("not measured: OutOfMemoryError: sim:0 out of memory.")


def test_steps_know_what_tensors_take_on_devices(devices, monkeypatch):
    monkeypatch.setattr("modtrace.collect.recorder.step_memory._MOST_TIME", 1e6)  # read at each step
    training, kept = Training(), []
    with modtrace.record(values=None, strict=True) as rec:
        for _ in range(4):
            kept.append(torch.ones(1024, device="sim:1"))
            training.step()
    sizes = rec.table("steps")["device_bytes"].to_pylist()
    assert [later - earlier for earlier, later in pairwise(sizes[:-1])] == [4096, 4096]


def test_copies_to_a_device_are_a_part_of_the_cycle(devices):
    training = Training()
    with modtrace.record(values=None, ops=True, strict=True) as rec:
        for _ in range(6):
            training.x = torch.ones(3, 4).to("sim")
            training.step()
    assert rec.module_tree().cycles.parts_ns["copy"] > 0
