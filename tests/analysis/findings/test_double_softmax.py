"""Losses that are given probabilities are found, with ops."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.health_models import FAMILIES, Stack

CHECK = "double-softmax"

Loss = Callable[[torch.Tensor], torch.Tensor]


def _train(model: nn.Module, loss: Loss) -> modtrace.Recording:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model, ops=True) as rec:
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(torch.randint(30, (2, 6)))).backward()
            optimizer.step()
    return rec


def _cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.arange(12))


def _binary(logits: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits.mean(-1), torch.ones(2, 6))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("last", "loss", "text"),
    [
        (
            nn.Softmax(-1),
            _cross_entropy,
            "cross_entropy is given what a softmax in Sequential/1 made, and takes it for logits",
        ),
        (
            nn.Identity(),
            lambda logits: _cross_entropy(logits.softmax(-1)),
            "cross_entropy is given what a softmax outside of modules made, and takes it for logits",
        ),
        (
            nn.Identity(),
            lambda logits: F.binary_cross_entropy_with_logits(
                logits.mean(-1).sigmoid()[:, :3], torch.ones(2, 3)
            ),
            "binary_cross_entropy_with_logits is given what a sigmoid outside of modules made, and takes it for logits",
        ),
    ],
)
def test_probabilities_in_place_of_logits_are_found(
    family: str, last: nn.Module, loss: Loss, text: str
) -> None:
    (found,) = check_run(_train(nn.Sequential(Stack(FAMILIES[family]), last), loss), CHECK)
    assert (found.severity, found.text) == ("warning", text)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "loss", [_cross_entropy, _binary, lambda logits: F.nll_loss(logits.log_softmax(-1)[0], torch.arange(6))]
)
def test_losses_of_logits_are_not_accused(family: str, loss: Loss) -> None:
    assert check_run(_train(Stack(FAMILIES[family]), loss), CHECK) == ()


def test_recordings_without_ops_cannot_be_checked() -> None:
    check_typed(RecordingBuilder().data(), CHECK, why="no ops were recorded")
