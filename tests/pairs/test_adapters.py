"""A model with adapters that change nothing yet is equal to the one without, and a fault of it is named."""

import pytest
import torch
from torch import nn

import modtrace

CAPTURES = {
    "sketches": modtrace.Capture(roles="all", hash=True, sketch=True),
    "statistics": modtrace.Capture(),
}


class Adapted(nn.Module):
    """A linear layer and a product of two small ones, which is zero at first; the names are those of peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 2.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_model["model"](x)


def record(capture: str, *, is_adapted: bool, epsilon: float = 1e-5) -> modtrace.Recording:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
    model[1].norm.eps = epsilon
    if is_adapted:
        for block in model[:2]:
            block.up, block.down = Adapted(block.up), Adapted(block.down)
        model = Wrapper(model)  # type: ignore[assignment]
    with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec:
        model(torch.linspace(-2, 2, 128).reshape(8, 16)).square().mean().backward()
    return rec


@pytest.mark.parametrize("capture", CAPTURES)
def test_model_with_adapters_equals_the_one_without_but_for_a_fault(capture: str) -> None:
    plain = record(capture, is_adapted=False)
    found = modtrace.compare(plain, record(capture, is_adapted=True), map="auto", allow_missing=True)
    assert found.ok, str(found)
    assert r"(\d+)\.up=base_model.model.\1.up.base_layer" in found.rules
    other = record(capture, is_adapted=True, epsilon=0.1)
    found = modtrace.compare(plain, other, map="auto", allow_missing=True)
    assert found.first is not None and found.first.path == "1.norm", str(found)
