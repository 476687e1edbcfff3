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


def compare(eager: Run, inside: Run) -> Comparison:
    assert eager.rec is not None
    assert inside.rec is not None
    return modtrace.compare(eager.rec, inside.rec)


@pytest.mark.parametrize("ops", [False, True])
def test_run_inside_equals_the_eager_one(ops: bool) -> None:
    eager, inside = run(make, ops=ops), run(make, "aot_eager", compiled="inside")
    comparison = compare(eager, inside)
    assert comparison.first is None
    assert comparison.ok
    paired = comparison.to_frame()
    assert len(paired[paired.role.isin(["output", "grad_output"])]) == len(rows_of(inside.rec, *ROLES))
    assert set(paired.verdict) == {"equal"}


def test_each_call_is_compared_with_its_own() -> None:
    paired = compare(run(make), run(make, "aot_eager", compiled="inside")).to_frame()
    inside = paired[(paired.path == "1.up") & (paired.role == "output") & (paired.step == 0)]
    assert len(inside) == 2
    assert (inside.error == 0).all()


@pytest.mark.parametrize("is_eager_first", [True, False])
def test_planted_difference_is_named_inside(is_eager_first: bool) -> None:
    eager, inside = run(make), run(make_other, "aot_eager", compiled="inside")
    comparison = compare(eager, inside) if is_eager_first else compare(inside, eager)
    assert comparison.first is not None
    assert comparison.first.path == "1.act"
    assert (comparison.first.step, comparison.first.phase) == (0, "forward")
    assert not comparison.ok


def test_boundary_of_a_compiled_model_is_compared_with_what_is_inside() -> None:
    comparison = compare(run(make, "aot_eager"), run(make, "aot_eager", compiled="inside"))
    assert comparison.first is None
    assert (comparison.to_frame().verdict == "equal").all()
