"""Only what is chosen is measured: by module, by parameter, by step."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
import zoo
from helpers.stat_rows import names, rows
from modtrace.measure.measurers.measurer import Measurer


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all tensors that are really measured."""
    shapes: list[tuple[int, ...]] = []
    measure = Measurer.measure

    def counting(self: Measurer, tensor: torch.Tensor, *more: Any) -> Any:
        shapes.append(tuple(tensor.shape))
        return measure(self, tensor, *more)

    monkeypatch.setattr(Measurer, "measure", counting)
    return shapes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: nn.Module, steps: int = 1, x: torch.Tensor | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4) if x is None else x).sum().backward()
        optimizer.step()


def selected(include: Any = None, exclude: Any = None, model: nn.Module | None = None) -> set[str]:
    """What a recording of one step has: modules by path, parameters by `path:slot`."""
    model = Net() if model is None else model
    with modtrace.record(model, strict=True, include=include, exclude=exclude) as rec:
        train(model)
    assert rec.meta.marks == ()
    found = set()
    for row in rows(rec):
        name = row.role if row.path is None else row.path
        found.add(f"{row.path}:{row.slot}" if row.role.startswith("parameter") else name)
    roles = {(row.path, row.role) for row in rows(rec)}
    for path, role in roles:  # whatever is chosen has its gradients too
        other = {"output": "grad_output", "parameter": "parameter_grad"}.get(role)
        assert other is None or (path, other) in roles
    return found


LAST = {"blocks.1.0", "blocks.1.0:weight", "blocks.1.0:bias", "blocks.1.1"}
FIRST = {"blocks.0.0", "blocks.0.0:weight", "blocks.0.0:bias", "blocks.0.1"}
HEAD = {"head", "head:weight", "head:bias"}
BLOCKS = {"blocks.0", "blocks.1"}

# tests/recording/options/test_path_filter.py says which paths each pattern means.
SELECTIONS: dict[str, tuple[Any, Any, set[str]]] = {
    "all": (None, None, {"", *BLOCKS, *FIRST, *LAST, *HEAD, "loss"}),
    "a path": ("head", None, HEAD),
    "a glob": ("blocks.*", None, BLOCKS),
    "the root": ("", None, {""}),
    "a parameter": ("head.weight", None, {"head:weight"}),
    "an expression": (re.compile(r"^blocks\.1\."), None, LAST),
    "several": (["head", re.compile(r"1\.1$")], None, {*HEAD, "blocks.1.1"}),
    "all but a module": (None, "head", {"", *BLOCKS, *FIRST, *LAST}),
    "all but parameters": (
        None,
        "**.weight",
        {"", *BLOCKS, *FIRST, *LAST, *HEAD} - {"blocks.0.0:weight", "blocks.1.0:weight", "head:weight"},
    ),
    "less than is included": ("blocks.**", "blocks.1.**", {*BLOCKS, *FIRST}),
    "nothing": (None, re.compile(""), set()),
}


@pytest.mark.parametrize(("include", "exclude", "expected"), SELECTIONS.values(), ids=SELECTIONS)
def test_what_is_selected_by(include, exclude, expected):
    assert selected(include, exclude) == expected


def test_what_is_not_selected_is_not_measured(measured):
    assert selected("head") == HEAD
    assert sorted(measured) == sorted([(2, 1), (2, 1), (1, 4), (1, 4), (1,), (1,)])


@pytest.mark.parametrize(("include", "nth"), [("x.0", 0), ("y.0", 1)])
def test_alias_of_a_shared_module_selects_its_calls_there_and_its_parameters(include, nth):
    model = zoo.TwoParents()
    with modtrace.record(model, strict=True, include=include) as rec:
        train(model)
    assert names(rows(rec), "path", "role", "nth", "slot") == [
        ("x.0", "output", nth, ""),
        ("x.0", "grad_output", nth, ""),
        ("x.0", "parameter", None, "weight"),
        ("x.0", "parameter_grad", None, "weight"),
        ("x.0", "parameter", None, "bias"),
        ("x.0", "parameter_grad", None, "bias"),
    ]


def test_parameter_that_nobody_owns_is_selected_by_its_place():
    free = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([free], lr=0.1)
    with modtrace.record(strict=True, exclude=re.compile("param_groups")) as rec:
        free.sum().backward()
        optimizer.step()
    assert rows(rec) == []


def test_module_whose_name_is_learnt_late_is_selected_from_then_on():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x)

    model = Outer()
    with modtrace.record(strict=True, include="inner") as rec:
        model.inner(torch.ones(2, 4))  # not yet known to be anybody's
        model(torch.ones(2, 4))
        model.inner(torch.ones(2, 4))
    assert {row.path for row in rows(rec)} == {"inner"}
    assert len(rows(rec)) >= 2


# Patterns that are of no use.


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_pattern_that_matches_nothing_in_the_model_given_is_refused(argument):
    with pytest.raises(ValueError) as caught:
        modtrace.record(Net(), **{argument: ["head", "heat"]})
    assert f"{argument}=" in str(caught.value)
    assert "'heat' matches no module or parameter; the nearest are: head" in str(caught.value)


def test_pattern_need_match_only_one_of_the_models():
    models = {"first": nn.Sequential(nn.Linear(4, 4)), "second": Net()}
    with modtrace.record(models, strict=True, include="head") as rec:
        for model in models.values():
            model(torch.ones(2, 4))
    assert {row.path for row in rows(rec)} == {"head"}
    with pytest.raises(ValueError, match="'tail' matches no"):
        modtrace.record(models, include="tail")


def test_pattern_that_matches_nothing_met_is_warned_of_at_the_end():
    model = Net()
    with (
        pytest.warns(
            modtrace.ModtraceWarning, match="include='heat' matches no module or parameter"
        ) as caught,
        modtrace.record(include="heat") as rec,
    ):
        train(model)
    assert len(caught) == 1
    [mark] = rec.meta.marks
    assert "include='heat' matches no module or parameter that was met; the nearest are: head" in mark
    assert rows(rec) == []


# Steps.


def test_only_the_steps_chosen_are_kept_and_measured(measured):
    model = nn.Linear(4, 1)
    with modtrace.record(model, strict=True, steps="1::2") as rec:
        train(model, steps=6)
    assert {row.step for row in rows(rec)} == {1, 3, 5}
    assert names(rows(rec, step=3), "role", "slot") == [
        ("output", ""),
        ("loss", ""),
        ("grad_output", ""),
        ("parameter", "weight"),
        ("parameter_grad", "weight"),
        ("parameter", "bias"),
        ("parameter_grad", "bias"),
    ]
    assert len(measured) == 3 * 7
