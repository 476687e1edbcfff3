"""Single elements of an output that are far larger than all others are found."""

import pytest
import torch
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import record_run

CHECK = "massive-activations"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.massive = nn.Linear(64, 64), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.fc(x).tanh()
        spike = torch.zeros_like(x)
        spike[0, 0, 5] = self.massive
        return x + spike


class Mixer(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2).contiguous()).transpose(1, 2)


def train(kind: type[Block], massive: float) -> modtrace.Recording:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(6)))
    model[5].massive = massive
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with modtrace.record(model) as rec:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(2, 64, 64)).square().mean().backward()
            optimizer.step()
    return rec


@pytest.mark.parametrize("kind", [Block, Mixer])
def test_one_element_that_dwarfs_the_others_is_a_note(kind: type[Block]) -> None:
    (found,) = check_run(train(kind, 300.0), CHECK)
    assert (found.severity, found.path) == ("note", "5")
    assert found.text.startswith("one element of Sequential/5 is 30")


@pytest.mark.parametrize("kind", [Block, Mixer])
@pytest.mark.parametrize("massive", [0.0, 20.0])
def test_outputs_without_one_are_not_accused(kind: type[Block], massive: float) -> None:
    assert check_run(train(kind, massive), CHECK) == ()


def test_healthy_training_is_not_accused() -> None:
    assert check_run(record_run("ResNet, images, SGD", 6), CHECK) == ()


def test_recordings_without_outputs_cannot_be_checked() -> None:
    check_typed(RecordingBuilder().data(), CHECK, why="no outputs of modules were recorded")
