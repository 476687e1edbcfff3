"""Captures: what is looked at, in which steps, and what is kept of it, through `record()`.

At the end: where it is not plain whose a tensor is.
"""

import json
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.stat_rows import holds, names, one, rows
from modtrace import Capture
from modtrace.errors import ModtraceWarning


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


class Net(nn.Module):
    """Two blocks called with a keyword, and a head that is given two tensors in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x)
        return self.head({"now": x, "scale": 2 * x})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(given["now"] + given["scale"])


def train(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def recorded(
    values: Any, steps: int = 1, model: nn.Module | None = None, **options: Any
) -> modtrace.Recording:
    model = Net() if model is None else model
    with modtrace.record(model, strict=True, values=values, **options) as rec:
        train(model, steps)
    return rec


def cells(rec: modtrace.Recording, column: str) -> list[Any]:
    """A column of `values`, by order of measuring."""
    found = sorted(rec.table("values").to_pylist(), key=lambda row: (row["step"], row["order"]))
    return [row[column] for row in found]


# Inputs.


def test_inputs_are_measured_by_place_and_by_keyword_inside_of_dicts_too() -> None:
    rec = recorded(Capture(roles="input"))
    assert names(rows(rec), "path", "slot") == [
        ("", "[0]"),
        ("blocks.0", "['x']"),
        ("blocks.0.linear", "[0]"),
        ("blocks.1", "['x']"),
        ("blocks.1.linear", "[0]"),
        ("head", "[0]['now']"),
        ("head", "[0]['scale']"),
        ("head.linear", "[0]"),
    ]
    assert {row.phase for row in rows(rec)} == {"forward"}


def test_an_input_holds_what_was_given_also_if_it_is_overwritten_inside() -> None:
    class Overwrites(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(3)

    model, x = Overwrites(), torch.tensor([1.0, 2.0])
    with modtrace.record(model, strict=True, values=Capture(roles=("input", "output"))) as rec:
        model(x)
    assert holds(one(rec, role="input"), torch.tensor([1.0, 2.0]))
    assert holds(one(rec, role="output"), torch.tensor([3.0, 6.0]))


def test_gradients_of_inputs_are_those_of_the_tensors_given() -> None:
    model = Net()
    rec = recorded(Capture(roles="grad_input"), model=model)
    assert names(rows(rec), "path", "slot") == [
        ("head.linear", "[0]"),
        ("head", "[0]['scale']"),
        ("head", "[0]['now']"),
        ("blocks.1.linear", "[0]"),
        ("blocks.1", "['x']"),
    ]  # blocks.0 is given what needs no gradient
    weight = model.head.linear.weight.detach() + 0.1 * model.head.linear.weight.grad  # before the step
    gradient = weight.expand(2, 4)
    assert holds(one(rec, path="head.linear"), gradient.contiguous())
    assert holds(one(rec, path="head", slot="[0]['now']"), 3 * gradient)  # all that is made of it


def test_an_input_that_is_a_leaf_has_its_gradient_and_no_hook_afterwards() -> None:
    x = torch.ones(3, requires_grad=True)
    model = nn.ReLU()
    with modtrace.record(model, strict=True, values=Capture(roles="grad_input")) as rec:
        (2 * model(x)).sum().backward()
    assert holds(one(rec), torch.full((3,), 2.0))
    assert not x._backward_hooks


# Which.


@pytest.mark.parametrize(
    "chosen",
    [{"types": nn.Linear}, {"types": "Linear"}, {"types": ("Linear", Net)}, {"include": "re:linear$"}],
    ids=["class", "name", "both", "path"],
)
def test_modules_are_chosen_by_class_or_by_path(chosen: dict[str, Any]) -> None:
    rec = recorded(Capture(roles=("output", "parameter"), **chosen))
    linears = {"blocks.0.linear", "blocks.1.linear", "head.linear"}
    is_net_too = isinstance(chosen.get("types"), tuple)
    assert {row.path for row in rows(rec)} == ({*linears, ""} if is_net_too else linears)
    assert {row.path for row in rows(rec, role="parameter")} == linears


def test_a_function_chooses_by_path_and_module_and_is_asked_once_for_each() -> None:
    asked: list[tuple[str, str]] = []

    def is_wide(path: str, module: nn.Module | None) -> bool:
        asked.append((path, type(module).__name__))
        return isinstance(module, nn.Linear) and module.out_features == 4

    rec = recorded(Capture(roles=("output", "grad_output"), where=is_wide), steps=3)
    assert {row.path for row in rows(rec)} == {"blocks.0.linear", "blocks.1.linear"}
    assert ("head", "Head") in asked
    assert len(asked) == 7  # modules; once for their outputs and gradients


def test_ops_are_chosen_by_name_and_by_the_module_they_run_in() -> None:
    rec = recorded(Capture(roles="op_output", ops="aten.relu*", include="blocks.1"), ops=True)
    sites = {site["op"] for site in rec.table("sites").to_pylist() if site["op"]}
    assert (sites, names(rows(rec), "path", "phase")) == ({"aten.relu.default"}, [("blocks.1", "forward")])


def test_ops_of_backward_are_chosen_by_the_module_whose_backward_it_is() -> None:
    rec = recorded(Capture(roles="op_output", ops="aten.mm*", include="blocks.1.linear"), ops=True)
    assert set(names(rows(rec), "path", "phase")) == {("blocks.1.linear", "backward")}


@pytest.mark.parametrize(
    "capture, text",
    [
        (
            Capture(types="Linaer"),
            "types: no module is a 'Linaer'. Did you mean 'Linear'? There are: Block, Head, ",
        ),
        (Capture(include="blcks.*"), "include='blcks.*' matches no module or parameter; the nearest are: "),
        (
            Capture(on_trigger=2),
            "Capture(on_trigger=2) (--capture on_trigger=2) waits for a trigger: "
            "give record(triggers=...) or keep_last=",
        ),
    ],
    ids=["class", "glob", "trigger"],
)
def test_what_can_never_match_is_refused_where_the_model_is_known(capture: Capture, text: str) -> None:
    with pytest.raises(ValueError) as raised:
        modtrace.record(Net(), values=capture)
    assert str(raised.value).startswith(text)


@pytest.mark.parametrize("include", ["blocks.1.calls", "again.linear.weight", "again"])
def test_buffers_and_what_is_registered_twice_can_be_meant(include: str) -> None:
    model = Net()
    model.again = model.blocks[1]
    rec = recorded(Capture(roles="all", include=include), model=model)
    of_modules = [row for row in rows(rec) if row.role != "loss"]  # which is of no module
    assert {row.path.removesuffix(".linear") for row in of_modules} == {"blocks.1"}


# When.


@pytest.mark.parametrize(
    "steps, expected",
    [("2:4", [2, 3]), ("::3", [0, 3]), ([4, 1], [1, 4]), (lambda step: step % 2 == 1, [1, 3])],
    ids=["range", "every", "list", "function"],
)
def test_only_the_steps_of_a_capture_have_its_rows(steps: Any, expected: list[int]) -> None:
    rec = recorded(
        [Capture(roles="output", include="head"), Capture(roles="parameter", steps=steps)], steps=5
    )
    assert sorted({row.step for row in rows(rec, role="parameter")}) == expected
    assert sorted({row.step for row in rows(rec, role="output")}) == [0, 1, 2, 3, 4]


def test_steps_of_the_recording_and_of_its_captures_must_both_mean_a_step() -> None:
    model = Net()
    with modtrace.record(
        model, strict=True, steps="3:6", values=Capture(roles="output", include="head", steps="::2")
    ) as rec:
        train(model, 6)
    assert [row.step for row in rows(rec)] == [4]
    assert rec.table("steps")["step"].to_pylist() == [3, 4, 5]


def test_an_idle_step_looks_at_nothing() -> None:
    seen: list[torch.Tensor] = []
    rec = recorded(Capture(roles="all", steps=[1], function=lambda tensor: seen.append(tensor)), steps=1)
    assert seen == []
    assert rec.table("values").num_rows == 0
    assert rec.table("steps").num_rows == 1


# Functions of the user's.


def test_what_a_function_returns_is_kept_as_json() -> None:
    rec = recorded(
        Capture(roles="output", include="head", function=lambda tensor: {"shape": list(tensor.shape)})
    )
    assert [json.loads(each) for each in cells(rec, "user")] == [{"shape": [2, 1]}]


def test_a_function_that_raises_is_noted_in_each_row_and_told_once() -> None:
    def picky(tensor: torch.Tensor) -> float:
        raise ValueError(f"no {tensor.dim()}-d tensors")

    model = Net()
    with (
        pytest.warns(ModtraceWarning, match="picky raised ValueError: no 2-d tensors") as warned,
        modtrace.record(model, strict=True, values=Capture(roles="output", function=picky)) as rec,
    ):
        train(model, 2)
    assert len(warned) == 1
    assert {row.note for row in rows(rec)} == {"function picky raised ValueError: no 2-d tensors"}
    assert len(rows(rec)) == 14
    assert all(row.count for row in rows(rec))
    [mark] = rec.meta.marks
    assert "picky raised in step 0: ValueError: no 2-d tensors" in mark


def test_modules_that_a_function_runs_are_none_of_the_runs() -> None:
    model, lens = Net(), nn.Sequential(nn.Linear(1, 2), nn.Tanh())
    heard: list[str] = []

    def look(tensor: torch.Tensor) -> float:
        model.blocks[0](x=torch.zeros(1, 4))  # a module of the model, too
        return float(lens(tensor).sum())

    with (
        modtrace.ModuleTracker() as tracker,
        modtrace.record(
            model, strict=True, values=Capture(roles="output", include="head", function=look)
        ) as rec,
    ):
        tracker.register_user_hooks(pre_fw_hook=lambda module, args: heard.append(tracker.current or ""))
        train(model)
    plain = recorded(None)
    assert rec.table("calls").num_rows == plain.table("calls").num_rows
    assert [row.path for row in rows(rec)] == ["head"]
    assert cells(rec, "user") != [None]
    assert len(heard) == 7
    assert rec.meta.marks == ()


def test_a_choosing_function_that_raises_means_nothing_and_the_recording_says_so() -> None:
    model = Net()
    with (
        pytest.warns(ModtraceWarning, match="the function where, asked for '.*', raised KeyError"),
        modtrace.record(
            model,
            strict=True,
            values=["stats", Capture(roles="input", where=lambda path, module: {}["x"])],
        ) as rec,
    ):
        train(model)
    assert {row.role for row in rows(rec)} == {"output", "grad_output", "parameter", "parameter_grad", "loss"}
    [mark] = rec.meta.marks
    assert mark.startswith("Capture: the function where, asked for ")


def test_a_schedule_that_raises_means_no_step_and_the_recording_says_so() -> None:
    model = Net()
    with (
        pytest.warns(ModtraceWarning, match="the function steps, asked for step 0, raised ZeroDivisionError"),
        modtrace.record(model, strict=True, values=Capture(steps=lambda step: 1 // step == 1)) as rec,
    ):
        train(model, 2)
    assert {row.step for row in rows(rec)} == {1}


# What is kept.


def test_without_statistics_a_row_says_that_nobody_asked() -> None:
    rec = recorded(Capture(roles="output", include="head", stats=0, hash=True))
    assert (one(rec).count, one(rec).note) == (None, "statistics not asked for")
    assert cells(rec, "hash") != [None]


@pytest.mark.parametrize("how", [True, "lazy"])
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_whole_tensors_come_back_bit_by_bit(how: Any, place: str, tmp_path: Any) -> None:
    model, kept = Net(), []
    model.head.register_forward_hook(lambda module, args, output: kept.append(output.detach().clone()))
    to = tmp_path / "run.modtrace" if place == "folder" else None
    with modtrace.record(
        model, to, strict=True, values=Capture(roles="output", include="head", tensors=how)
    ) as rec:
        train(model, 3)
    for step, expected in enumerate(kept):
        assert torch.equal(rec.tensor("head", step), expected.cpu())


def test_a_lazily_kept_tensor_that_is_overwritten_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    with modtrace.record(model, strict=True, values=Capture(roles="output", tensors="lazy")) as rec:
        model(torch.ones(2, 4)).sum().backward()
    notes = {row.path: row.note for row in rows(rec)}
    assert notes == {"0": "not kept: written to before it was copied", "1": None, "": None}


@pytest.mark.parametrize("keep", [None, 2], ids=["every step", "keep_last"])
def test_the_steps_behind_a_trigger_are_looked_at_and_written(keep: int | None) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(
        model,
        strict=True,
        values=["stats", Capture(roles="output", include="head", stats=2, on_trigger=3)],
        triggers=modtrace.Above("log.loss", 10),
        keep_last=keep,
    ) as rec:
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            rec.log(loss=11.0 if step == 5 else 1.0)
    full = {row["step"] for row in rec.table("values").to_pylist() if row["histogram"] is not None}
    assert full == {6, 7, 8}
    written = rec.table("steps")["step"].to_pylist()
    assert written == (list(range(12)) if keep is None else [4, 5, 6, 7, 8])


# Recomputes.


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return x + self.block(x)
        return x + checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "not reentrant", "reentrant"])
def test_gradient_of_an_input_counts_once_however_often_it_is_given(reentrant: bool | None) -> None:
    model = Checkpointed(reentrant)
    with modtrace.record(model, strict=True, values=Capture(roles=("grad_input", "grad_output"))) as rec:
        model(torch.ones(3, 4)).sum().backward()
    found = Counter(names(rows(rec), "path", "role"))
    assert found == {
        ("", "grad_output"): 1,
        ("first", "grad_output"): 1,
        ("block", "grad_input"): 1,
        ("block", "grad_output"): 1,
        ("block.0", "grad_input"): 1,
        ("block.0", "grad_output"): 1,
        ("block.1", "grad_input"): 1,
        ("block.1", "grad_output"): 1,
    }
    gradient = one(rec, path="block.0", role="grad_input")
    assert (
        gradient.sumsq == one(rec, path="first", role="grad_output").sumsq
    )  # of the very tensor, sum x included
    assert rec.history("block.0", "grad_input", "l2").values[0, 0] == pytest.approx(gradient.sumsq**0.5)


def test_gradient_of_what_only_a_recompute_was_given_is_there() -> None:
    class Backwards(torch.autograd.Function):
        """Runs a module in backward alone, on a tensor that no call was given in forward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
            ctx.module = module
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            again = torch.ones(2, 4, requires_grad=True)
            with torch.enable_grad():
                ctx.module(again).sum().backward()
            return 2 * gradient, None

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Backwards.apply(x, self.inner)

    model = Outer()
    with modtrace.record(model, strict=True, values=Capture(roles="grad_input", include="inner")) as rec:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert holds(one(rec), model.inner.weight.sum(0).expand(2, 4).contiguous())


# Backwards in a later step than their forward.


def test_graph_that_is_dead_has_no_hooks_in_the_next_backward() -> None:
    used, other = nn.Linear(4, 1), nn.Linear(4, 1)
    hooked = []
    capture = Capture(roles="parameter_grad", micro_batches=True)
    with modtrace.record(strict=True, values=capture) as rec:
        used(torch.ones(1, 4)).sum().backward()
        rec.step()
        out = other(torch.ones(1, 4))
        out.register_hook(lambda gradient: hooked.append(bool(used.weight._backward_hooks)))
        out.sum().backward()
    assert hooked == [False]


# Which module.


@pytest.mark.parametrize("name", ["one", "two", "held.three"])
def test_module_with_several_names_below_its_caller_is_meant_by_each(name: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = self.one
            self.held = nn.ModuleDict({"three": self.one})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(x)

    model = Shared()
    with modtrace.record(model, strict=True, values=Capture(include=name)) as rec:
        train(model)
    assert {row.role for row in rows(rec)} == {"output", "grad_output", "parameter", "parameter_grad"}


def test_ops_outside_of_modules_are_not_taken_for_those_of_the_root() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    capture = Capture(roles="op_output", types="Linear")
    with modtrace.record(model, strict=True, ops=True, values=capture) as rec:
        nn.functional.linear(x, torch.ones(4, 4), torch.ones(4))
        with torch.no_grad():
            model(x)
        nn.functional.linear(x, torch.ones(4, 4), torch.ones(4))
    assert names(rows(rec), "path", "phase") == [("", "forward")]


@pytest.mark.parametrize("extra", ["tensors", "hash", "sketch"])
def test_op_in_place_is_measured_after_it_has_written(extra: str) -> None:
    class Writes(nn.Module):
        def forward(self) -> torch.Tensor:
            made = torch.empty(3).fill_(1)
            made.mul_(2)
            return (made + 1).mul_(2).add_(1)

    captured = modtrace.Capture(roles=["op_output"], **{extra: True})
    model = Writes()
    with modtrace.record(model, ops=True, values=captured, strict=True) as rec:
        model()
    found = rec.table("values").select(["min", "max"]).to_pylist()
    assert [(row["min"], row["max"]) for row in found] == [
        (None, None),  # empty
        (1, 1),
        (2, 2),
        (3, 3),
        (6, 6),
        (7, 7),
    ]


def test_what_a_compiler_hands_its_own_modules_is_no_input_of_the_model() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2, 4)).sum().backward()
    with modtrace.record(model, strict=True, values=Capture(roles=("input", "grad_input"))) as rec:
        compiled(torch.ones(2, 4)).sum().backward()
    torch._dynamo.reset()
    assert names(rows(rec), "path", "role", "slot") == [("", "input", "[0]")]


# What a capture is told.


def test_a_function_that_chooses_steps_is_asked_anew_in_each_recording() -> None:
    chosen: set[int] = set()
    capture = Capture(roles="output", steps=lambda step: step in chosen)
    model, found = nn.Linear(4, 1), []
    for step in (1, 2):
        chosen = {step}
        with modtrace.record(model, strict=True, values=capture) as rec:
            train(model, 3)
        found.append(names(rows(rec), "step"))
    assert found == [[1], [2]]


def choose_badly(*_: Any) -> bool:
    raise ValueError("no idea")


@pytest.mark.parametrize("argument", ["where", "steps", "function"])
def test_function_that_raises_where_warnings_are_errors_ends_neither_run_nor_recording(argument: str) -> None:
    captures = ["stats", Capture(roles="input", **{argument: choose_badly})]
    model = nn.Linear(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with modtrace.record(model, strict=True, values=captures) as rec:
            train(model, 2)
    [mark] = rec.meta.marks
    assert "ValueError: no idea" in mark
    assert {row.step for row in rows(rec, role="output")} == {0, 1}


def test_numbers_of_numpys_are_numbers() -> None:
    capture = Capture(
        roles="output", steps=[np.int64(1)], sample=np.int64(2), channel_dim=np.int32(0), stats=2
    )
    model = nn.Linear(4, 1)
    with modtrace.record(model, strict=True, values=capture) as rec:
        train(model, 3)
    assert names(rows(rec), "step") == [1]
    assert rec.meta.options["values"][0]["sample"] == 2


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"roles": None}, TypeError, "roles=None: give one such as 'output', a list of them, or 'all'"),
        ({"ops": 5}, TypeError, "ops=5: give names of ops or globs"),
        ({"ops": [5]}, TypeError, r"ops=\[5\]: give names of ops or globs"),
        ({"channel_dim": None}, TypeError, "channel_dim=None: give the number of a dimension, such as -1"),
        (
            {"tensors": 1},
            ValueError,
            r"tensors=1: give True \(--capture tensors\), False or 'lazy' \(--capture tensors=lazy\)",
        ),
        ({"hash": "no"}, TypeError, "hash='no': give True or False"),
        ({"micro_batches": 1}, TypeError, "micro_batches=1: give True or False"),
    ],
)
def test_a_capture_says_what_it_cannot_read(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Capture(**given)
