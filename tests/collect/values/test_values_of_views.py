"""Gradients of outputs that are views, which somebody writes to afterwards: what Linear returns of three dimensions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.kernels import both_kernels
from helpers.stat_rows import rows
from modtrace import Capture
from modtrace.collect.values import taps

kernel = both_kernels((taps, "tap_tensor"), (taps, "tap_gradient"))


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


class Writes(nn.Module):
    """Its first layer returns a view of what it has made."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


class Doubles(nn.Module):
    """What it is given."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if self.inplace else x * 2


def gradients(train: Callable[[nn.Module], object], model: nn.Module, **options: Any) -> dict[Any, Any]:
    """The statistics of the gradient of each output, in their order, by path and step."""
    values = Capture(roles="grad_output")
    with modtrace.record(model, strict=True, values=values, **options) as rec:
        train(model)
    assert rec.meta.marks == ()
    found = [each for each in rows(rec) if each.role == "grad_output"]
    by_site = {(each.path, each.step): (each.min, each.max, each.sum, each.sumsq) for each in found}
    assert len(by_site) == len(found)
    return by_site


def backward(model: nn.Module) -> None:
    model(torch.linspace(-1, 1, 24).view(2, 3, 4)).square().sum().backward()


def twins(activation: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]) -> tuple[Writes, Writes]:
    """Two models with the same parameters."""
    one, other = Writes(activation), Writes(plain)
    other.load_state_dict(one.state_dict())
    return one, other


WRITES = {
    "relu_": (torch.relu_, torch.relu),
    "twice": (lambda y: y.mul_(3).add_(1), lambda y: y * 3 + 1),
    "through another view": (
        lambda y: (y.view(-1).mul_(2), y)[1],
        lambda y: y * 2,
    ),
}


@pytest.mark.parametrize(("activation", "plain"), WRITES.values(), ids=WRITES)
def test_view_that_is_written_to_has_the_gradient_of_one_that_is_not(
    activation: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]
) -> None:
    one, other = twins(activation, plain)
    found = gradients(backward, one)
    assert list(found) == [("", 0), ("second", 0), ("first", 0)]
    assert found == gradients(backward, other)


def test_modules_that_write_in_place_have_their_gradients_too() -> None:
    one, other = twins(
        nn.Sequential(Doubles(True), Doubles(True)), nn.Sequential(Doubles(False), Doubles(False))
    )
    found = gradients(backward, one)
    assert list(found) == [
        *[("", 0), ("second", 0)],
        *[("activation", 0), ("activation.1", 0), ("activation.0", 0)],
        ("first", 0),
    ]
    assert found == gradients(backward, other)


def test_backward_of_a_later_step_has_its_gradient() -> None:
    def late(model: nn.Module) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # what it writes to is in no graph
        held = model(torch.ones(2, 3, 4)).sum()
        for _ in range(2):
            model(torch.ones(2, 3, 4)).sum().backward()
            optimizer.step()
        held.backward()
        optimizer.step()

    one, other = twins(torch.relu_, torch.relu)
    found = gradients_in_order(late, one)
    assert found == gradients_in_order(late, other)
    assert [path for path, _ in found] == ["", "second", "first"] * 3


def gradients_in_order(train: Callable[[nn.Module], object], model: nn.Module) -> list[Any]:
    with modtrace.record(model, strict=True, values=Capture(roles="grad_output")) as rec:
        train(model)
    return [(each.path, each.sum) for each in rows(rec)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_view_has_its_gradient(reentrant: bool) -> None:
    def run(activation: Callable[[Tensor], Tensor]) -> list[Any]:
        torch.manual_seed(0)
        model = Writes(activation)
        x = torch.ones(2, 3, 4, requires_grad=True)
        return gradients_in_order(
            lambda model: checkpoint(model, x, use_reentrant=reentrant).sum().backward(), model
        )

    found = run(torch.relu_)
    assert found == run(torch.relu)
    assert ("first", found[-1][1]) == found[-1]


def test_view_of_what_a_module_was_given_has_none_of_others() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = Flat()

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            used_before = y * 5
            return self.flat(y).mul_(3).sum() + used_before.sum()

    found = gradients(lambda model: model(torch.ones(2, 2, requires_grad=True)).backward(), Outer())
    assert list(found) == [("", 0)]


def test_nothing_of_ours_is_left_at_the_tensors() -> None:
    model = Writes(torch.relu_)
    bases: list[Tensor] = []
    model.first.register_forward_hook(lambda module, args, output: bases.append(output._base))
    with modtrace.record(model, strict=True, values=Capture(roles="grad_output")):
        backward(model)
        [base] = bases
    assert not base._backward_hooks
