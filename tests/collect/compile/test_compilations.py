"""What torch.compile compiled, why again, and where graphs broke: from Dynamo's own records, by module and line."""

import copy
import inspect
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import get_compilation_metrics
from torch._inductor.utils import fresh_cache

import modtrace
from modtrace.analysis.compile.compilations import Compilations, Reason
from modtrace.collect.compile import compilations as recorder

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]


class Noisy(nn.Module):
    """It breaks the graph by an output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lin(x)
        print("seen", end="")
        return x.relu()


class Chooser(nn.Module):
    """It breaks the graph by a branch on the values of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum() > 1000:
            y = y + 1
        return y


class Scale(nn.Module):
    """It causes compilations by an attribute that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Planted(nn.Module):
    """Three graph breaks, one of them its own, and two causes of compiling again."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = Noisy()
        self.chooser = Chooser()
        self.scale = Scale()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.chooser(self.noisy(x))
        torch._dynamo.graph_break()
        return self.head(self.scale(x))


def line_of(function: Any, code: str) -> tuple[str, int]:
    """The file and the number of the line of a function that holds this code."""
    lines, first = inspect.getsourcelines(function)
    return inspect.getsourcefile(function) or "", first + next(
        i for i, line in enumerate(lines) if code in line
    )


def found_in(rec: modtrace.Recording) -> Compilations:
    compilations = rec.module_tree().compilations
    assert compilations is not None
    return compilations


def place(reason: Reason) -> tuple[str, tuple[str, int] | None]:
    return reason.module, None if reason.line is None else reason.line.place


@pytest.fixture(scope="module")
def planted() -> modtrace.Recording:
    """Four steps: in the third the batch is larger, in the fourth an attribute has changed."""
    torch._dynamo.reset()
    model = Planted()
    model.compile(backend="aot_eager")
    with modtrace.record(model, strict=True) as rec:
        for batch, factor in [(3, 1), (3, 1), (5, 1), (5, 2)]:
            model.scale.factor = factor
            model(torch.ones(batch, 4)).sum().backward()
            rec.step()
    return rec


def test_each_of_three_breaks_is_named_by_module_line_and_reason(planted: modtrace.Recording) -> None:
    printed, chosen, asked = found_in(planted).graph_breaks
    assert place(printed) == ("noisy", line_of(Noisy.forward, "print"))
    assert printed.reason.startswith(
        "Failed to trace builtin operator: Dynamo does not know how to trace builtin"
    )
    assert place(chosen) == ("chooser", line_of(Chooser.forward, "if y.sum"))
    assert (
        chosen.reason == "which branch is taken depends on the numbers in a tensor (data-dependent branching)"
    )
    assert place(asked) == ("Planted", line_of(Planted.forward, "graph_break()"))
    assert asked.advice == "Remove the `torch._dynamo.graph_break()` call."


def test_each_of_two_causes_of_recompilation_is_named_by_module_line_and_reason(
    planted: modtrace.Recording,
) -> None:
    size, factor = found_in(planted).recompilations
    assert size.reason == "the size of the tensor 'x' changed in dimension 0"
    assert (size.values, size.steps) == (("3", "5"), (2,))
    assert place(size) == ("Planted", line_of(Planted.forward, "def forward"))
    assert (factor.reason, factor.values, factor.steps) == ("scale.factor changed", ("1",), (3,))
    assert place(factor) == ("scale", line_of(Scale.forward, "self.factor"))


def test_each_function_of_a_module_has_its_compilations_and_graphs(planted: modtrace.Recording) -> None:
    regions = found_in(planted).regions
    seen = {(each.module, each.line.number): each for each in regions if each.line is not None}
    whole = seen["noisy", line_of(Noisy.forward, "def forward")[1]]
    assert (whole.function, whole.compilations, whole.ops, whole.steps) == ("forward", 2, (1, 1), (0, 2))
    behind = seen["Planted", line_of(Planted.forward, "graph_break()")[1]]
    assert (behind.function, behind.compilations, behind.error) == ("forward", 3, None)
    assert behind.backwards >= 1


def test_modules_inside_of_regions_are_told_with_the_module_of_the_region(
    planted: modtrace.Recording,
) -> None:
    assert {each.region: each.modules for each in found_in(planted).inside} == {
        "noisy": ("noisy.lin",),
        "Planted": ("scale", "head"),
    }


def test_a_compilation_refers_to_the_call_that_it_held_up(planted: modtrace.Recording) -> None:
    calls = {row["call_id"]: row for row in planted.table("calls").to_pylist()}
    rows = [row for row in planted.table("compilations").to_pylist() if row["phase"] == "forward"]
    assert rows
    for row in rows:
        call = calls[row["call_id"]]
        assert (call["module_id"], call["step"]) == (row["module_id"], row["step"])
        assert call["start_ns"] - 1e6 < row["start_ns"] < row["end_ns"] < call["end_ns"] + 1e6  # two clocks


def test_a_backward_is_one_of_the_function_whose_forward_it_is(planted: modtrace.Recording) -> None:
    rows = planted.table("compilations").to_pylist()
    forwards = {row["compile_id"]: row for row in rows if row["phase"] == "forward"}
    backwards = [row for row in rows if row["phase"] == "backward"]
    assert backwards
    for row in backwards:
        forward = forwards[row["compile_id"]]
        assert (row["module_id"], row["function"]) == (forward["module_id"], forward["function"])
        assert row["ops"] is row["call_id"] is None


def test_the_reasons_stand_on_the_first_screen(planted: modtrace.Recording) -> None:
    head = str(planted).partition("\n\n")[0].splitlines()
    assert len(head) <= 24
    text = "\n".join(head)
    assert "compiled again for 2 reasons; graphs broken at 3 places" in text
    file = "compile/test_compilations.py"
    assert f"! graph broken: noisy, {file}:{line_of(Noisy.forward, 'print')[1]} in forward: print" in text
    assert (
        f"! compiled again 1x in step 3: scale, {file}:{line_of(Scale.forward, 'self.factor')[1]} in forward"
        in text
    )
    assert "to do: " in text


class Mode(nn.Module):
    """It is compiled again for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = ""
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * len(self.mode)


def test_a_function_compiled_too_often_is_named_with_the_limit() -> None:
    model = Mode()
    compiled = torch.compile(model, backend="eager")
    with modtrace.record(model, strict=True) as rec, dynamo_config.patch(recompile_limit=3):
        for length in range(6):
            model.mode = "m" * length
            compiled(torch.ones(2))
    found = found_in(rec)
    (error,) = found.errors
    assert (error.module, error.steps) == ("Mode", (3,))
    assert error.compiled is not None
    assert error.compiled.place == line_of(Mode.forward, "def forward")
    assert error.reason == (
        "the limit of compilations, recompile_limit=3, is reached: calls that fit no graph so far run uncompiled"
    )
    assert [(each.reason, each.values, each.times) for each in found.recompilations] == [
        ("self.mode changed", ("''", "'m'"), 2)
    ]
    assert "! not compiled: Mode, " in str(rec)


class Loop(nn.Module):
    """It breaks in a loop, from which Dynamo cannot go on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x * 2
            torch._dynamo.graph_break()
        return x


def test_a_function_that_is_left_uncompiled_is_named_with_the_line_at_fault() -> None:
    with modtrace.record(strict=True) as rec:
        torch.compile(Loop(), backend="eager")(torch.ones(2))
    (error,) = found_in(rec).errors
    assert error.line is not None and error.compiled is not None
    assert error.line.place == line_of(Loop.forward, "graph_break()")
    assert error.compiled.place == line_of(Loop.forward, "def forward")


def no_kernel(graph: Any, inputs: Any) -> Any:
    raise ValueError("no such kernel")


def test_an_error_of_the_backend_is_kept_where_dynamo_suppresses_it() -> None:
    with modtrace.record(strict=True) as rec, dynamo_config.patch(suppress_errors=True):
        torch.compile(Mode(), backend=no_kernel)(torch.ones(2))
    (error,) = found_in(rec).errors
    assert error.reason == "BackendCompilerFailed: backend='no_kernel' raised: ValueError: no such kernel"


def test_an_error_that_the_user_gets_is_recorded_too() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported), modtrace.record(strict=True) as rec:
        torch.compile(Loop(), backend="eager", fullgraph=True)(torch.ones(2))
    assert [error.module for error in found_in(rec).errors] == ["OptimizedModule"]


def make_functions(count: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Functions of which none shares its code with another."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    codes = [double.__code__.replace(co_name=f"double_{number}") for number in range(count)]
    return [torch.compile(types.FunctionType(code, globals()), backend="eager") for code in codes]


class Many(nn.Module):
    """It calls more compiled functions than Dynamo keeps records of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for function in make_functions(70):
            x = function(x)
        return x


def test_none_is_lost_where_one_call_compiles_more_than_dynamo_remembers() -> None:
    with modtrace.record(strict=True) as rec:
        Many()(torch.ones(1))
    rows = rec.table("compilations").to_pylist()
    assert [row["function"].partition(" ")[0] for row in rows] == [f"double_{number}" for number in range(70)]
    assert {row["module_id"] for row in rows} == {0}
    assert len(get_compilation_metrics()) == 64


def test_what_was_compiled_before_is_told_and_not_invented() -> None:
    model = torch.compile(Mode(), backend="eager")
    model(torch.ones(2))
    with modtrace.record(model, strict=True) as rec:
        model(torch.ones(2))
    found = found_in(rec)
    assert (found.count, found.before) == (0, ("OptimizedModule",))
    assert "compiled before the recording began, so nothing is known of it: OptimizedModule" in str(rec)


def test_blocks_that_share_their_code_are_told() -> None:
    blocks = nn.Sequential(Scale(), Scale(), Scale())
    for block in blocks:
        block.compile(backend="eager")
    with modtrace.record(blocks, strict=True) as rec:
        blocks(torch.ones(2))
    found = found_in(rec)
    assert [(each.module, each.compilations) for each in found.regions] == [("0", 1)]
    assert (found.shared, found.before) == (("1", "2"), ())


def test_each_of_two_threads_names_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    # A flag of the process says that a compiled module runs: two threads may leave it set (2.13), and then torch's
    # ModTracker sees nothing any more.
    monkeypatch.setattr(torch._dynamo.eval_frame, "_in_optimized_module", False)
    models = {"a": torch.compile(Mode(), backend="eager"), "b": torch.compile(Scale(), backend="eager")}
    ready = threading.Barrier(2)

    def run(model: Any) -> None:
        ready.wait()
        model(torch.ones(2))

    with modtrace.record(models, strict=True) as rec:
        threads = [threading.Thread(target=run, args=(model,)) for model in models.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = {each.module: each.line for each in found_in(rec).regions}
    assert {name: line and line.place for name, line in found.items()} == {
        "a": line_of(Mode.forward, "def forward"),
        "b": line_of(Scale.forward, "def forward"),
    }


def test_a_function_outside_of_modules_has_no_module() -> None:
    (function,) = make_functions(1)
    with modtrace.record(strict=True) as rec:
        function(torch.ones(1))
        nn.Linear(1, 1)(torch.ones(1))
    (row,) = rec.table("compilations").to_pylist()
    assert (row["module_id"], row["call_id"], row["step"], row["compile_id"]) == (None, None, 0, "0/0")


def test_compilations_of_steps_that_are_not_recorded_are_kept() -> None:
    model = Mode()
    compiled = torch.compile(model, backend="eager")
    with modtrace.record(model, strict=True, steps="2:3") as rec:
        for length in range(4):
            model.mode = "m" * length
            compiled(torch.ones(2))
    rows = rec.table("compilations").to_pylist()
    assert [(row["step"], row["call_id"] is None) for row in rows] == [
        (0, True),
        (1, True),
        (2, False),
        (3, True),
    ]


def test_they_are_kept_while_steps_wait_for_a_trigger(tmp_path: Any) -> None:
    model = Mode()
    compiled = torch.compile(model, backend="eager")
    with modtrace.record(model, to=tmp_path / "run", strict=True, keep_last=1) as rec:
        for length in range(3):
            model.mode = "m" * length
            compiled(torch.ones(2))
            rec.step()  # else two would be one step while a graph of Dynamo lives
    rows = modtrace.open_recording(tmp_path / "run").table("compilations").to_pylist()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rec.table("steps").num_rows == 0


def test_a_reset_in_the_recording_loses_nothing() -> None:
    model = torch.compile(Noisy(), backend="eager")
    with modtrace.record(model, strict=True) as rec:
        for _ in range(2):
            model(torch.ones(2, 4))
            torch._dynamo.reset()
    rows = rec.table("compilations").to_pylist()
    first, second = [row for row in rows if row["compile_id"] in ("0/0", "1:0/0")]
    assert first["module_id"] == second["module_id"] == 1
    assert [len(each["graph_breaks"]) for each in (first, second)] == [1, 1]


def state_of_dynamo() -> dict[str, Any]:
    return {
        "config": copy.deepcopy(dynamo_config.get_config_copy()),
        "callbacks": [*callback_handler.start_callbacks, *callback_handler.end_callbacks],
        "bytecode hooks": dict(torch._dynamo.convert_frame._bytecode_hooks),
    }


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_dynamo_is_afterwards_as_it_was(error: type[BaseException] | None) -> None:
    before = state_of_dynamo()
    try:
        with modtrace.record(strict=True):
            torch.compile(Mode(), backend="eager")(torch.ones(2))
            assert len(callback_handler.end_callbacks) == 1
            if error is not None:
                raise error
    except KeyboardInterrupt:
        pass
    assert state_of_dynamo() == before


def test_a_run_without_torch_compile_does_not_import_dynamo() -> None:
    program = (
        "import sys, torch, modtrace\n"
        "with modtrace.record(strict=True) as rec:\n"
        "    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
        "print(rec)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_records_that_cannot_be_read_leave_the_run_and_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(metrics: Any) -> None:
        raise AttributeError("no attribute 'compile_id'")

    monkeypatch.setattr(recorder, "read_compilation", changed)
    model = torch.compile(Mode(), backend="eager")
    warned = pytest.warns(modtrace.ModtraceWarning, match="records no more compilations")
    with warned, modtrace.record(model) as rec:
        model(torch.ones(2))
        model(torch.ones(3))
    assert rec.table("calls").num_rows == 4
    assert rec.meta.marks == (
        "compilations are incomplete from step 1: modtrace failed: AttributeError: no attribute 'compile_id'",
    )
    assert callback_handler.end_callbacks == []


def test_a_failed_recording_of_compilations_stays_out_of_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([("0/0", False)])  # the recording that was there first

    monkeypatch.setattr(recorder, "ended_compilation", lambda told: next(asked))
    with modtrace.record(strict=True) as outer:
        with pytest.warns(modtrace.ModtraceWarning, match="records no more compilations"), modtrace.record():
            torch.compile(Mode(), backend="eager", fullgraph=True)(torch.ones(2))
        nn.Linear(1, 1)(torch.ones(1))
        assert len(callback_handler.end_callbacks) == 1
    assert outer.table("compilations")["compile_id"].to_pylist() == ["0/0"]


@pytest.mark.compile
def test_backward_that_is_found_in_caches_is_one_too() -> None:
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            model = torch.compile(nn.Linear(2, 3))
            with modtrace.record(model, strict=True) as rec:
                model(torch.ones(1, 2)).sum().backward()
                rec.step()
                with torch.no_grad():
                    model(torch.ones(1, 2))
            (region,) = found_in(rec).regions
            assert (region.compilations, region.backwards, region.steps) == (2, 1, (0, 1))
            assert len(rec.table("compilations")) == 3


@pytest.mark.compile
def test_inductor_has_the_same_compilations() -> None:
    model = Planted()
    model.compile()
    with modtrace.record(model, strict=True) as rec:
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            rec.step()
    found = found_in(rec)
    assert [each.module for each in found.graph_breaks] == ["noisy", "chooser", "Planted"]
    assert (found.recompilations, found.errors) == ((), ())
