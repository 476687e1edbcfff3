"""The call and the op that raised are found, with what the op was given."""

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from helpers.findings import check_run
from helpers.health_models import FAMILIES, Stack, train
from modtrace.cli.endings import Terminated


def _fail(model: nn.Module, *given: torch.Tensor, **options: object) -> modtrace.Recording:
    with pytest.raises(RuntimeError), modtrace.record(model, strict=True, **options) as rec:
        model(*given)
    return rec


@pytest.mark.parametrize("ops", [False, True])
def test_innermost_call_is_named(ops: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(5, 2)))
    [found] = check_run(_fail(model, torch.randn(3, 4), ops=ops), "failed")
    assert (found.severity, found.path, found.step) == ("error", "1.0", 0)
    assert (
        "1.0 fails in step 0: RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x4 and 5x2)"
        in found.text
    )
    assert Path(__file__).name in found.text  # the line
    assert found.op == ("aten.addmm.default" if ops else None)
    if ops:
        assert "mat1: [3, 4] float32, mat2: [5, 2] float32" in found.evidence[0]
    else:
        assert "--ops (ops=True)" in found.remedy


def test_op_outside_of_a_leaf_module_is_named_with_its_numbers() -> None:
    class Reshaping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).unfold(1, 9, 1)

    [found] = check_run(_fail(nn.Sequential(Reshaping()), torch.randn(3, 4), ops=True), "failed")
    assert found.path == "0"
    assert found.evidence == (
        "aten.unfold.default was given self: [3, 4] float32, dimension: 1, size: 9, step: 1",
    )


class Policy(nn.Module):
    """Draws an action."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=logits).sample()


@pytest.mark.parametrize("ops", [False, True])
@pytest.mark.parametrize(
    ("model", "given", "remedy"),
    [
        (nn.Embedding(4, 4), torch.tensor([[4]]), "look for a label or an index"),
        (nn.Linear(4, 4), torch.ones(1, 4, dtype=torch.float64), "bring what it was given to one dtype"),
        (nn.Linear(4, 4), torch.ones(1, 5), "compare the shapes"),
        (nn.LSTM(4, 4), torch.ones(2, 3, 5), "compare "),  # raised by Python, around ops
        (Policy(), torch.full((2, 3), torch.nan), "look for NaN"),
    ],
)
def test_remedy_fits_the_error(model: nn.Module, given: torch.Tensor, remedy: str, ops: bool) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)), modtrace.record(model, ops=ops) as rec:
        model(given)
    [found] = check_run(rec, "failed")
    assert found.remedy.startswith(remedy)
    assert ("record --ops" in found.remedy) is not ops


@pytest.mark.parametrize("family", FAMILIES)
def test_error_that_the_program_catches_and_one_outside_of_the_model_are_left_alone(family: str) -> None:
    model = Stack(FAMILIES[family])
    with modtrace.record(model, strict=True) as rec, pytest.raises(IndexError):
        model(torch.full((2, 6), 99))
    assert not check_run(rec, "failed")
    assert not check_run(train(model), "failed")


@pytest.mark.parametrize("family", FAMILIES)
def test_error_of_a_backward_and_of_the_loop_are_told(family: str) -> None:
    model = Stack(FAMILIES[family])
    with pytest.raises(RuntimeError), modtrace.record(model, strict=True) as rec:
        loss = model(torch.randint(30, (2, 6))).sum()
        loss.backward()
        loss.backward()
    [found] = check_run(rec, "failed")
    assert found.severity == "error"
    assert found.text.startswith(
        "the run fails outside of modules, in step 0 or after it: RuntimeError: Trying to backward"
    )
    assert Path(__file__).name in found.text


def test_error_before_the_first_call_is_told() -> None:
    with pytest.raises(ValueError), modtrace.record() as rec:
        torch.optim.Adam([])
    [found] = check_run(rec, "failed")
    assert found.text.startswith(
        "the run fails outside of modules, before its first step ended: ValueError: "
    )


class TerminatedWorkerError(Exception):
    """Has a name that begins like that of a signal's."""


def test_error_with_a_name_that_begins_like_an_end_by_a_signal_is_a_failure() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TerminatedWorkerError), modtrace.record(model, strict=True) as rec:
        model(torch.ones(1, 2))
        raise TerminatedWorkerError("a worker was killed")
    assert "TerminatedWorkerError" in check_run(rec, "failed")[0].text


@pytest.mark.parametrize("end", [KeyboardInterrupt(), Terminated(signal.SIGTERM)], ids=repr)
@pytest.mark.parametrize("inside", [False, True])
def test_interrupt_is_no_failure(inside: bool, end: BaseException) -> None:
    def interrupt(*_: object) -> None:
        raise end

    model = nn.Linear(2, 2)
    if inside:
        model.register_forward_hook(interrupt)
    with pytest.raises(type(end)), modtrace.record(model, strict=True) as rec:
        model(torch.ones(1, 2))
        interrupt()
    assert not check_run(rec, "failed")
