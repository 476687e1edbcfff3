"""Training in eval(), and evaluation with active dropout or batch statistics, are found."""

import copy

import pytest
import torch
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import record_run

CHECK = "modes"


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 4)
    )


MODELS = {"classifier": (classifier, "1", "dropout"), "convolutions": (convolutions, "2", "batch norm")}


def run(model: nn.Module, modes: str) -> modtrace.Recording:
    """Runs a step for each letter: `T` trains in train(), `t` in eval(), `E` evaluates in eval(), `e` in train()."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model) as rec:
        for mode in modes:
            model.train(mode in "Te")
            with torch.set_grad_enabled(mode in "Tt"):
                loss = model(torch.randn(6, 8)).square().mean()
            if mode in "Tt":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return rec


@pytest.mark.parametrize("name", MODELS)
def test_model_that_trains_on_in_eval_after_an_evaluation_is_an_error(name: str) -> None:
    make, path, _ = MODELS[name]
    (found,) = check_run(run(make(), "TTTTTEEEtttt"), CHECK)
    assert (found.severity, found.step) == ("error", 8)
    assert found.text == "Sequential trains in eval(), in all of the last 4 training steps"
    assert found.evidence == ("it was in train() up to step 4", f"as in evaluation: Sequential/{path}")


@pytest.mark.parametrize("name", MODELS)
def test_model_that_was_never_in_train_is_a_warning(name: str) -> None:
    (found,) = check_run(run(MODELS[name][0](), "tttttttEE"), CHECK)
    assert (found.severity, found.text) == (
        "warning",
        "Sequential trains in eval(), in all of the last 7 training steps",
    )


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_in_train_is_found_with_the_module_that_it_changes(name: str) -> None:
    make, path, kind = MODELS[name]
    (found,) = check_run(run(make(), "TTTTeeeTTTTeee"), CHECK)
    assert (found.severity, found.step, found.path) == ("warning", 4, path)
    assert found.text == f"{kind} computes as in training in 6 evaluation steps: Sequential/{path}"
    assert found.remedy == "call model.eval() before an evaluation and model.train() after it"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("modes", ["TTTTEEETTTTEEE", "TTTTTT", "EEEE", "TTTTEEEt"])
def test_modes_as_they_should_be_are_not_accused(name: str, modes: str) -> None:
    assert check_run(run(MODELS[name][0](), modes), CHECK) == ()


def test_model_without_modules_that_differ_is_not_accused() -> None:
    layers = nn.Linear(8, 8), nn.Dropout(0.0), nn.BatchNorm1d(8, track_running_stats=False)
    assert check_run(run(nn.Sequential(*layers), "TTTTeeettt"), CHECK) == ()


@pytest.mark.parametrize(
    "name",
    ["GAN, images", "a student and its moving teacher, images", "ResNet, fine-tuned with frozen batch norm"],
)
def test_trainings_that_mix_modes_on_purpose_are_not_accused(name: str) -> None:
    assert check_run(record_run(name, 8), CHECK) == ()


def _with_target(steps: int, *, is_evaluated: bool) -> modtrace.Recording:
    """Trains towards a slow copy in train(), which is called twice first; or evaluates the copy now and then."""
    online = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.01)
    with modtrace.record() as rec:
        for step in range(steps):
            x = torch.randn(6, 8)
            wanted = x
            if not is_evaluated or step % 10 == 9:
                with torch.no_grad():
                    wanted = target(x) + target(x + 1)
            optimizer.zero_grad()
            (online(x) - wanted).square().mean().backward()
            optimizer.step()
    return rec


def test_target_in_train_is_a_teacher_where_most_training_steps_begin_with_it() -> None:
    assert check_run(_with_target(20, is_evaluated=False), CHECK) == ()
    (found,) = check_run(_with_target(40, is_evaluated=True), CHECK)
    assert found.text.startswith("batch norm computes as in training in ")


def test_recordings_that_do_not_say_the_modes_cannot_be_checked() -> None:
    check_typed(
        RecordingBuilder().data(),
        CHECK,
        why="it was not recorded whether modules were in train() or in eval()",
    )
