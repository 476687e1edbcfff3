"""An eager run is compared with one whose modules were measured inside of compiled code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.compiled_runs import Run, rows_of, run
from modtrace.analysis.divergence.answer import Comparison

WIDTH = 8
ROLES = ("output", "grad_output")


class Block(nn.Module):
    """An MLP that is called twice."""

    def __init__(self, act: nn.Module):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for _ in range(2):
            x = x + self.down(self.act(self.up(x)))
        return x


def make(act: Callable[[], nn.Module] = nn.GELU) -> tuple[nn.Module, dict[str, Any]]:
    """Makes three blocks, of which the second has the given activation."""
    blocks = nn.Sequential(Block(nn.GELU()), Block(act()), Block(nn.GELU()))
    return blocks, {"input": torch.randn(4, WIDTH)}


def make_other() -> tuple[nn.Module, dict[str, Any]]:
    return make(lambda: nn.GELU(approximate="tanh"))


def compare(first: Run, second: Run) -> Comparison:
    assert first.rec is not None and second.rec is not None
    return modtrace.compare(first.rec, second.rec)


@pytest.fixture(scope="module")
def eager() -> Run:
    return run(make)


@pytest.fixture(scope="module")
def inside() -> Run:
    return run(make, "aot_eager", compiled="inside")


def test_run_inside_equals_the_eager_one_call_by_call(eager: Run, inside: Run) -> None:
    for first in (eager, run(make, ops=True)):
        comparison = compare(first, inside)
        assert comparison.first is None
        assert comparison.ok
        paired = comparison.to_frame()
        assert len(paired[paired.role.isin(ROLES)]) == len(rows_of(inside.rec, *ROLES))
        assert set(paired.verdict) == {"equal"}
        calls = paired[(paired.path == "1.up") & (paired.role == "output") & (paired.step == 0)]
        assert len(calls) == 2
        assert (calls.error == 0).all()


def test_planted_difference_is_named_inside_whichever_run_is_first(eager: Run) -> None:
    other = run(make_other, "aot_eager", compiled="inside")
    for comparison in (compare(eager, other), compare(other, eager)):
        assert comparison.first is not None
        assert comparison.first.path == "1.act"
        assert (comparison.first.step, comparison.first.phase) == (0, "forward")
        assert not comparison.ok


def test_boundary_of_a_compiled_model_is_compared_with_what_is_inside(inside: Run) -> None:
    comparison = compare(run(make, "aot_eager"), inside)
    assert comparison.first is None
    assert (comparison.to_frame().verdict == "equal").all()


class ByHand(nn.Module):
    """The activation of GPT-2, of ops whose backward a compiler puts into an order of its own."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x * x * x)))


def make_by_hand() -> tuple[nn.Module, dict[str, Any]]:
    return make(ByHand)


def test_ops_that_ran_one_by_one_equal_those_of_an_eager_run() -> None:
    comparison = compare(run(make_by_hand, ops=True), run(make_by_hand, "aot_eager", ops=True))
    assert comparison.first is None
    paired = comparison.to_frame()
    assert set(paired.verdict) == {"equal"}
    forward = paired[(paired.op == "aten.tanh.default") & (paired.phase == "forward")]
    assert set(forward.path) == {"1.act"}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_op_that_differs_is_named_with_its_module_inside(backend: str | None) -> None:
    runs = [run(each, backend, ops=True) for each in (make, lambda: make(nn.SiLU))]
    first = compare(*runs).first
    assert first is not None
    assert (first.path, first.step, first.phase) == ("1.act", 0, "forward")
