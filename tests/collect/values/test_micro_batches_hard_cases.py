"""Hooks on parameters where steps overlap, parameters are odd, or others have hooked them before."""

import io
import warnings
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn

import modtrace
from helpers.parameter_watch import watching, watching_for
from modtrace import Capture

WANTED: dict[str, Any] = {"roles": "parameter_grad", "micro_batches": True}


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def hooks_on(model: nn.Module) -> int:
    return sum(len(each._backward_hooks or ()) for each in model.parameters())


# Backwards of steps that have ended.


def test_hooks_of_a_late_backward_go_when_it_ends() -> None:
    model = nn.Linear(2, 1)
    with watching(model, **WANTED) as watch:
        loss = model(torch.ones(1, 2)).sum()
        watch.step_ends()
        assert hooks_on(model) == 0
        loss.backward()
        assert hooks_on(model) == 0
    assert [each.site for each in watch.rows] == [("", "bias"), ("", "weight")]


def test_step_that_ends_before_a_late_backward_runs_leaves_it_its_hooks() -> None:
    model = nn.Linear(2, 1)
    with watching(model, **WANTED) as watch:
        loss = model(torch.ones(1, 2)).sum()
        watch.step_ends()
        late: Any = object()  # it has begun, on another thread, and its first node has not run
        watch.micro_batches.backward_began(late)
        watch.step_ends()
        assert hooks_on(model) == 2
        assert watch.micro_batches.take_backward(late) is None
        assert hooks_on(model) == 0
    del loss


def test_module_without_parameters_is_not_remembered_for_late_backwards() -> None:
    model = nn.ReLU()
    with watching(model, **WANTED) as watch:
        output = model(torch.ones(1, requires_grad=True))
        watch.step_ends()
        assert [*watch.micro_batches._left.items()] == []
    assert output.requires_grad


# Captures of different steps.

TWO = (Capture(**WANTED), Capture(**WANTED))


def test_parameter_of_two_open_steps_is_looked_at_by_the_captures_of_both() -> None:
    model = nn.Linear(2, 1, bias=False)
    with watching_for(*TWO, roots=(model,)) as watch:
        watch.active = 0b01
        first = model(torch.ones(1, 2))
        watch.active = 0b10
        second = model(torch.ones(1, 2))
        (first + second).sum().backward()
    assert [each.mask for each in watch.rows] == [0b11]


def test_late_backward_through_two_steps_is_looked_at_by_the_captures_of_both() -> None:
    model = nn.Linear(2, 1, bias=False)
    outputs = []
    with watching_for(*TWO, roots=(model,)) as watch:
        for active in (0b01, 0b10):
            watch.active = active
            outputs.append(model(torch.ones(1, 2)))
            watch.step_ends()
        sum(outputs).sum().backward()
    assert [each.mask for each in watch.rows] == [0b11]


def test_function_is_not_called_in_steps_of_another_capture() -> None:
    asked: list[float] = []
    captures = [
        Capture(**WANTED),
        Capture(**WANTED, steps=[9], function=lambda tensor: asked.append(tensor.sum().item())),
    ]
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, strict=True, values=captures) as rec:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert rec.table("values").column("phase").to_pylist() == ["backward", "optimizer"] * 2
    assert asked == []


# Odd parameters.


def test_weight_that_is_computed_is_not_hooked() -> None:
    base = nn.Parameter(torch.ones(1, 2))
    model = nn.Linear(2, 1, bias=False)
    model._parameters["weight"] = base * 2  # as the replicas of DataParallel have it
    with watching(model, **WANTED) as watch:
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight._backward_hooks is None
    assert watch.rows == []
    assert base.grad.tolist() == [[2.0, 2.0]]


def test_parameter_that_got_other_insides_is_hooked_again_in_the_same_step() -> None:
    model = nn.Linear(2, 1, bias=False)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with watching(model, **WANTED) as watch:
            model(torch.ones(1, 2))
            model.double()  # torch forgets all hooks of what it swaps
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert [each.value.dtype for each in watch.rows] == [torch.float64]


def test_parameter_without_memory_is_hooked_when_it_has_some() -> None:
    model = nn.LazyLinear(1, bias=False)
    with watching(model, **WANTED) as watch:
        model(torch.ones(1, 2)).sum().backward()
        assert watch.rows == []
        model(torch.ones(1, 2)).sum().backward()
    assert [each.value.tolist() for each in watch.rows] == [[[1.0, 1.0]]]


# Others on the same parameter.


def test_parameter_that_a_user_hooked_before_is_left_as_it_was() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.register_hook(lambda gradient: None).remove()
    assert model.weight._backward_hooks == {}
    with (
        modtrace.record(model, strict=True, values=Capture(**WANTED)),
        modtrace.record(model, strict=True, values=Capture(**WANTED)),
    ):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight._backward_hooks == {}


def test_hooked_parameter_is_sent_to_another_process_without_a_warning() -> None:
    model = nn.Linear(2, 1, bias=False).share_memory()
    with watching(model, **WANTED) as watch, warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 2)).sum().backward()
        assert hooks_on(model) == 1
        ForkingPickler(io.BytesIO()).dump(model.weight)
    assert len(watch.rows) == 1


def test_stopped_taps_leave_no_hook_though_the_step_is_open() -> None:
    model = nn.Linear(2, 1)
    with watching(model, **WANTED) as watch:
        model(torch.ones(1, 2))
        assert hooks_on(model) == 2
        watch.stop()
        assert hooks_on(model) == 0


# Errors of ours.


@pytest.mark.parametrize("role", ["parameter_grad", "parameter", "buffer"])
def test_error_of_ours_is_told_and_the_run_goes_on(role: str) -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fails = RuntimeError("no")

    def fail(*args: Any) -> Any:
        raise fails

    with watching(model, roles=role, micro_batches=role == "parameter_grad") as watch:
        watch.parameters._measure = watch.micro_batches._measure = watch.buffers._measure = fail
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        watch.step_ends()
        assert watch.errors
        assert all(each is fails for each in watch.errors)
        watch.errors.clear()
    assert model.bias.tolist() != [0.0, 0.0]
    assert watch.rows == []
