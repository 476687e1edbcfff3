"""Why torch.compile compiled again, where instances share code, modules are switched, and graphs break."""

from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from collect.compile.test_compilations import Loop
from modtrace.analysis.compile.compilations import Compilations

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.factor = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * self.factor


def found_in(rec: modtrace.Recording) -> Compilations:
    compilations = rec.module_tree().compilations
    assert compilations is not None
    return compilations


def reasons_in(rec: modtrace.Recording) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(each.module, each.reason, each.values) for each in found_in(rec).recompilations]


@pytest.mark.parametrize("compiled", ["boundary", "inside"])
def test_each_instance_has_the_reason_of_its_own_code(compiled: Any) -> None:
    blocks = nn.Sequential(Block(nn.Linear(4, 4)), Block(nn.Tanh()))
    for block in blocks:
        block.compile(backend="eager")
    with modtrace.record(blocks, strict=True, compiled=compiled) as rec:
        for size, factor in ((3, 1), (5, 1), (5, 2)):
            blocks[1].factor = factor
            blocks(torch.ones(size, 4))
            rec.step()
    [size, factor] = found_in(rec).recompilations
    assert (size.reason, size.values, size.times, size.others) == (
        "the size of the tensor 'x' changed in dimension 0",
        ("3", "5"),
        2,
        1,
    )
    assert (factor.module, factor.values, factor.steps) == ("1", ("1",), (2,))
    assert found_in(rec).anew == ("1",)
    assert "compiled anew because code of other instances, or from before the recording, did not fit" in str(
        rec
    )


def test_two_tensors_of_one_function_are_two_reasons() -> None:
    class Sum(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a.sum() + b.sum()

    model = Sum()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    with modtrace.record(model, strict=True) as rec:
        for sizes in ((3, 7), (1, 7), (1, 9)):
            compiled(*map(torch.ones, sizes))
    assert [(reason, values) for _, reason, values in reasons_in(rec)] == [
        ("the size of the tensor 'a' changed in dimension 0", ("3", "1")),
        ("the size of the tensor 'b' changed in dimension 0", ("7", "9")),
    ]


def test_ops_that_measure_inside_are_not_counted() -> None:
    counts = {}
    for compiled in ("boundary", "inside"):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        with modtrace.record(model, strict=True, compiled=compiled) as rec:  # type: ignore[arg-type]
            torch.compile(model, backend="aot_eager")(torch.ones(2, 4)).sum().backward()
        counts[compiled] = [each.ops for each in found_in(rec).regions]
    assert counts == {"boundary": [(2,)], "inside": [(2,)]}


@pytest.mark.parametrize("recorded", ["both", "second"])
def test_second_model_of_a_class_is_compiled_anew(recorded: str) -> None:
    models = {name: Block(nn.Linear(4, 4)) for name in ("first", "second")}
    compiled = {name: torch.compile(model, backend="eager") for name, model in models.items()}
    if recorded == "second":
        compiled["first"](torch.ones(2, 4))
        del models["first"]
    with modtrace.record(models, strict=True) as rec:
        if recorded == "both":
            compiled["first"](torch.ones(2, 4))
        with torch.no_grad():
            compiled["second"](torch.ones(2, 4))
    assert (reasons_in(rec), found_in(rec).anew) == ([], ("second",))


def test_change_of_mode_is_told_only_where_nothing_else_changed() -> None:
    model = Block(nn.Dropout())
    compiled = torch.compile(model, backend="eager")
    with modtrace.record(model, strict=True) as rec:
        for size in (2, 3):
            for mode in (True, False):
                model.train(mode)
                compiled(torch.ones(size, 4))
                rec.step()
    switched, size = found_in(rec).recompilations
    assert (switched.reason, switched.values, switched.steps) == ("part.training changed", ("True",), (1,))
    assert switched.advice == "nothing, if it comes once: a graph is kept for each mode"
    assert (size.values, size.steps) == (("2", "3"), (2, 3))


def test_newest_code_of_an_instance_says_what_was_replaced_last() -> None:
    model = Block(nn.Tanh())
    compiled = torch.compile(model, backend="eager")
    with modtrace.record(model, strict=True) as rec:
        for factor, part in ((1, nn.Tanh()), (2, nn.Tanh()), (2, nn.ReLU())):
            model.factor, model.part = factor, part
            compiled(torch.ones(2, 4))
    assert [reason for _, reason, _ in reasons_in(rec)] == ["self.factor changed", "part is of another class"]


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "found"])
def test_model_that_is_compiled_anew_in_each_step_is_one_root(is_given: bool) -> None:
    model = Block(nn.Linear(4, 4))
    with modtrace.record(model if is_given else None, strict=True) as rec:
        for _ in range(3):
            torch.compile(model, backend="eager")(torch.ones(2, 4)).sum().backward()
            rec.step()
    found = found_in(rec)
    assert (found.count, found.before, found.recompilations) == (1, (), ())
    assert len(rec.module_tree().roots) == 1


def test_backend_function_that_is_made_anew_is_the_reason() -> None:
    model = Block(nn.Linear(4, 4))
    with modtrace.record(model, strict=True) as rec:
        for _ in range(3):
            torch.compile(model, backend=lambda graph, inputs: graph)(torch.ones(2, 4))
    (reason,) = found_in(rec).recompilations
    assert (reason.reason, reason.times) == ("torch.compile was called anew with another backend function", 2)
    assert reason.advice.startswith("call torch.compile once")


class Counting(nn.Module):
    """It reads behind a graph break what the broken line has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @torch.compiler.disable
    def longer(self) -> list[str]:
        self.names.append("a")
        return self.names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(self.longer())


def test_what_is_kept_across_a_graph_break_is_told_with_its_line() -> None:
    model = Counting()
    compiled = torch.compile(model, backend="eager")
    with modtrace.record(model, strict=True) as rec:
        for _ in range(3):
            compiled(torch.ones(2))
    line = Counting.forward.__code__.co_firstlineno + 1
    [(module, reason, values)] = reasons_in(rec)
    assert reason == f"len(the value alive across the graph break at line {line}) changed"
    assert (module, values) == ("Counting", ("1", "2"))


def test_a_break_for_which_a_function_is_not_compiled_is_told_once() -> None:
    model = nn.Sequential(Loop(), Loop())
    with modtrace.record(model, strict=True) as rec:
        torch.compile(model, backend="eager")(torch.ones(2))
    assert len(found_in(rec).errors) == 1
    assert found_in(rec).graph_breaks == ()
    assert str(rec).count("User-inserted graph break") == 1
