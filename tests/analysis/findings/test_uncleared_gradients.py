"""A loop that never clears its gradients is found; all the ways to clear them are known."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import modtrace
from helpers.findings import check_run
from helpers.health_models import FAMILIES, Stack

Clear = Callable[[nn.Module, torch.optim.Optimizer], None]


def _zero_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def _set_none(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


CLEARING: dict[str, Clear] = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "grad.data.zero_": _zero_data,
    "grad = None": _set_none,
}


def _backward(model: nn.Module) -> None:
    tokens = torch.randint(0, 30, (2, 6))
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def _train(
    family: str, clear: Clear | None, *, behind: bool = False, backwards: int = 1, clip: bool = False
) -> tuple[modtrace.Finding, ...]:
    model = Stack(FAMILIES[family])
    optimizer = torch.optim.AdamW(model.parameters())
    with modtrace.record(model, strict=True) as rec:
        for _ in range(4):
            if clear is not None and not behind:
                clear(model, optimizer)
            for _ in range(backwards):
                _backward(model)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            if clear is not None and behind:
                clear(model, optimizer)
    return check_run(rec, "uncleared-gradients")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("clip", [False, True])
def test_missing_clear_is_found(family: str, backwards: int, clip: bool) -> None:
    [found] = _train(family, None, backwards=backwards, clip=clip)
    assert (found.severity, found.step) == ("error", 1)
    assert "in 3 of 3 steps backwards added to old ones" in found.text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("clearing", CLEARING)
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
def test_clearing_is_seen(family: str, clearing: str, behind: bool, backwards: int) -> None:
    assert not _train(family, CLEARING[clearing], behind=behind, backwards=backwards)


@pytest.mark.parametrize("in_place", [False, True])
def test_backward_through_a_discriminator_is_left_alone(in_place: bool) -> None:
    """The generator's backward adds to the discriminator's gradients, which are cleared before they are used."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    of_one, of_other = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other))
    with modtrace.record(strict=True) as rec:
        for _ in range(4):
            of_other.zero_grad(set_to_none=not in_place)
            other(one(torch.randn(3, 4)).detach()).mean().backward()
            of_other.step()
            of_one.zero_grad(set_to_none=not in_place)
            other(one(torch.randn(3, 4))).mean().backward()
            of_one.step()
    assert not check_run(rec, "uncleared-gradients")


def test_closure_that_clears_is_left_alone() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    with modtrace.record(model, strict=True) as rec:
        for _ in range(4):
            optimizer.step(closure)
    assert not check_run(rec, "uncleared-gradients")


@pytest.mark.parametrize("family", FAMILIES)
def test_model_whose_gradients_are_not_cleared_is_named_among_several(family: str) -> None:
    kept, cleared = Stack(FAMILIES[family]), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (kept, cleared)]
    with modtrace.record(strict=True) as rec:
        for _ in range(4):
            _backward(kept)
            optimizers[0].step()
            optimizers[1].zero_grad()
            cleared(torch.randn(2, 4)).sum().backward()
            optimizers[1].step()
    [found] = check_run(rec, "uncleared-gradients")
    assert found.text.startswith("gradients of Stack are not cleared: in ")
