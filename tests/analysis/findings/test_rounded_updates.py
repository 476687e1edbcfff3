"""Weights of low precision that updates leave as they are, are found, and told from a learning rate of 0."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import LSTMModel, texts

CHECK = "rounded-updates"


class Norms(nn.Module):
    """A classifier whose norm has weights of 1, which updates of 0.001 leave as they are in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(128, 16), nn.LayerNorm(16), nn.Linear(16, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def train(model: nn.Module, lr: float, dtype: torch.dtype = torch.bfloat16) -> modtrace.Recording:
    torch.manual_seed(0)
    model, batches = model.to(dtype), texts(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
    with modtrace.record(model) as rec:
        for _ in range(9):
            batch = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
            optimizer.step()
    return rec


def test_weights_of_one_that_small_updates_do_not_move_are_found() -> None:
    (found,) = check_run(train(Norms(), 1e-3), CHECK)
    assert (found.severity, found.path, found.parameter) == ("warning", "norm", "weight")
    assert found.text == "norm.weight (bfloat16) does not change in 7 steps, with gradients that are not 0"
    assert found.evidence == ("an update below 1/512 of its weight is rounded away",)


def test_model_of_which_most_weights_do_not_move_is_an_error() -> None:
    model = LSTMModel()
    with torch.no_grad():
        for parameter in [*model.rnn.parameters(), *model.head.parameters()]:
            parameter.sign_()
    (found,) = check_run(train(model, 1e-3), CHECK)
    assert found.severity == "error"
    assert found.text.startswith(
        "10 parameters in bfloat16 do not change in 7 steps, with gradients that are not 0"
    )


def test_learning_rate_of_zero_is_told_as_such() -> None:
    (found,) = check_run(train(Norms(), 0.0), CHECK)
    assert found.severity == "warning"
    assert "its learning rate may be 0" in found.evidence[-1]


@pytest.mark.parametrize("make", [Norms, LSTMModel])
@pytest.mark.parametrize(("lr", "dtype"), [(0.03, torch.bfloat16), (1e-3, torch.float32)])
def test_weights_that_move_are_not_accused(make: type[nn.Module], lr: float, dtype: torch.dtype) -> None:
    assert check_run(train(make(), lr, dtype), CHECK) == ()


def test_recordings_without_parameters_cannot_be_checked() -> None:
    check_typed(RecordingBuilder().data(), CHECK, why="no parameters were recorded")
