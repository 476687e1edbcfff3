"""torch.compile and tracing, in which PyTorch's trackers fail."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.asked import GLOBAL, Asked, ours
from helpers.tracker_runs import (
    DISTRIBUTED,
    M_TRAINS,
    MARKS,
    TORCHS,
    M,
    asked,
    asked_of_torch,
    compiled_graphs,
    of,
    of_torch,
    train,
)
from helpers.twins import bits, state
from modtrace import ModuleTracker

pytestmark = MARKS


class CountingBackend:
    """A backend of torch's that counts how often graphs are made, and how often they run."""

    def __init__(self, name: str) -> None:
        self.compile_graph = lookup_backend(name)
        self.made = 0
        self.ran = 0

    def __call__(self, graph, inputs):
        self.made += 1
        compiled = self.compile_graph(graph, inputs)

        def run(*args):
            self.ran += 1
            return compiled(*args)

        return run


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(M(), M())

    def forward(self, x):
        return self.blocks(x).tanh()


def make_compiled(way: str, backend: Any = "aot_eager", fullgraph: bool = False) -> Any:
    """A model that `torch.compile` was given, that was told to compile itself, or each of whose blocks was."""
    torch.manual_seed(0)
    options = {"backend": backend, "fullgraph": fullgraph}
    if way == "by torch.compile":
        return torch.compile(M(), **options)
    model = M() if way == "by itself" else Stacked()
    for each in [model] if way == "by itself" else model.blocks:
        each.compile(**options)
    return model


def ours_compiled(tracker: ModuleTracker) -> str:
    """With "compiled" where the region is one, by the answer of the place and by that of the call."""
    where = tracker.where()
    call = where.call
    marks = ["compiled"] * where.compiled + ["(call compiled)"] * (call is not None and call.compiled)
    return " ".join([ours(tracker), *marks])


COMPILED_M = [
    "addmm forward: M compiled (call compiled)",
    "relu forward: M compiled (call compiled)",
    "threshold_backward backward: M compiled (call compiled)",
    "mm backward: M compiled (call compiled)",
]


COMPILED_BLOCKS = [
    "addmm forward: Stacked Stacked.blocks Stacked.blocks.0 compiled (call compiled)",
    "relu forward: Stacked Stacked.blocks Stacked.blocks.0 compiled (call compiled)",
    "addmm forward: Stacked Stacked.blocks Stacked.blocks.1 compiled (call compiled)",
    "relu forward: Stacked Stacked.blocks Stacked.blocks.1 compiled (call compiled)",
    "tanh forward: Stacked",
    "tanh_backward backward: Stacked",
    "threshold_backward backward: Stacked Stacked.blocks Stacked.blocks.1 compiled (call compiled)",
    "mm backward: Stacked Stacked.blocks Stacked.blocks.1 compiled (call compiled)",
    "mm backward: Stacked Stacked.blocks Stacked.blocks.1 compiled (call compiled)",
    "threshold_backward backward: Stacked Stacked.blocks Stacked.blocks.0 compiled (call compiled)",
    "mm backward: Stacked Stacked.blocks Stacked.blocks.0 compiled (call compiled)",
]


@pytest.mark.parametrize(
    "tracked", [(True, False, True, False), (False, True, False)], ids=["first", "later"]
)
@pytest.mark.parametrize(
    ("way", "backend", "fullgraph"),
    [
        ("by torch.compile", "eager", False),
        ("by torch.compile", "aot_eager", True),
        ("by itself", "aot_eager", True),
        ("by layer", "aot_eager", False),
    ],
)
def test_what_is_compiled_runs_the_same_and_is_its_module(dynamo, way, backend, fullgraph, tracked):
    """d10, k01, k06, k05, k02, k03, k04: no exception, no break, one compilation more at most, the same bits."""
    graphs = 2 if way == "by layer" else 1  # of two layers the second has an input that needs a gradient
    trained, counting = [], CountingBackend(backend)
    for contexts in ([False] * len(tracked), tracked):
        torch._dynamo.reset()
        counters.clear()
        counting = CountingBackend(backend)
        model, made = make_compiled(way, counting, fullgraph), []
        for is_tracked in contexts:
            with ModuleTracker(strict=True) if is_tracked else nullcontext():
                for _ in range(2):
                    counting.ran = 0
                    train(model)
                    assert counting.ran == graphs
            made.append(counting.made)
        trained.append([bits(each) for each in tree_leaves(state(model))])
    assert trained[1] == trained[0]
    assert counters["graph_break"] == {}
    assert made[0] == graphs
    assert made[1] <= (2 if tracked[0] else 1) * graphs
    assert set(made[1:]) == {made[1]}
    # Its ops are those of its module, and marked; no hook hears of a GraphModule or an OptimizedModule.
    heard: set[str] = set()
    tracker = ModuleTracker(strict=True)
    tracker.register_user_hooks(*[lambda *_: heard.update(tracker.parents)] * 4)
    lines = asked(lambda: train(model), tracker, ours_compiled)
    assert lines == (COMPILED_BLOCKS if way == "by layer" else COMPILED_M)
    blocks = {"Stacked", "Stacked.blocks", "Stacked.blocks.0", "Stacked.blocks.1"}
    assert heard == {GLOBAL} | (blocks if way == "by layer" else {"M"})
    assert counting.made == made[-1]


@pytest.mark.parametrize("way", ["by torch.compile", "by itself"])
def test_backend_of_the_user_that_gives_the_graph_module_itself_shows_no_graph_module(dynamo, way):
    """k01: Dynamo calls it as a module then."""
    model = make_compiled(way, lambda graph, inputs: graph)
    heard: set[str] = set()
    with ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(*[lambda *_: heard.update(tracker.parents)] * 4)
        train(model)
        train(model)
    assert heard == {GLOBAL, "M"}


def test_compiled_model_given_as_root_has_the_name_of_what_is_in_it(dynamo):
    """d10"""
    model = torch.compile(M(), backend="eager")
    with ModuleTracker(model, strict=True) as tracker:
        assert tracker.get_known_fqn(model) == "M"
        train(model)
        assert tracker.get_known_fqn(model) == "M"
        assert tracker.get_known_fqn(model._orig_mod) == "M"
        assert tracker.get_known_fqn(model._orig_mod.l) == "M.l"


def test_two_compiled_models_of_one_class_are_two_roots(dynamo):
    """d10"""
    models = [torch.compile(M(), backend="aot_eager") for _ in range(2)]
    lines = asked(lambda: [train(each) for each in models])
    assert lines == [
        "addmm forward: M",
        "relu forward: M",
        "threshold_backward backward: M",
        "mm backward: M",
        "addmm forward: M#1",
        "relu forward: M#1",
        "threshold_backward backward: M#1",
        "mm backward: M#1",
    ]


class Breaking(nn.Module):
    """Its graph breaks between its two children."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


def test_model_whose_graph_breaks_by_itself_breaks_no_more_often(dynamo):
    """d10"""
    found = []
    for tracked in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = torch.compile(Breaking(), backend="aot_eager")
        with ModuleTracker(strict=True) if tracked else nullcontext():
            train(model)
            train(model)
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert found == [(2, 1), (2, 1)]


def test_compiled_function_around_modules_is_nobodys_and_does_not_break(dynamo):
    """k05"""
    model = M()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x):
        return model(x) * 2

    lines = asked(lambda: train(run))
    assert lines[:3] == ["addmm None:", "relu None:", "mul None:"]
    assert compiled_graphs() == (1, {})


@pytest.mark.parametrize(("fullgraph", "text"), [(False, "tracked"), (True, None)], ids=["", "full graph"])
def test_first_run_of_a_compiled_model_raises_with_torchs_tracker(dynamo, fullgraph, text):
    """d10, k01, k06, k05: which of its two errors a full graph has depends on what ran before in the process."""
    errors = (AssertionError, torch._dynamo.exc.TorchDynamoException)
    with pytest.raises(errors, match=text), of_torch(TORCHS):
        train(make_compiled("by torch.compile", fullgraph=fullgraph))


def test_compiled_model_is_nobodys_for_torchs_distributed_tracker(dynamo):
    """d10, k01, k06, k05"""
    lines = asked_of_torch(DISTRIBUTED, lambda: train(make_compiled("by torch.compile")))
    assert {each.partition(":")[2] for each in lines} == {""}


def heard_inside(kind: Any, model: nn.Module) -> set[str]:
    """The names that one of torch's trackers shows while graphs of the model run."""
    with of_torch(kind) as tracker, Asked(tracker) as seen:
        model(torch.ones(2, 4))
    return {name for line in seen.lines for name in line.partition(":")[2].split()}


def test_compiled_model_that_ran_before_is_two_bogus_modules_for_torchs_tracker(dynamo):
    """k02: so where all modules are torch's own; a class of the user's makes it raise."""
    plain = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="aot_eager")
    own_class = make_compiled("by torch.compile")
    for model in (plain, own_class):
        model(torch.ones(2, 4))
    assert heard_inside(TORCHS, plain) == {"GraphModule", "OptimizedModule"}
    assert heard_inside(DISTRIBUTED, plain) == heard_inside(DISTRIBUTED, own_class) == set()
    with pytest.raises(AssertionError, match="tracked"):
        heard_inside(TORCHS, own_class)


def test_modules_that_compile_themselves_show_a_bogus_module_with_torchs_trackers(dynamo):
    """k03, k04"""
    assert "GraphModule" in heard_inside(TORCHS, make_compiled("by itself"))
    assert counters["graph_break"]
    torch._dynamo.reset()
    counters.clear()
    assert "GraphModule" in heard_inside(DISTRIBUTED, make_compiled("by layer"))


class Plain(TorchDispatchMode):
    """A mode that knows nothing of compilers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_plain_dispatch_mode_makes_torch_skip_compiled_code_with_or_without_tracker(dynamo):
    """d10b, d10c: it is torch that goes over to eager; a tracker alone never does it."""
    outcomes = []
    for tracked in (False, True):
        torch._dynamo.reset()
        counting = CountingBackend("eager")
        model = torch.compile(M(), backend=counting)
        model(torch.ones(2, 4))
        ran = []
        with ModuleTracker(strict=True) if tracked else nullcontext():
            for mode in (Plain(), nullcontext()):
                counting.ran = 0
                with mode:
                    train(model)
                ran.append(counting.ran)
        outcomes.append((counting.made, ran))
    assert outcomes[1] == outcomes[0]
    assert outcomes[0][1][0] == 0


def test_names_under_a_plain_dispatch_mode_are_those_of_the_eager_modules(dynamo):
    """d10b"""
    model = torch.compile(M(), backend="aot_eager")

    class PlainAsked(Asked):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return False

    with ModuleTracker(strict=True) as tracker, PlainAsked(tracker) as seen:
        train(model)
    assert seen.lines == M_TRAINS


# Tracing.


def test_export_runs_and_gives_the_same_program(dynamo):
    """k07"""
    torch.manual_seed(0)
    model = M()
    plain = torch.export.export(model, (torch.ones(2, 4),))
    with ModuleTracker(strict=True) as tracker:
        exported = torch.export.export(model, (torch.ones(2, 4),))
        assert tracker.parents == {GLOBAL}
        assert exported.graph_module.code == plain.graph_module.code
        lines = asked(lambda: train(model), tracker)
        assert lines == M_TRAINS
        runnable = exported.module()
        lines = asked(lambda: runnable(torch.ones(2, 4)), tracker)
        assert [each.partition(":")[2].split()[0] for each in lines] == [type(runnable).__name__] * 2


def test_symbolic_trace_gives_the_same_code(dynamo):
    """d20"""
    model = M()
    plain = torch.fx.symbolic_trace(model)
    with ModuleTracker(strict=True) as tracker:
        traced = torch.fx.symbolic_trace(model)
        assert tracker.parents == {GLOBAL}
        assert traced.code == plain.code
        assert asked(lambda: train(model), tracker) == M_TRAINS
        # It shares its parts with the model; below a caller a part has its path from there.
        assert asked(lambda: train(traced), tracker) == of("M#1", M_TRAINS)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_runs_and_the_traced_module_is_a_root():
    """d19"""
    model = M()
    with ModuleTracker(strict=True) as tracker:
        traced = torch.jit.trace(model, torch.ones(2, 4))
        assert tracker.parents == {GLOBAL}
        assert asked(lambda: train(model), tracker) == M_TRAINS
        lines = asked(lambda: traced(torch.ones(2, 4)), tracker)
    assert {each.partition(":")[2].split()[0] for each in lines} == {"TopLevelTracedModule"}
