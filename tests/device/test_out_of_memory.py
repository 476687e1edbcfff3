"""What the autopsy says of a device that is full is what the device counts, to the byte; causes are named."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import modtrace
from device.programs import on
from device.simulated import IS_SKIPPED, WHY_MISSING, SimulatedDevices, simulated
from modtrace.collect.ops.alive import AliveStorages

pytestmark = [pytest.mark.device, pytest.mark.skipif(IS_SKIPPED, reason=str(WHY_MISSING))]

#: The device hands out whole pages.
_PAGE = 4096

_MB = 1_000_000

Loop = Callable[[], None]


@pytest.fixture
def devices() -> Iterator[SimulatedDevices]:
    devices = simulated()
    yield devices
    assert devices.violations() == []


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


def _run(
    devices: SimulatedDevices, loop: Loop, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[modtrace.Recording, int]:
    """Returns the recording of a loop that ends out of memory, and what was allocated when the op raised."""
    allocated: list[int] = []
    plain = AliveStorages.op_raised

    def op_raised(self: AliveStorages, op: int, error: RuntimeError) -> None:
        allocated.append(devices.allocated(0))  # on its way out the error frees what backward holds
        counts, peak = devices.counts, torch.sim.max_memory_allocated(0)
        plain(self, op, error)
        assert devices.counts == counts  # it asks nothing of the device, and allocates nothing there
        assert (devices.allocated(0), torch.sim.max_memory_allocated(0)) == (allocated[-1], peak)

    monkeypatch.setattr(AliveStorages, "op_raised", op_raised)
    recording = modtrace.record(ops=True, values=None, strict=True)
    with devices.capacity(free_bytes), pytest.raises(torch.OutOfMemoryError), recording as rec:
        loop()
    return rec, allocated[-1]


def _many_samples() -> Loop:
    with on("sim"):
        model, x = (
            nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh()),
            torch.ones(4096, 64),
        )
    return lambda: model(x).sum().backward()


def _deep() -> Loop:
    with on("sim"):
        model, x = nn.Sequential(*(_Block(64) for _ in range(8))), torch.ones(1024, 64)
    return lambda: model(x).sum().backward()


def _kept_outputs() -> Loop:
    with on("sim"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.ones(256, 64)
    kept = []

    def loop() -> None:
        for _ in range(100):
            kept.append(model(x))
            kept[-1].sum().backward(retain_graph=True)
            model.zero_grad()

    return loop


def _states() -> Loop:
    with on("sim"):
        model, x = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), torch.ones(4, 512)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def loop() -> None:
        model(x).sum().backward()
        optimizer.step()

    return loop


def _scores() -> Loop:
    with on("sim"):
        model, x = nn.Sequential(nn.Linear(16, 16), _Attention()), torch.ones(1, 2048, 16)
    return lambda: model(x).sum().backward()


CAUSES = {
    "many samples": (_many_samples, 9 * _MB, "activations take", "a smaller batch"),
    "no checkpointing": (_deep, 12 * _MB, "activations take", "checkpoint Sequential/0.."),
    "kept outputs": (_kept_outputs, 2 * _MB, "results of earlier steps take", "loss.item()"),
    "states": (_states, 5 * _MB, "parameters, gradients and optimizer states take", "shard them"),
    "scores": (_scores, 12 * _MB, "one op asks for 16.8 MB", "scaled_dot_product_attention"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_is_named_and_sums_are_those_of_the_device(
    cause: str, devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, free_bytes, text, remedy = CAUSES[cause]
    before = devices.allocated(0)
    loop = make()
    rec, allocated = _run(devices, loop, free_bytes, monkeypatch)
    alive = rec.frame("alive")
    known = alive[(alive.device == "sim:0") & ~(alive.storage.isna() & alive.role.isna())]
    assert ((known.bytes + _PAGE - 1) // _PAGE * _PAGE).sum() == allocated - before
    assert alive[alive.device == "sim:0"].bytes.sum() == allocated
    [found] = rec.findings(only=["out-of-memory"]).findings
    assert found.severity == "error"
    assert text in found.text
    assert remedy in found.remedy
