"""Compiled models under a tracker: no graph more, no break, no recompilation, and the same bits."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from modtrace.tensor_tracker import Tracker, track

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before is known, nor stays known."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.relu(x))


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = Part()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Broken(Parent):
    """Its first part is not compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.eager(x))

    @torch.compiler.disable
    def eager(self, x: Tensor) -> Tensor:
        return self.first(x)


def run(model: nn.Module, *, tracked: bool, before: int = 0) -> tuple[Any, Tracker | None]:
    """Gradients after three steps, with what Dynamo has done, and the tracker."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager")
    torch.manual_seed(0)
    for _ in range(before):
        compiled(torch.randn(3, 4)).sum().backward()
    with track(compiled, strict=True) if tracked else nullcontext() as tracker:
        for _ in range(3):
            compiled(torch.randn(3, 4)).sum().backward()
    did = (counters["stats"]["unique_graphs"], dict(counters["graph_break"]))
    return (did, [each.grad.tolist() for each in model.parameters()]), tracker


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("kind", [Parent, Broken])
def test_compiled_model_is_compiled_alike(kind: type[nn.Module], before: int) -> None:
    torch.manual_seed(0)
    model = kind()
    plain, _ = run(model, tracked=False, before=before)
    model.zero_grad()
    with_tracker, _ = run(model, tracked=True, before=before)
    assert with_tracker == plain


def test_compiled_model_is_stashed_from_outside() -> None:
    _, tracker = run(Parent(), tracked=True, before=1)
    assert tracker is not None
    assert {each.name for each in tracker} == {"", "_orig_mod"}
    assert [(each.name, each.grad) for each in tracker][:4] == [
        ("_orig_mod", False), ("", False), ("", True), ("_orig_mod", True),
    ]  # fmt: skip


def test_what_runs_between_compiled_parts_is_stashed() -> None:
    _, tracker = run(Broken(), tracked=True)
    assert tracker is not None
    assert [each.step for each in tracker if each.name == "_orig_mod.first" and not each.grad] == [0, 0, 0]
    assert len([each for each in tracker if each.name == "_orig_mod.first" and each.grad]) == 3


def test_part_that_is_compiled_by_itself_is_stashed() -> None:
    model = Parent()
    model.second.compile(backend="aot_eager", fullgraph=True)
    model(torch.ones(3, 4)).sum().backward()
    graphs = counters["stats"]["unique_graphs"]
    with track(model, strict=True) as tracker:
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs == 1
    assert counters["graph_break"] == {}
    names = {each.name for each in tracker}
    assert {"", "first", "second"} <= names
    assert "second.linear" not in names


def test_function_for_stashes_is_not_compiled() -> None:
    model = Broken()
    seen: list[bool] = []

    def number(tensor: Tensor) -> float:
        seen.append(torch.compiler.is_compiling())
        return tensor.sum().item()

    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(3, 4)).sum().backward()
    graphs = counters["stats"]["unique_graphs"]
    with track(model, stash_value=number, strict=True):
        for _ in range(3):
            compiled(torch.ones(3, 4)).sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs
    assert seen
    assert not any(seen)
