"""A state that is carried over steps with its graph is found, and truncated backpropagation is left alone."""

from collections import deque

import pytest
import torch
from torch import nn

import modtrace
from helpers.findings import check_run


class _Carrying(nn.Module):
    """Carries its state from one call to the next."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.out = cell, nn.Linear(8, 1)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(len(x), 8) if self.state is None else self.state
        self.state = self.cell(torch.cat([x, state], 1))
        return self.out(self.state)


FAMILIES = {
    "linear": lambda: nn.Sequential(nn.Linear(12, 8), nn.Tanh()),
    "normed": lambda: nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 8), nn.Dropout(0.1)),
}


def _train(family: str, *, detached_every: int) -> tuple[modtrace.Finding, ...]:
    model = _Carrying(FAMILIES[family]())
    # The cell's weights stay as they are, because autograd refuses to go through what an optimizer has written.
    optimizer = torch.optim.SGD(model.out.parameters(), lr=0.01)
    with modtrace.record(model, strict=True, backward_times=True) as rec:
        for number in range(8):
            if number % detached_every == 0 and model.state is not None:
                model.state = model.state.detach()
            model.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward(retain_graph=True)
            optimizer.step()
    return check_run(rec, "graph-over-steps")


@pytest.mark.parametrize("family", FAMILIES)
def test_state_with_its_graph_is_found(family: str) -> None:
    [found] = _train(family, detached_every=100)
    assert (found.severity, found.step) == ("error", 7)
    assert "the backward of step 7 goes through calls of steps 0 to 6" in found.text
    assert found.path.startswith("cell.")


class _Centered(nn.Module):
    """Carries a running mean with its graph, to which no output leads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.center = nn.Linear(4, 8), torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        self.center = 0.9 * self.center + 0.1 * hidden.mean(0)
        return hidden - self.center


@pytest.mark.parametrize("steps", [10, 45, 90])
def test_running_mean_with_its_graph_is_found_however_long_the_run_is(steps: int) -> None:
    model = _Centered()
    with modtrace.record(model, strict=True, backward_times=True) as rec:
        for _ in range(steps):
            model(torch.randn(3, 4)).square().mean().backward(retain_graph=True)
            rec.step()
    [found] = check_run(rec, "graph-over-steps")
    assert (found.severity, found.path) == ("error", "inner")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_truncated_backpropagation_is_left_alone(family: str, every: int) -> None:
    assert not _train(family, detached_every=every)


def test_losses_of_several_steps_at_once_are_left_alone() -> None:
    """As in reinforcement learning: an episode of calls, and one backward through the last of them."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model, strict=True, backward_times=True) as rec:
        for _ in range(6):
            losses = deque((model(torch.randn(3, 4)).square().mean() for _ in range(7)), maxlen=5)
            optimizer.zero_grad()
            torch.stack([*losses]).sum().backward()
            optimizer.step()
    assert not check_run(rec, "graph-over-steps")


def test_window_of_many_steps_that_stays_as_long_is_left_alone() -> None:
    model = nn.Linear(4, 1)
    with modtrace.record(model, strict=True, backward_times=True) as rec:
        losses: deque[torch.Tensor] = deque(maxlen=20)
        for _ in range(60):
            losses.append(model(torch.randn(3, 4)).square().mean())
            torch.stack([*losses]).sum().backward(retain_graph=True)
            rec.step()
    assert not check_run(rec, "graph-over-steps")


def test_recording_without_backward_calls_cannot_tell() -> None:
    model = nn.Linear(4, 1)
    with modtrace.record(model, strict=True) as rec:
        model(torch.randn(3, 4)).sum().backward()
    [unchecked] = rec.findings(only=["graph-over-steps"]).unchecked
    assert "--backward-times (backward_times=True)" in unchecked.remedy
