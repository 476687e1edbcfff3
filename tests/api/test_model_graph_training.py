"""A model that was drawn trains on as one that never was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import modtrace
from helpers.graph_models import CASES, Case, make_case
from helpers.twins import grads, outcome

EACH = pytest.mark.parametrize("name", CASES)


@EACH
def test_training_goes_on_with_the_same_bits(name: str):
    assert outcome(lambda: train(name, is_drawn=True)) == outcome(lambda: train(name, is_drawn=False))


def train(name: str, *, is_drawn: bool) -> list[Any]:
    """Two steps with a drawing before the forward, before the backward and before the update; all that they leave."""
    case = make_case(name)
    weights = [*case.model.parameters(), *wanting_gradient(case)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        draw(case, is_drawn)
        loss = loss_of(case.model(*case.args, **case.kwargs))
        draw(case, is_drawn)
        loss.backward()
        draw(case, is_drawn)
        optimizer.step()
        losses.append(loss)
    return [*case.model.state_dict().values(), *(each.grad for each in weights), *losses, torch.rand(3)]


def draw(case: Case, is_drawn: bool) -> None:
    if is_drawn:
        assert len(modtrace.graph(case.model, *case.args, **case.kwargs).nodes) > 2


def wanting_gradient(case: Case) -> list[Tensor]:
    return [each for each in tensors_in((case.args, case.kwargs)) if each.requires_grad]


def tensors_in(given: Any) -> Iterator[Tensor]:
    return (each for each in tree_leaves(given) if isinstance(each, Tensor))


def loss_of(output: Any) -> Tensor:
    """The sum of all squares in what a model returns."""
    found = [each for each in tensors_in(output) if each.requires_grad]
    assert found
    return sum((each.square().sum() for each in found), torch.zeros(()))


@EACH
def test_nothing_of_the_model_and_its_arguments_changes(name: str):
    case = make_case(name)
    for at, each in enumerate(case.model.parameters()):
        each.grad = torch.full_like(each, at + 1.0)
    before = condition(case)
    modtrace.graph(case.model, *case.args, **case.kwargs)
    assert condition(case) == before


def condition(case: Case) -> dict[str, Any]:
    """Content, gradients, modes, devices, hooks and attributes."""
    given = list(tensors_in((case.args, case.kwargs)))
    return {
        "state": [(key, each.tolist(), each.device) for key, each in case.model.state_dict().items()],
        "gradients": [(key, id(each), each.tolist()) for key, each in grads(case.model).items()],
        "inputs": [(each.tolist(), each.requires_grad, each.grad, each._version) for each in given],
        "modes": [each.training for each in case.model.modules()],
        "attributes": [(key, id(value)) for each in case.model.modules() for key, value in vars(each).items()],
        "hooks": [
            len(hooks)
            for each in case.model.modules()
            for key, hooks in vars(each).items()
            if key.endswith("_hooks")
        ],
        "grad mode": torch.is_grad_enabled(),
    }  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
def test_mode_stays_and_is_the_one_it_is_drawn_in(training: bool):
    case = make_case("LSTM")
    case.model.train(training)
    graph = modtrace.graph(case.model, *case.args)
    assert case.model.training is training
    assert ("bernoulli_" in {each.label for each in graph.nodes}) is training
