"""Outputs, and units of outputs, that are 0 in every step are found."""

import pytest
import torch
from torch import nn

import modtrace
from analysis.findings.test_zero_gradients import kill, train, usual
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import record_run

CHECK = "dead-units"


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv1d(1, 4, 3),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


def test_relu_that_returns_only_zeros_is_found() -> None:
    model = classifier()
    kill(model[0], -5)
    (found,) = check_run(train(model, usual), CHECK)
    assert (found.severity, found.path) == ("warning", "1")
    assert found.text == "Sequential/1 returns nothing but zeros in all 6 steps"


def test_relu_behind_a_batch_norm_that_shifts_too_far_is_found() -> None:
    model = convolutions()
    nn.init.constant_(model[2].bias, -50)
    (found,) = check_run(train(model, usual), CHECK)
    assert found.path == "3"


@pytest.mark.parametrize("make", [classifier, convolutions])
def test_models_that_learn_are_not_accused(make) -> None:
    assert check_run(train(make(), usual), CHECK) == ()


def test_dead_units_of_one_output_are_counted_where_channels_were_measured() -> None:
    model = classifier()
    with torch.no_grad():
        model[0].bias[:5] = -50
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model, values=modtrace.Capture(stats=2)) as rec:
        for step in range(8):
            optimizer.zero_grad()
            usual(model, step).backward()
            optimizer.step()
    (found,) = check_run(rec, CHECK)
    assert found.text == "5 of 8 units of Sequential/1 are 0 in all 6 tensors"
    assert check_run(rec, CHECK, share=0.7) == ()


def test_last_layer_that_begins_with_zeros_is_not_accused() -> None:
    assert check_run(record_run("diffusion, images", 9), CHECK) == ()


def test_recordings_without_outputs_cannot_be_checked() -> None:
    check_typed(RecordingBuilder().data(), CHECK, why="no outputs of modules were recorded")
