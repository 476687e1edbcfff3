"""A loss that leaves its band is found, with what left its own band before it; losses that are only noisy are not."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from builders import RecordingBuilder, TypedRecording
from helpers.findings import check_run, check_typed
from helpers.healthy_training import LSTMModel, pictures, texts

CHECK = "loss-spike"


def typed_losses(losses: list[float], *, models: list[str] | None = None, rms: float = 1.0) -> TypedRecording:
    """Returns a recording of one loss a step; in a step with a higher one the output of `body` is 10 times as large."""
    build = RecordingBuilder()
    roots = {name: build.module("", name) for name in dict.fromkeys(models or ["Net"])}
    bodies = {name: build.module("body", "Linear", parent=root) for name, root in roots.items()}
    for step, loss in enumerate(losses):
        name = models[step] if models else "Net"
        build.step(step, 1000 * step, 1000 * step + 900)
        outer = build.call(roots[name], 1000 * step, 1000 * step + 500, nth=0)
        call = build.call(bodies[name], 1000 * step + 10, 1000 * step + 400, parent=outer, nth=0)
        build.output(call, [rms * (1 + step % 3 / 10)] * 4)
        build.value(build.site(None, "loss"), [loss])
    return build.data()


NOISY = [2 + math.sin(7 * step) / 10 for step in range(40)]


def test_loss_far_above_its_band_is_found_with_its_step_and_numbers() -> None:
    losses = [*NOISY[:30], 4.0, *NOISY[31:]]
    (found,) = check_typed(typed_losses(losses), CHECK)
    assert (found.severity, found.step) == ("warning", 30)
    assert found.text == "the loss left its band in step 30: 4, before 2.02 ± 0.61"
    assert "it was back in its band in step 31" in found.evidence


@pytest.mark.parametrize(
    "losses",
    [
        NOISY,
        [5 / (1 + step) for step in range(40)],
        [*NOISY[:30], 1.0, *NOISY[31:]],
        [2.0] * 39 + [2.1],
        [math.exp(-step / 10 + 1.5 * math.sin(5 * step)) for step in range(40)],
        [1.0] * 10 + [1e-4] * 29 + [1e-2],
        [*NOISY[:30], math.nan, *NOISY[31:]],
    ],
    ids=["noisy", "falling", "far below", "a small rise", "noise by factors", "near 0", "not a number"],
)
def test_losses_without_a_spike_are_not_accused(losses: list[float]) -> None:
    assert check_typed(typed_losses(losses), CHECK) == ()


def test_losses_of_two_models_that_take_turns_have_bands_of_their_own() -> None:
    names = ["Generator" if step % 6 == 5 else "Critic" for step in range(120)]
    levels = {"Generator": 8.0, "Critic": 0.1}
    losses = [levels[name] * (1 + math.sin(5 * step) / 20) for step, name in enumerate(names)]
    assert check_typed(typed_losses(losses, models=names), CHECK) == ()
    losses[107] = 16.0
    (found,) = check_typed(typed_losses(losses, models=names), CHECK)
    assert found.step == 107


def test_loss_that_a_growing_scale_doubles_is_not_accused() -> None:
    scaled = [loss * (65536 if step < 30 else 131072) for step, loss in enumerate(NOISY)]
    assert check_typed(typed_losses(scaled), CHECK) == ()


def test_few_steps_and_recordings_without_losses_cannot_be_checked() -> None:
    check_typed(
        typed_losses(NOISY[:10]), CHECK, why="it takes 11 steps with a loss, and the recording has 10"
    )
    check_typed(RecordingBuilder().data(), CHECK, why="no losses were recorded")


class Classifier(nn.Module):
    """A small network without normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x.flatten(1)).relu()).relu())


AT = 20


def train(model: nn.Module, batches: Iterator[Any], fault: str) -> modtrace.Recording:
    """Trains for 26 steps; step 20 has the fault, of which its loss, or that of the next step, rises."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with modtrace.record(model) as rec:
        for step in range(26):
            x, y = next(batches)
            if fault == "batch" and step == AT:
                x, y = (300 * x if x.is_floating_point() else torch.randint_like(x, 128)), (y + 1) % 10
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            if fault == "gradient" and step == AT:
                for parameter in model.parameters():
                    parameter.grad *= 5000
            optimizer.step()
    return rec


def next_bytes() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for batch in texts(16):
        yield batch[:, :-1], batch[:, 1:]


FAMILIES = {"classifier": (Classifier, pictures), "LSTM": (LSTMModel, next_bytes)}


@pytest.mark.parametrize("family", FAMILIES)
def test_training_without_a_fault_has_no_spike(family: str) -> None:
    torch.manual_seed(0)
    make, batches = FAMILIES[family]
    assert check_run(train(make(), batches(), ""), CHECK) == ()


def test_batch_on_another_scale_is_told_by_the_first_layer_that_it_reached() -> None:
    torch.manual_seed(0)
    (found,) = check_run(train(Classifier(), pictures(), "batch"), CHECK)
    assert (found.step, found.path, found.parameter) == (AT, "first", None)
    assert found.evidence[0].startswith("first out of its band: the output of first in step 20, RMS ")
    assert found.remedy.startswith("look at what first was given in step 20")


@pytest.mark.parametrize("family", FAMILIES)
def test_update_that_was_too_large_is_told_by_its_gradients(family: str) -> None:
    torch.manual_seed(0)
    make, batches = FAMILIES[family]
    (found,) = check_run(train(make(), batches(), "gradient"), CHECK)
    assert found.step == AT + 1
    assert found.evidence[0].startswith("first out of its band: the gradient of ")
    assert " in step 20, RMS " in found.evidence[0]
    assert found.remedy.startswith("clip gradients")
