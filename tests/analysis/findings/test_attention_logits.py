"""Logits of attention that grow are found, with ops."""

import pytest
import torch
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed

CHECK = "attention-logits"


class Attention(nn.Module):
    """Attention that is written out, with a mask of infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.q(x) @ self.k(x).transpose(-1, -2)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return logits.masked_fill(future, -torch.inf).softmax(-1) @ x


class Fused(nn.Module):
    """Fused attention of two heads, with queries and keys of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.q(x).view(*x.shape[:2], 2, 2, 4).permute(2, 0, 3, 1, 4)
        v = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(x.shape)


class Pooling(nn.Module):
    """Weights each position by a score."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (torch.softmax(self.q(x), 1) * x).sum(1, keepdim=True)


def train(block: type[nn.Module], growth: float) -> modtrace.Recording:
    """Trains for 14 steps, in each of which the queries of the second block grow by a factor."""
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model, ops=True) as rec:
        for _ in range(14):
            optimizer.zero_grad()
            model(torch.randn(4, 6, 8)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model[1].q.weight.mul_(growth)
    return rec


@pytest.mark.parametrize("block", [Attention, Pooling])
def test_logits_that_grow_are_found(block: type[nn.Module]) -> None:
    (found,) = check_run(train(block, 1.9), CHECK)
    assert (found.severity, found.path) == ("warning", "1")
    assert found.text.startswith("the largest logit of the softmax in Sequential/1 grew from ")


def test_queries_and_keys_of_fused_attention_that_grow_are_found() -> None:
    (found,) = check_run(train(Fused, 1.4), CHECK)
    assert (found.severity, found.path) == ("warning", "1")
    assert found.text.startswith("queries and keys in Sequential/1 grew: their norms allow logits of ")


@pytest.mark.parametrize("block", [Attention, Fused, Pooling])
def test_logits_that_stay_are_not_accused(block: type[nn.Module]) -> None:
    assert check_run(train(block, 1.0), CHECK) == ()


def test_recordings_without_ops_cannot_be_checked() -> None:
    check_typed(RecordingBuilder().data(), CHECK, why="no ops were recorded")
