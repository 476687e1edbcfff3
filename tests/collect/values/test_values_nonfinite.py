"""Planted faults: the first tensor that is not finite is named with its module, step, phase and role."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from zoo import TiedGPT


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def train(plant: Callable[[TiedGPT, int], Any], steps: int = 4) -> Any:
    """What a recording finds in a run whose `plant(model, step)` breaks something before a step's forward."""
    model = TiedGPT(layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with modtrace.record(model, strict=True) as rec:
        for step in range(steps):
            plant(model, step)
            tokens = torch.randint(0, 17, (2, 8))
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    return rec.first_nonfinite()


def place(found: Any) -> tuple[Any, ...]:
    return found.path, found.step, found.phase, found.role, found.slot, found.call


def test_healthy_run_has_none():
    assert train(lambda model, step: None) is None


def test_weight_that_becomes_nan():
    def plant(model: TiedGPT, step: int) -> None:
        if step == 2:
            model.blocks[2].attn.qkv.weight.data[5, 3] = math.nan

    found = train(plant)
    assert place(found) == ("blocks.2.attn.qkv", 2, "forward", "output", "", 0)
    assert found.root == "TiedGPT"
    assert found.nan_count == 16  # one channel of 2 x 8 tokens
    assert found.numel == 2 * 8 * 48
    assert "blocks.2.attn.qkv.weight (1 NaN)" in found.hint


def test_input_that_is_nan():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 1))
    with modtrace.record(model, strict=True) as rec:
        for step in range(3):
            x = torch.ones(2, 4)
            x[1, 2] = math.nan if step == 1 else 1.0
            with torch.no_grad():
                model(x)
    found = rec.first_nonfinite()
    assert place(found) == ("0", 1, "forward", "output", "", 0)
    assert (found.nan_count, found.inf_count, found.numel) == (1, 0, 8)


class SquareRoot(nn.Module):
    """Zero goes through forward, and comes back as an infinite gradient."""

    def forward(self, x):
        return (x - x).sqrt() + x


def test_gradient_of_a_square_root_at_zero():
    def plant(model: TiedGPT, step: int) -> None:
        if step == 2:
            model.blocks[2].act = SquareRoot()

    found = train(plant)
    assert place(found) == ("blocks.2.fc", 2, "backward", "grad_output", "", 0)
    assert found.nan_count > 0


def test_gradient_that_only_a_parameter_gets():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x + self.scale.sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, strict=True) as rec:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert place(rec.first_nonfinite()) == ("1", 0, "optimizer", "parameter_grad", "scale", None)


def test_values_of_another_thread_do_not_hide_it(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with modtrace.record(model, to=tmp_path / "run.modtrace", strict=True) as rec, torch.no_grad():
        for step in range(300):
            model(torch.full((2, 4), math.nan if step == 257 else 1.0))
    found = rec.first_nonfinite()
    assert place(found) == ("0", 257, "forward", "output", "", 0)
    again = modtrace.open_recording(tmp_path / "run.modtrace").first_nonfinite()
    assert again == found


def test_running_recording_has_found_nothing_so_far_where_nothing_was_measured_yet() -> None:
    model = torch.nn.Linear(2, 2)
    with modtrace.record(model) as rec:
        assert rec.first_nonfinite() is None
        model(torch.ones(1, 2))
    assert rec.first_nonfinite() is None


def test_running_recording_that_measures_nothing_says_so() -> None:
    with modtrace.record(torch.nn.Linear(2, 2), values=None) as rec:  # noqa: SIM117
        with pytest.raises(modtrace.ModtraceError, match=r"^no values were recorded\."):
            rec.first_nonfinite()


def test_values_that_were_all_dropped_are_not_finite_values() -> None:
    model = torch.nn.Linear(2, 2)
    with modtrace.record(model, max_bytes=1) as rec:
        model(torch.ones(1, 2))
    with pytest.raises(
        modtrace.ModtraceError, match=r"^no values are .* were dropped to stay within max_bytes=1\.$"
    ):
        rec.first_nonfinite()
