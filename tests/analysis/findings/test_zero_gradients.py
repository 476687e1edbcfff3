"""Parameters whose gradient is 0 in every step are found, with the place where the gradients become 0."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import record_run

CHECK = "zero-gradients"

Loss = Callable[[nn.Module, int], torch.Tensor]


class Body(nn.Sequential):
    """A body of two layers, of which the inner one can be saturated."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.inner, self.act, self.outer = nn.Linear(8, 8), activation(), nn.Linear(8, 4)


def train(model: nn.Module, loss: Loss, steps: int = 8) -> modtrace.Recording:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model) as rec:
        for step in range(steps):
            optimizer.zero_grad(set_to_none=False)
            loss(model, step).backward()
            optimizer.step()
    return rec


def usual(model: nn.Module, step: int) -> torch.Tensor:
    return F.cross_entropy(model(torch.randn(6, 8)), torch.arange(6) % 4)


def kill(layer: nn.Linear, bias: float) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.01)
        layer.bias.fill_(bias)


@pytest.mark.parametrize(("activation", "bias"), [(nn.ReLU, -5.0), (nn.Sigmoid, 200.0)])
def test_layer_before_dead_or_saturated_units_is_found_with_where_it_begins(
    activation: type[nn.Module], bias: float
) -> None:
    model = Body(activation)
    kill(model.inner, bias)
    (found,) = check_run(train(model, usual), CHECK)
    assert (found.severity, found.path) == ("warning", "inner")
    assert found.text in (
        "2 parameters have a gradient of exactly 0 in all 8 steps: inner.weight, …",
        # Only the weight's: the outputs of dead units are 0.
        "3 parameters have a gradient of exactly 0 in all 8 steps: inner.weight, …",
    )
    assert "on their way back, gradients are 0 from inner on, and not at act" in found.evidence


def test_one_branch_behind_a_factor_of_zero_is_found() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Embedding(5, 4)})

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        out = model["a"](torch.randn(6, 8)) + 0.0 * model["b"](torch.randint(0, 5, (6,)))
        return out.square().mean()

    (found,) = check_run(train(model, loss), CHECK)
    assert found.text == "the gradient of b.weight is exactly 0 in all 8 steps"
    assert (found.path, found.parameter) == ("b", "weight")


def test_loss_that_depends_on_nothing_is_an_error() -> None:
    (found,) = check_run(train(Body(), lambda model, step: 0 * usual(model, step)), CHECK)
    assert found.severity == "error"
    assert found.text == "all 4 gradients of parameters are exactly 0 in all 8 steps: inner.weight, …"


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid])
def test_layers_that_learn_are_not_accused(activation: type[nn.Module]) -> None:
    assert check_run(train(Body(activation), usual), CHECK) == ()


@pytest.mark.parametrize("name", ["two heads that take turns", "low-rank adapters, images"])
def test_heads_that_take_turns_and_factors_that_begin_with_zeros_are_not_accused(name: str) -> None:
    assert check_run(record_run(name, 8), CHECK) == ()


def test_few_steps_and_recordings_without_gradients_cannot_be_checked() -> None:
    check_typed(
        train(Body(), usual, steps=3).data,
        CHECK,
        why="it takes 5 steps with gradients, and the recording has 3",
    )
    check_typed(RecordingBuilder().data(), CHECK, why="no gradients of parameters were recorded")


def test_bias_that_cancels_beside_a_weight_that_learns_is_a_note() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(6, 8)).mean() - model(torch.randn(6, 8)).mean()

    (found,) = check_run(train(nn.Linear(8, 1), loss), CHECK)
    assert (found.severity, found.text) == ("note", "the gradient of bias is exactly 0 in all 8 steps")
