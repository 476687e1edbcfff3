"""An op that only one run has between the input and the first module is named, and the input is told to be equal."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import modtrace

Change = Callable[[torch.Tensor], torch.Tensor]


class Images(nn.Module):
    def __init__(self, change: Change | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        self.out, self.change = nn.Linear(8, 3), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.change is None else self.change(x)
        return self.out(self.body(self.norm(self.conv(x)).relu()).mean((2, 3)))


class Tokens(nn.Module):
    def __init__(self, change: Change | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word, self.position, self.out = nn.Embedding(9, 8), nn.Embedding(12, 8), nn.Linear(8, 4)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.change is None else self.change(x)
        return self.out(self.word(x) + self.position(torch.arange(x.shape[1])))


CASES = {
    "scaled": (Images, lambda x: x * 1.02, "aten.mul.Tensor"),
    "channels exchanged": (Images, lambda x: x.flip(1), "aten.flip.default"),
    "other tokens": (Tokens, lambda x: x + 1, "aten.add.Tensor"),
}
CAPTURES = {
    "hashes": modtrace.Capture(roles=["input", "output", "op_output", "leaf"], hash=True, sketch=True),
    "statistics": modtrace.Capture(roles=["input", "output", "op_output", "leaf"]),
    "outputs alone": modtrace.Capture(roles=["output", "op_output", "leaf"], hash=True, sketch=True),
}


def record(model: nn.Module, capture: str) -> modtrace.Recording:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 12, 12) if isinstance(model, Images) else torch.randint(0, 8, (2, 6))
    with (
        modtrace.record(model.eval(), ops=True, values=CAPTURES[capture], strict=True) as rec,
        torch.no_grad(),
    ):
        model(x)
    return rec


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", CASES)
def test_op_before_the_first_module_is_named(name: str, capture: str) -> None:
    make, change, op = CASES[name]
    for changes, only_in in (((None, change), "second"), ((change, None), "first")):
        found = modtrace.compare(*(record(make(each), capture) for each in changes)).first
        assert found is not None
        assert (found.op, found.only_in, found.input_error) == (op, only_in, 0)


def test_same_models_are_equal() -> None:
    for make in (Images, Tokens):
        found = modtrace.compare(record(make(None), "hashes"), record(make(None), "hashes"))
        assert found.ok and found.compared == found.equal
