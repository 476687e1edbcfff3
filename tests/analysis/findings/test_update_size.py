"""Updates that are too large or too small for their weights are found."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import LSTMModel, texts

CHECK = "update-size"


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 16), nn.Linear(16, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def train(
    model: nn.Module, lr: float, *, roles: tuple[str, ...] = ("update", "parameter")
) -> modtrace.Recording:
    torch.manual_seed(0)
    batches = texts(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with modtrace.record(model, values=modtrace.Capture(roles=roles)) as rec:
        for _ in range(8):
            batch = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()
    return rec


@pytest.mark.parametrize(("make", "place"), [(Bigrams, "head"), (LSTMModel, "rnn")])
def test_weights_that_change_by_a_large_part_of_their_size_are_found(
    make: type[nn.Module], place: str
) -> None:
    torch.manual_seed(0)
    (found,) = check_run(train(make(), 0.1), CHECK)
    assert (found.severity, found.path) == ("warning", place)
    assert found.text.endswith(" of their size, where 0.001 is usual")
    assert found.remedy.startswith("lower the learning rate")


@pytest.mark.parametrize("make", [Bigrams, LSTMModel])
def test_weights_that_hardly_change_are_found(make: type[nn.Module]) -> None:
    (found,) = check_run(train(make(), 1e-8), CHECK)
    assert found.text.startswith("each step changes weights by ")


def test_weight_that_begins_with_zeros_is_not_accused() -> None:
    model = Bigrams()
    nn.init.zeros_(model.head.weight)
    assert check_run(train(model, 1e-3), CHECK) == ()


@pytest.mark.parametrize("make", [Bigrams, LSTMModel])
@pytest.mark.parametrize("lr", [1e-5, 1e-3, 1e-2])
def test_usual_learning_rates_are_not_accused(make: type[nn.Module], lr: float) -> None:
    assert check_run(train(make(), lr), CHECK) == ()


def test_recordings_without_updates_cannot_be_checked() -> None:
    data = train(Bigrams(), 1e-3, roles=("parameter", "parameter_grad")).data
    check_typed(data, CHECK, why="no updates of parameters were recorded")
    check_typed(RecordingBuilder().data(), CHECK, why="no updates of parameters were recorded")
