"""Buffers are measured when an outermost call has ended."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.parameter_watch import watching
from modtrace import Capture


class Counts(nn.Module):
    """Has a buffer that is not saved, one that is none, and one of a shape of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_buffers_that_are_copied_late_are_those_after_each_call():
    model = nn.BatchNorm1d(1, momentum=0.5)
    values = Capture(roles="buffer", tensors="lazy")
    with modtrace.record(model, strict=True, values=values) as rec:
        for mean in (2.0, 4.0, 8.0):  # one step: gradients are accumulated
            model(torch.full((2, 1), mean)).sum().backward()
    found = [tensor.tolist() for _, tensor in rec.tensors("running_mean", role="buffer")]
    assert found == [[1.0], [2.5], [5.25]]


def test_module_called_several_times_has_one_row_for_each_outermost_call():
    layer = Counts()
    model = nn.Sequential(layer, nn.Identity(), layer)
    with watching(model, roles="buffer") as watch:
        for _ in range(2):
            model(torch.ones(1))
        watch.step_ends()
    assert [(each.site, each.value.item()) for each in watch.rows] == [
        (("0", "calls"), 2),
        (("0", "calls"), 4),
    ]


def test_buffer_of_two_modules_is_measured_once():
    model = nn.Sequential(Counts(), Counts())
    model[1].calls = model[0].calls
    with watching(model, roles="buffer") as watch:
        model(torch.ones(1))
        watch.step_ends()
    assert watch.values("buffer") == {("0", "calls"): torch.tensor(2), ("1", "calls"): torch.tensor(2)}
    assert watch.names == ["0.calls.buffer"]


def test_recompute_measures_no_buffers_again():
    model = nn.Sequential(Counts(), nn.Linear(2, 2))
    with watching(model, roles="buffer") as watch:
        checkpoint(model, torch.ones(1, 2, requires_grad=True), use_reentrant=False).sum().backward()
        watch.step_ends()
    assert [each.value.item() for each in watch.rows] == [1]


def test_call_that_raises_has_the_buffers_it_has_left():
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    model = nn.Sequential(Counts(), Raises())
    with watching(model, roles="buffer") as watch:
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.ones(1))
        watch.step_ends()
    assert [each.value.item() for each in watch.rows] == [1]


def test_buffer_is_read_anew_when_it_was_replaced():
    model = Counts()
    with watching(model, roles="buffer") as watch:
        model(torch.ones(1))
        model.calls = torch.tensor(10)
        model.register_buffer("late", torch.tensor(7))
        model(torch.ones(1))
        watch.step_ends()
    assert [(each.slot, each.value.item()) for each in watch.rows] == [
        ("calls", 1),
        ("calls", 11),
        ("late", 7),
    ]


def test_tracing_sees_no_buffer_being_read():
    model = nn.Sequential(nn.BatchNorm1d(3).eval())
    plain = str(torch.jit.trace(model, torch.ones(2, 3)).graph)
    with watching(model, roles="buffer") as watch:
        traced = str(torch.jit.trace(model, torch.ones(2, 3)).graph)
        watch.step_ends()
    assert traced.count("\n") == plain.count("\n")
    assert watch.rows
