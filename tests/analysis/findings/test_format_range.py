"""Outputs near the largest number of float16, and gradients near its smallest, are found."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import record_run

CHECK = "float16-range"


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(24, 4))


MODELS = {"classifier": (classifier, "0"), "convolutions": (convolutions, "1")}


def train(model: nn.Module, *, scale: float = 1.0, factor: float = 1.0, dtype: torch.dtype = torch.float16):
    """Trains under autocast on inputs on a scale, with the loss times a factor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    with modtrace.record(model) as rec:
        for _ in range(6):
            with torch.autocast("cpu", dtype=dtype):
                out = model(scale * torch.randn(6, 8))
            optimizer.zero_grad()
            (factor * F.cross_entropy(out.float() / scale, torch.arange(6) % 4)).backward()
            optimizer.step()
    return rec


@pytest.mark.parametrize("name", MODELS)
def test_output_above_half_of_the_largest_number_is_found(name: str) -> None:
    torch.manual_seed(0)
    make, path = MODELS[name]
    model = make()
    first, last = (layer for layer in model if hasattr(layer, "weight"))
    with torch.no_grad():
        first.weight.mul_(25)
        last.weight.mul_(0.01)
    (found,) = check_run(train(model, scale=1000), CHECK, rms=0)
    assert (found.severity, found.path) == ("warning", path)
    assert found.text.startswith(f"Sequential/{path} returns ")
    assert "in float16, whose largest number is 65,504" in found.text


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_underflow_without_a_scaler_are_found(name: str) -> None:
    torch.manual_seed(0)
    (found,) = check_run(train(MODELS[name][0](), factor=1e-6), CHECK)
    assert found.text.startswith("gradients underflow in float16: RMS ")
    assert found.remedy == "scale the loss (torch.amp.GradScaler), or use bfloat16"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 5000}, {"factor": 65536}, {"scale": 20_000, "dtype": torch.bfloat16}],
    ids=["plain", "large", "scaled loss", "bfloat16"],
)
def test_numbers_within_the_range_are_not_accused(name: str, options: dict) -> None:
    torch.manual_seed(0)
    assert check_run(train(MODELS[name][0](), **options), CHECK) == ()


def test_masks_with_the_lowest_number_are_not_accused() -> None:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x, torch.finfo(x.dtype).min).triu(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.mask = nn.Linear(6, 6), Mask()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.linear(x)
            return (out + self.mask(out)).softmax(-1)

    model = Model()
    with modtrace.record(model) as rec:
        for _ in range(6):
            with torch.autocast("cpu", dtype=torch.float16):
                model(torch.randn(6, 6)).square().sum().backward()
    assert check_run(rec, CHECK) == ()


def test_training_with_a_scaler_is_not_accused() -> None:
    assert check_run(record_run("CNN, float16 with a GradScaler", 8), CHECK) == ()


def test_recordings_without_values_cannot_be_checked() -> None:
    check_typed(RecordingBuilder().data(), CHECK, why="no outputs or gradients were recorded")
