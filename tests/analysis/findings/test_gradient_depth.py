"""Gradients that vanish or explode over a chain of layers are found; small ones of single layers are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import record_run

CHECK = "gradients-over-depth"


class Named(nn.Module):
    """Layers that are attributes, in place of a Sequential's."""

    def __init__(self, depth: int, activation: type[nn.Module], gain: float) -> None:
        super().__init__()
        self.depth, self.act = depth, activation()
        for number in range(depth):
            setattr(self, f"fc{number}", _linear(gain))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.depth):
            x = self.act(getattr(self, f"fc{number}")(x))
        return x


def _linear(gain: float) -> nn.Linear:
    layer = nn.Linear(32, 32)
    nn.init.normal_(layer.weight, std=gain / 32**0.5)
    return layer


def sequential(depth: int, activation: type[nn.Module], gain: float) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (_linear(gain), activation())))


class Convolutions(nn.Module):
    """Blocks of convolutions in a list, with or without residual connections."""

    def __init__(self, depth: int, gain: float, residual: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(depth))
        self.residual = residual
        for block in self.blocks:
            nn.init.normal_(block.weight, std=gain / 12**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(1, (4, 8))
        for block in self.blocks:
            x = block(x).tanh() + (x if self.residual else 0)
        return x.flatten(1)


def train(model: nn.Module, steps: int = 7) -> modtrace.Recording:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with modtrace.record(model) as rec:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 32)), torch.randint(0, 32, (8,))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return rec


@pytest.mark.parametrize("make", [sequential, Named])
def test_sigmoids_without_normalization_vanish(make) -> None:
    torch.manual_seed(0)
    (found,) = check_run(train(make(8, nn.Sigmoid, 1.0)), CHECK)
    assert found.severity == "warning"
    first, last = ("fc7", "fc0") if make is Named else ("14", "0")
    assert f"{first} to {last} vanish: RMS " in found.text.replace("Sequential/", "")
    assert found.path == last


def test_convolutions_with_weights_too_small_vanish_and_residual_connections_help() -> None:
    torch.manual_seed(0)
    (found,) = check_run(train(Convolutions(12, 0.3, residual=False)), CHECK)
    assert "blocks.11 to blocks.0 vanish" in found.text
    assert check_run(train(Convolutions(12, 0.3, residual=True)), CHECK) == ()


def test_gradients_in_blocks_are_found_with_a_wrapper_around_each_block() -> None:
    """What is inside a block is registered in the block, which goes by the id of its wrapper."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(_linear(0.1), nn.Tanh()) for _ in range(6)]
    [plain] = check_run(train(nn.Sequential(*blocks)), CHECK)
    [wrapped] = check_run(train(nn.Sequential(*map(checkpoint_wrapper, blocks))), CHECK)
    assert "parameters' gradients in Sequential/5 to Sequential/0 vanish" in plain.text
    assert wrapped.text[:60] == plain.text[:60]


@pytest.mark.parametrize("make", [sequential, Named])
def test_weights_too_large_explode(make) -> None:
    torch.manual_seed(0)
    (found,) = check_run(train(make(12, nn.Identity, 3.0)), CHECK)
    assert "explode: RMS " in found.text


@pytest.mark.parametrize("make", [sequential, Named])
@pytest.mark.parametrize(("activation", "gain"), [(nn.ReLU, 2**0.5), (nn.Tanh, 5 / 3)])
def test_weights_that_fit_their_activation_are_not_accused(
    make, activation: type[nn.Module], gain: float
) -> None:
    torch.manual_seed(0)
    assert check_run(train(make(12, activation, gain)), CHECK) == ()


def test_small_gradients_of_queries_and_keys_are_not_accused() -> None:
    assert check_run(record_run("Swin, one batch", 4), CHECK) == ()


def test_few_steps_and_recordings_without_gradients_cannot_be_checked() -> None:
    data = train(nn.Linear(32, 32), 2).data
    check_typed(data, CHECK, why="it takes 3 comparable training steps, and the recording has 2")
    check_typed(RecordingBuilder().data(), CHECK, why="no gradients were recorded")
