"""Blocks that hand a residual on beside what they compute are compared slot by slot with blocks that add it at once."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import modtrace

WIDTH, LAYERS = 16, 3
CAPTURES = {
    "hashes": modtrace.Capture(roles="all", hash=True, sketch=True),
    "statistics": modtrace.Capture(roles=["output", "op_output", "leaf"]),
}


class Norm(nn.Module):
    """Norms the sum of two tensors, and returns the sum too, at one end or the other."""

    def __init__(self, residual_first: bool = False) -> None:
        super().__init__()
        self.weight, self.residual_first = nn.Parameter(torch.rand(WIDTH)), residual_first

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> object:
        if residual is not None:
            x = x + residual
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return y if residual is None else (x, y) if self.residual_first else (y, x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = Norm(), nn.Linear(WIDTH, WIDTH), Norm()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.act = functional.silu

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.compute(self.norm_2(x))


class Fused(Block):
    """Leaves the additions to the norms behind it."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> object:
        if residual is None:
            x, residual = self.norm_1(x), x
        else:
            x, residual = self.add_and_norm(self.norm_1, x, residual)
        x, residual = self.add_and_norm(self.norm_2, self.attn(x), residual)
        return self.compute(x), residual

    @staticmethod
    def add_and_norm(
        norm: Norm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = norm(x, residual)
        return (other, one) if norm.residual_first else (one, other)


class Net(nn.Module):
    def __init__(self, block: type[Block], residual_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.norm = nn.ModuleList(block() for _ in range(LAYERS)), Norm()
        for each in self.modules():
            if isinstance(each, Norm):
                each.residual_first = residual_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual) if isinstance(layer, Fused) else (layer(x), None)
        return self.norm(x) if residual is None else Fused.add_and_norm(self.norm, x, residual)[0]


def record(net: Net, capture: str) -> modtrace.Recording:
    x = torch.linspace(-1, 1, 4 * WIDTH).sin().reshape(2, 2, WIDTH)
    with modtrace.record(net, ops=True, values=CAPTURES[capture], strict=True) as rec, torch.no_grad():
        net(x)
    return rec


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("residual_first", [False, True])
def test_blocks_that_compute_the_same_agree(residual_first: bool, capture: str) -> None:
    runs = record(Net(Block), capture), record(Net(Fused, residual_first), capture)
    for pair in (runs, runs[::-1]):
        found = modtrace.compare(*pair, allow_missing=True)
        assert found.ok and found.first is None, str(found)
        outputs = found.table.filter(found.table["role"].to_numpy(zero_copy_only=False) == "output")
        assert {f"layers.{at}.norm_{of}" for at in range(LAYERS) for of in (1, 2)} <= {
            *outputs["path"].to_pylist()
        }


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("residual_first", [False, True])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_fault_in_a_block_is_in_that_block(layer: int, residual_first: bool, capture: str) -> None:
    faulty = Net(Fused, residual_first)
    faulty.layers[layer].act = functional.gelu
    runs = record(Net(Block), capture), record(faulty, capture)
    for pair in (runs, runs[::-1]):
        first = modtrace.compare(*pair, allow_missing=True).first
        assert first is not None and (first.path, first.phase) in {
            (f"layers.{layer}", "forward"),
            (f"layers.{layer}.down", "forward"),
        }, first


class Pair(nn.Module):
    """Returns two tensors."""

    def __init__(self, make: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> object:
        return self.make(x)


EXCHANGED: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]] = {
    "tuple": (lambda x: (x.tanh(), x.sigmoid()), lambda x: (x.tanh(), x.sigmoid())[::-1]),
    "dict": (
        lambda x: {"a": x.tanh(), "b": x.sigmoid()},
        lambda x: dict(zip("ba", (x.tanh(), x.sigmoid()), strict=True)),
    ),
    "equal extremes": (
        lambda x: (x.clamp(-0.1, 0.1)[:3], x.tanh()),
        lambda x: ((x * 1.01).tanh()[:3], x.clamp(-0.1, 0.1)),
    ),
}


@pytest.mark.parametrize("ops", [False, True])
@pytest.mark.parametrize("name", EXCHANGED)
def test_what_models_return_at_other_slots_differs(name: str, ops: bool) -> None:
    runs = []
    for make in EXCHANGED[name]:
        model = Pair(make)
        with modtrace.record(model, ops=ops, values=CAPTURES["hashes"], strict=True) as rec:
            model(torch.linspace(-2, 2, 32).reshape(4, 8))
        runs.append(rec)
    found = modtrace.compare(*runs, allow_missing=True)
    assert not found.ok and found.first is not None and not found.reshaped, str(found)
