"""Gradients that no optimizer used are an answer once a GradScaler skips half of the last twenty steps."""

import pytest
import torch
from torch import nn

import modtrace

REFUSED = "they overflow at every scale of the GradScaler: use bfloat16, or compute what overflows in float32"


def record(*, skipped: int, steps: int, ops: bool) -> modtrace.Recording:
    """Returns the recording of a training in float16 of which the first steps overflow."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (15 + skipped))
    with modtrace.record(model, ops=ops) as rec:
        for _ in range(steps):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.ones(1, 8)).float().sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0 ** (15 + skipped - min(skipped, steps))
    return rec


@pytest.mark.parametrize("ops", [True, False], ids=["ops", "modules"])
@pytest.mark.parametrize("skipped", [9, 10])
def test_overflows_of_skipped_steps_are_an_answer_from_the_tenth_of_twenty_on(
    skipped: int, ops: bool
) -> None:
    found = record(skipped=skipped, steps=12, ops=ops).first_nonfinite()
    assert (found is not None) == (skipped == 10)
    if found is not None:
        assert (found.step, found.hint, found.remedy) == (
            9,
            "no optimizer used the gradients of 10 of the last 10 steps",
            REFUSED,
        )


def test_scaler_that_skips_every_step_is_told_by_the_op_that_overflows() -> None:
    found = record(skipped=30, steps=24, ops=True).first_nonfinite()
    assert found is not None
    assert (found.phase, found.step, found.remedy) == ("backward", 9, REFUSED)


class Root(nn.Module):
    """Adds nothing, by a root of which the derivative at 0 is infinite."""

    def forward(self, x: torch.Tensor, is_bad: bool) -> torch.Tensor:
        return x + 0 * (x * 0).abs().sqrt() if is_bad else x


@pytest.mark.parametrize("ops", [True, False], ids=["ops", "modules"])
def test_gradients_behind_which_the_program_stops_itself_are_an_answer(ops: bool) -> None:
    torch.manual_seed(0)
    first, root, last = nn.Linear(8, 8), Root(), nn.Linear(8, 2)
    model = nn.ModuleList([first, root, last])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model, ops=ops) as rec, pytest.raises(RuntimeError, match="non-finite"):
        for step in range(5):
            loss = last(root(first(torch.randn(4, 8)), step == 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
    found = rec.first_nonfinite()
    assert found is not None
    assert (found.step, found.phase) == (3, "backward")
