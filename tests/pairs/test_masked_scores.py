"""Scores that a mask leaves out hide no difference of the others, and are none themselves."""

import math

import pytest
import torch
from torch import nn

import modtrace

LEAST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    def __init__(self, masked: float, shift: int = 0, *, diagonal: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word, self.position = nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.masked, self.shift, self.diagonal = masked, shift, diagonal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        x = self.word(x) + self.position(places + self.shift if self.shift else places)
        scores = self.query(x) @ self.key(x).mT
        future = torch.triu(torch.ones(scores.shape[-2:], dtype=torch.bool), self.diagonal)
        return self.out(scores.masked_fill(future, self.masked).softmax(-1) @ self.value(x))


CAPTURES = {
    "hashes": modtrace.Capture(roles=["output", "op_output", "leaf"], hash=True, sketch=True),
    "statistics": modtrace.Capture(roles=["output", "op_output", "leaf"]),
    "tensors": modtrace.Capture(roles=["output", "op_output", "leaf"], tensors=True),
}


def record(model: nn.Module, capture: str) -> modtrace.Recording:
    torch.manual_seed(1)
    x = torch.randint(0, 20, (2, 8))
    with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec, torch.no_grad():
        model(x)
    return rec


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("masked", [LEAST, LEAST / 1.5])
def test_no_softmax_is_blamed_for_what_its_scores_differ_by(masked: float, capture: str) -> None:
    found = modtrace.compare(record(Attention(masked), capture), record(Attention(masked, 1), capture))
    assert found.first is not None and found.first.only_in == "second"
    assert {place.op for place in found.divergences} == {"aten.add.Tensor"}


@pytest.mark.parametrize("capture", CAPTURES)
def test_equal_scores_with_masks_are_equal(capture: str) -> None:
    found = modtrace.compare(record(Attention(LEAST), capture), record(Attention(LEAST), capture))
    assert found.ok and found.first is None


@pytest.mark.parametrize("capture", CAPTURES)
def test_minus_infinity_and_the_least_number_mask_alike(capture: str) -> None:
    found = modtrace.compare(record(Attention(LEAST), capture), record(Attention(-math.inf), capture))
    assert found.first is None, str(found)


@pytest.mark.parametrize("capture", CAPTURES)
def test_other_mask_is_the_place(capture: str) -> None:
    found = modtrace.compare(record(Attention(LEAST), capture), record(Attention(LEAST, diagonal=2), capture))
    assert found.first is not None and found.first.op == "aten.triu.default"
