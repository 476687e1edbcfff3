"""A GradScaler that skips many steps is found, also without ops; one that looks for its scale is not."""

import pytest
import torch
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import record_run

CHECK = "grad-scaler"


def train(
    overflows: set[int], steps: int = 24, *, fused: bool = False, conv: bool = False
) -> modtrace.Recording:
    """Trains in float16; in these steps the gradients overflow."""
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3), nn.Flatten()) if conv else nn.Linear(8, 8)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    with modtrace.record(model) as rec:
        for step in range(steps):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(2, 8)).float().mean() * (1e30 if step in overflows else 1)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(64.0)
    return rec


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_that_skips_half_of_the_steps_is_an_error(fused: bool, conv: bool) -> None:
    (found,) = check_run(train({*range(4, 24, 2)}, fused=fused, conv=conv), CHECK)
    assert (found.severity, found.step) == ("error", 4)
    assert found.text == "the GradScaler skipped 10 of the last 20 steps: their gradients overflow"
    where = "Sequential/2" if conv else "Linear"
    assert found.evidence[0].startswith(f"first not finite: the gradient at {where}, in 10 of these steps")


def test_scaler_that_skips_every_step_is_an_error() -> None:
    (found,) = check_run(train({*range(24)}), CHECK)
    assert found.text == "the GradScaler skipped 20 of the last 20 steps: their gradients overflow"


def test_a_quarter_of_the_steps_is_a_warning_once_the_run_is_long() -> None:
    (found,) = check_run(train({*range(41, 60, 4)}, 60), CHECK)
    assert found.severity == "warning"
    assert check_run(train({*range(5, 24, 4)}), CHECK) == ()
    assert check_run(train({41, 45, 49, 53}, 60), CHECK) == ()


def test_steps_without_an_optimizer_are_no_skipped_ones() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model) as rec:
        for step in range(40):
            model(torch.randn(2, 8)).square().mean().backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            rec.step()
    assert check_run(rec, CHECK) == ()


@pytest.mark.parametrize("ops", [False, True])
def test_optimizer_that_steps_without_gradients_is_no_skipped_step(ops: bool) -> None:
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, generator)]
    with modtrace.record(ops=ops) as rec:
        for _ in range(24):
            fake = generator(torch.randn(8, 4))
            for optimizer in optimizers:
                optimizer.zero_grad()
                critic(fake.detach()).square().mean().backward()
                optimizer.step()
    assert check_run(rec, CHECK) == ()


def test_scaler_that_finds_its_scale_is_not_accused() -> None:
    assert check_run(record_run("CNN, float16 with a GradScaler", 12), CHECK) == ()


def test_recordings_without_gradients_cannot_be_checked() -> None:
    check_typed(RecordingBuilder().data(), CHECK, why="no gradients were recorded")
