"""The cases in which PyTorch's own module trackers fail: instances, threads, compilation, replicas, memory, ranks.

Each test says what is right. Where one of PyTorch's trackers says something else, that is asserted beside it.
"""

import copy
import gc
import logging
import pickle
import sys
import threading
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed._tools import mod_tracker
from torch.nn.modules import module as module_globals
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from helpers import ranks
from helpers.asked import GLOBAL, Asked, ours
from helpers.twins import bits, state
from modtrace import ModuleTracker
from modtrace.errors import MisuseError
from zoo import Recursive, Twice

TIMEOUT_S = 30

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]


# What runs, asked at every op.


def ours_compiled(tracker: ModuleTracker) -> str:
    """With "compiled" where the region is one, by the answer of the place and by that of the call."""
    where = tracker.where()
    call = where.call
    marks = ["compiled"] * where.compiled + ["(call compiled)"] * (call is not None and call.compiled)
    return " ".join([ours(tracker), *marks])


def asked(run: Callable[[], Any], tracker: Any = None, answer: Any = None) -> list[str]:
    """What a tracker says while something runs; by default a new one of ours."""
    if tracker is None:
        tracker = ModuleTracker(strict=True)
    with tracker, Asked(tracker, answer) as seen:
        run()
    return seen.lines


TORCHS = torch.utils.module_tracker.ModuleTracker
DISTRIBUTED = mod_tracker.ModTracker


@contextmanager
def of_torch(kind: Any) -> Iterator[Any]:
    """One of PyTorch's trackers, entered; what it leaves behind is taken away afterwards."""
    listed = [
        module_globals._global_forward_pre_hooks,
        module_globals._global_forward_hooks,
        module_globals._global_forward_hooks_always_called,
        module_globals._global_forward_hooks_with_kwargs,
    ]
    before = [dict(each) for each in listed]
    formatwarning = warnings.formatwarning
    loggers = [logging.getLogger(each.__module__) for each in (TORCHS, DISTRIBUTED)]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with kind() as tracker:
                yield tracker
    finally:
        warnings.formatwarning = formatwarning
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
        for each, was in zip(listed, before, strict=True):
            each.clear()
            each.update(was)


def asked_of_torch(kind: Any, run: Callable[[], Any]) -> list[str]:
    with of_torch(kind) as tracker, Asked(tracker) as seen:
        run()
    return seen.lines


BOTH_OF_TORCH = pytest.mark.parametrize("kind", [TORCHS, DISTRIBUTED], ids=["ModuleTracker", "ModTracker"])


# Small models. The work of each is told by its ops: `addmm` and `mm` are of Linears, the others of who calls them.


class M(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.l(x).relu()


def train(model: Callable[..., Any], x: torch.Tensor | None = None) -> None:
    model(torch.ones(2, 4) if x is None else x).sum().backward()


M_FORWARD = ["addmm forward: M M.l", "relu forward: M"]
M_BACKWARD = ["threshold_backward backward: M", "mm backward: M M.l"]
M_TRAINS = M_FORWARD + M_BACKWARD


def of(name: str, lines: list[str]) -> list[str]:
    """The same lines for a model that has another name."""
    return [
        " ".join(name + part[1:] if part[:2] in ("M", "M.") else part for part in line.split(" "))
        for line in lines
    ]


def test_lines_of_another_name():
    assert of("M#1", M_TRAINS) == [
        "addmm forward: M#1 M#1.l",
        "relu forward: M#1",
        "threshold_backward backward: M#1",
        "mm backward: M#1 M#1.l",
    ]


# Instances.


def two_models() -> Callable[[], None]:
    models = [M(), M()]

    def run() -> None:
        outputs = [each(torch.ones(2, 4)) for each in models]
        for each in outputs:
            each.sum().backward()

    return run


def test_two_models_of_one_class_are_two_roots():
    """d08"""
    assert asked(two_models()) == [
        "addmm forward: M M.l",
        "relu forward: M",
        "addmm forward: M#1 M#1.l",
        "relu forward: M#1",
        "threshold_backward backward: M",
        "mm backward: M M.l",
        "threshold_backward backward: M#1",
        "mm backward: M#1 M#1.l",
    ]


@BOTH_OF_TORCH
def test_two_models_of_one_class_are_one_for_torch(kind):
    """d08"""
    assert asked_of_torch(kind, two_models()) == 2 * M_FORWARD + 2 * M_BACKWARD


class Peer(nn.Module):
    """Calls another of its class, which is not registered in it."""

    def __init__(self, peer: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__["peer"] = peer
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        if self.peer is not None:
            x = self.peer(x)
        return self.b(x.relu())


PEER_LINES = [
    "addmm forward: Peer Peer.a",
    "addmm forward: Peer {peer} {peer}.a",
    "relu forward: Peer {peer}",
    "addmm forward: Peer {peer} {peer}.b",
    "relu forward: Peer",
    "addmm forward: Peer Peer.b",
    "mm backward: Peer Peer.b",
    "mm backward: Peer Peer.b",
    "threshold_backward backward: Peer",
    "mm backward: Peer {peer} {peer}.b",
    "mm backward: Peer {peer} {peer}.b",
    "threshold_backward backward: Peer {peer}",
    "mm backward: Peer {peer} {peer}.a",
    "mm backward: Peer {peer} {peer}.a",
    "mm backward: Peer Peer.a",
]


def peer_lines(name: str) -> list[str]:
    return [each.replace("{peer}", name) for each in PEER_LINES]


def test_unregistered_peer_of_the_same_class_is_an_instance_of_its_own():
    """d08b"""
    model = Peer(Peer())
    assert asked(lambda: train(model)) == peer_lines("Peer.(Peer#0)")


def test_unregistered_peer_that_is_a_given_root_has_the_name_of_that_root():
    """d08b"""
    model = Peer(Peer())
    tracker = ModuleTracker({"mine": model, "other": model.peer}, strict=True)
    lines = [each.replace("Peer", "mine") for each in peer_lines("other")]
    assert asked(lambda: train(model), tracker) == lines


def test_unregistered_peer_that_has_run_before_has_the_name_that_it_got_then():
    """d08b"""
    model = Peer(Peer())

    def run() -> None:
        model(torch.ones(2, 4))
        with torch.no_grad():
            other(torch.ones(2, 4))
        train(other)

    other = Peer(model)
    model.__dict__["peer"] = None
    lines = asked(run)
    assert lines[:3] == ["addmm forward: Peer Peer.a", "relu forward: Peer", "addmm forward: Peer Peer.b"]
    expected = [each.replace("Peer", "Peer#1") for each in peer_lines("root")]
    assert lines[3 + 6 :] == [each.replace("root", "Peer") for each in expected]


def test_unregistered_peer_of_the_same_class_confuses_torch():
    """d08b: the outer one is lost in the first, and the two have one name in both."""
    model = Peer(Peer())
    assert asked_of_torch(TORCHS, lambda: model(torch.ones(2, 4))) == [
        "addmm forward: Peer Peer.a",
        "addmm forward: Peer Peer.a",
        "relu forward: Peer",
        "addmm forward: Peer Peer.b",
        "relu forward:",
        "addmm forward: Peer.b",
    ]
    assert asked_of_torch(DISTRIBUTED, lambda: model(torch.ones(2, 4))) == [
        "addmm forward: Peer Peer.a",
        "addmm forward: Peer Peer.a",
        "relu forward: Peer",
        "addmm forward: Peer Peer.b",
        "relu forward: Peer",
        "addmm forward: Peer Peer.b",
    ]


# Threads.


def in_threads(*runs: Callable[[], Any]) -> None:
    """Runs each in a thread of its own, all at the same time."""
    errors: list[BaseException] = []

    def catch(run: Callable[[], Any]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=catch, args=(each,)) for each in runs]
    for each in threads:
        each.start()
    for each in threads:
        each.join(TIMEOUT_S)
        assert not each.is_alive()
    if errors:
        raise errors[0]


class Meeting(nn.Module):
    """In its forward and in its backward it asks while another thread is at the same place."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        super().__init__()
        self.__dict__["ask"] = ask
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        self.ask("forward")
        return AskInBackward.apply(self.l(x), self.ask)


class Other(Meeting):
    """The same, with another name."""


class AskInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ask):
        ctx.ask = ask
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.ask("backward")
        return grad, None


def meetings(tracker: Any, *, backward: bool) -> list[list[tuple[str, set[str]]]]:
    """What two threads hear, each in a model of its own, at the same moments."""
    heard: list[list[tuple[str, set[str]]]] = [[], []]
    barrier = threading.Barrier(2)

    def asking(at: int) -> Callable[[str], None]:
        def ask(phase: str) -> None:
            if phase == ("backward" if backward else "forward"):
                barrier.wait(TIMEOUT_S)
                heard[at].append((phase, set(tracker.parents)))
                barrier.wait(TIMEOUT_S)

        return ask

    models = [Meeting(asking(0)), Other(asking(1))]
    run = train if backward else lambda model: model(torch.ones(2, 4))
    in_threads(*(lambda model=model: run(model) for model in models))
    return heard


def test_two_models_in_two_threads_have_their_own_stacks():
    """d09"""
    with ModuleTracker(strict=True) as tracker:
        assert meetings(tracker, backward=False) == [
            [("forward", {GLOBAL, "Meeting"})],
            [("forward", {GLOBAL, "Other"})],
        ]


@BOTH_OF_TORCH
def test_two_models_in_two_threads_see_each_other_with_torch(kind):
    """d09"""
    with of_torch(kind) as tracker:
        both = [("forward", {GLOBAL, "Meeting", "Other"})]
        assert meetings(tracker, backward=False) == [both, both]


def test_backwards_at_once_in_two_threads_have_their_own_stacks():
    """d22"""
    with ModuleTracker(strict=True) as tracker:
        assert meetings(tracker, backward=True) == [
            [("backward", {GLOBAL, "Meeting"})],
            [("backward", {GLOBAL, "Other"})],
        ]


@BOTH_OF_TORCH
def test_backwards_at_once_in_two_threads_see_each_other_with_torch(kind):
    """d22"""
    with of_torch(kind) as tracker:
        both = [("backward", {GLOBAL, "Meeting", "Other"})]
        assert meetings(tracker, backward=True) == [both, both]


class Slow(nn.Module):
    """Two threads are in its forward; one stays when the other has left."""

    def __init__(self, tracker: Any) -> None:
        super().__init__()
        self.__dict__.update(tracker=tracker, entered=threading.Event(), left=threading.Event(), heard={})
        self.l = nn.Linear(4, 4)

    def forward(self, x, stays: bool):
        if stays:
            self.entered.set()
            assert self.left.wait(TIMEOUT_S)
        self.heard[stays] = set(self.tracker.parents)
        return self.l(x)

    def run(self) -> dict[bool, set[str]]:
        def leave_first() -> None:
            assert self.entered.wait(TIMEOUT_S)
            self(torch.ones(2, 4), False)
            self.left.set()

        in_threads(lambda: self(torch.ones(2, 4), True), leave_first)
        return self.heard


def test_one_model_in_two_threads_is_on_both_stacks():
    """d09b"""
    with ModuleTracker(strict=True) as tracker:
        assert Slow(tracker).run() == {False: {GLOBAL, "Slow"}, True: {GLOBAL, "Slow"}}


def test_one_model_in_two_threads_is_lost_by_torch_for_the_one_that_stays():
    """d09b: ModTracker counts, and so is right."""
    with of_torch(TORCHS) as tracker:
        assert Slow(tracker).run() == {False: {GLOBAL, "Slow"}, True: {GLOBAL}}
    with of_torch(DISTRIBUTED) as tracker:
        assert Slow(tracker).run() == {False: {GLOBAL, "Slow"}, True: {GLOBAL, "Slow"}}


# Compilation.


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Nothing compiled before is known, nor stays known."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def compiled_graphs() -> tuple[int, dict[str, int]]:
    """How many graphs were compiled, and where graphs broke."""
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def whole(**options: Any) -> Callable[[], Any]:
    """Makes a model that `torch.compile` has been given."""
    return lambda: torch.compile(M(), **options)


def in_place(**options: Any) -> Callable[[], Any]:
    """Makes a model that has been told to compile itself."""

    def make() -> Any:
        model = M()
        model.compile(**options)
        return model

    return make


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(M(), M())

    def forward(self, x):
        return self.blocks(x).tanh()


def by_layer(**options: Any) -> Callable[[], Any]:
    """Makes a model each of whose blocks has been told to compile itself."""

    def make() -> Any:
        model = Stacked()
        for block in model.blocks:
            block.compile(**options)
        return model

    return make


class Counting:
    """A backend that counts how often graphs are made, and how often they run."""

    def __init__(self) -> None:
        self.made = 0
        self.ran = 0

    def __call__(self, graph, inputs):
        self.made += 1

        def run(*args):
            self.ran += 1
            return graph.forward(*args)

        return run


#: d10, k01, k06, k05, k03, k04
WAYS = {
    "eager": (whole, {"backend": "eager"}),
    "aot_eager": (whole, {"backend": "aot_eager"}),
    "eager full graph": (whole, {"backend": "eager", "fullgraph": True}),
    "aot_eager full graph": (whole, {"backend": "aot_eager", "fullgraph": True}),
    "module.compile() by eager": (in_place, {"backend": "eager"}),
    "module.compile() by aot_eager": (in_place, {"backend": "aot_eager"}),
    "module.compile() full graph": (in_place, {"backend": "aot_eager", "fullgraph": True}),
    "by layer by eager": (by_layer, {"backend": "eager"}),
    "by layer by aot_eager": (by_layer, {"backend": "aot_eager"}),
    "by layer full graph": (by_layer, {"backend": "aot_eager", "fullgraph": True}),
}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


def make_compiled(way: str, backend: Any = None) -> Any:
    make, options = WAYS[way]
    torch.manual_seed(0)
    return make(**({**options, "backend": backend} if backend is not None else options))()


def graphs_of(way: str) -> int:
    """How many graphs run in one forward: of two layers the second has an input that needs a gradient."""
    return 2 if way.startswith("by layer") else 1


def compile_outcome(way: str, tracked: bool, *, before: int) -> Any:
    """Bits, graphs and breaks of three steps, with so many before them."""
    torch._dynamo.reset()
    counters.clear()
    model = make_compiled(way)
    for _ in range(before):
        train(model)
    with ModuleTracker(strict=True) if tracked else nullcontext():
        for _ in range(3):
            train(model)
    return [bits(each) for each in tree_leaves(state(model))], *compiled_graphs()


@EACH_WAY
@pytest.mark.parametrize("before", [0, 2], ids=["first run inside", "compiled before"])
def test_tracking_changes_nothing_of_what_is_compiled(dynamo, way, before):
    """d10, k01, k06, k05, k02, k03, k04: no exception, no break, no compilation more, the same bits."""
    plain = compile_outcome(way, tracked=False, before=before)
    assert compile_outcome(way, tracked=True, before=before) == plain
    assert plain[1:] == (graphs_of(way), {})


@EACH_WAY
def test_what_is_compiled_inside_stays_compiled_and_is_compiled_once_more_at_most(dynamo, way):
    """d10, k01, k06, k05, k03, k04"""
    counting = Counting()
    model = make_compiled(way, backend=counting)
    graphs = graphs_of(way)
    made = []
    for tracked in (True, False, True, False):
        with ModuleTracker(strict=True) if tracked else nullcontext():
            for _ in range(3):
                counting.ran = 0
                train(model)
                assert counting.ran == graphs
        made.append(counting.made)
    assert made[0] == graphs
    assert made[1] <= 2 * graphs
    assert made[1:] == [made[1]] * 3


@EACH_WAY
def test_what_was_compiled_before_runs_on_inside_and_afterwards(dynamo, way):
    """k02"""
    counting = Counting()
    model = make_compiled(way, backend=counting)
    graphs = graphs_of(way)
    for tracked in (False, True, False):
        with ModuleTracker(strict=True) if tracked else nullcontext():
            for _ in range(2):
                counting.ran = 0
                train(model)
                assert counting.ran == graphs
        assert counting.made == graphs


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


@EACH_WAY
@pytest.mark.parametrize("before", [0, 2], ids=["first run inside", "compiled before"])
def test_ops_of_a_compiled_region_are_those_of_its_module_and_marked(dynamo, way, before):
    """d10, k01, k06, k05, k02, k03, k04"""
    model = make_compiled(way)
    for _ in range(before):
        train(model)
    lines = COMPILED_BLOCKS if way.startswith("by layer") else COMPILED_M
    assert asked(lambda: train(model), answer=ours_compiled) == lines
    assert asked(lambda: train(model), answer=ours_compiled) == lines


def names_met(way: str, backend: Any = None) -> set[str]:
    """All names that hooks hear of, inside a first run and a second one."""
    model = make_compiled(way, backend)
    met: set[str] = set()

    def look(*_: Any) -> None:
        met.update(tracker.parents)

    with ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(look, look, look, look)
        train(model)
        train(model)
    return met


@EACH_WAY
def test_user_hooks_at_compiled_modules_hear_clean_names_only(dynamo, way):
    """d10, k01, k06, k05, k03, k04: no GraphModule, no OptimizedModule."""
    blocks = {"Stacked", "Stacked.blocks", "Stacked.blocks.0", "Stacked.blocks.1"}
    assert names_met(way) == {GLOBAL} | (blocks if way.startswith("by layer") else {"M"})


@pytest.mark.parametrize("way", ["eager", "module.compile() by eager", "eager full graph"])
def test_backend_of_the_user_that_gives_the_graph_module_itself_shows_no_graph_module(dynamo, way):
    """k01: Dynamo calls it as a module then."""
    assert names_met(way, backend=lambda graph, inputs: graph) == {GLOBAL, "M"}


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


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_first_run_of_a_compiled_model_raises_with_torchs_tracker(dynamo, way):
    """d10, k01, k06"""
    errors = (AssertionError, torch._dynamo.exc.TorchDynamoException)
    with pytest.raises(errors, match="tracked"), of_torch(TORCHS):
        train(make_compiled(way))


def test_full_graph_raises_with_torchs_tracker(dynamo):
    """k05: which of its two errors it is depends on what ran before in the process."""
    errors = (AssertionError, torch._dynamo.exc.TorchDynamoException)
    with pytest.raises(errors), of_torch(TORCHS):
        train(make_compiled("aot_eager full graph"))


@pytest.mark.parametrize("way", ["eager", "aot_eager", "aot_eager full graph"])
def test_compiled_model_is_nobodys_for_torchs_distributed_tracker(dynamo, way):
    """d10, k01, k06, k05"""
    lines = asked_of_torch(DISTRIBUTED, lambda: train(make_compiled(way)))
    assert {each.partition(":")[2] for each in lines} == {""}


def heard_inside(kind: Any, model: nn.Module) -> set[str]:
    """The names that one of torch's trackers shows while graphs of the model run."""
    with of_torch(kind) as tracker, Asked(tracker) as seen:
        model(torch.ones(2, 4))
    return {name for line in seen.lines for name in line.partition(":")[2].split()}


def test_compiled_model_that_ran_before_is_two_bogus_modules_for_torchs_tracker(dynamo):
    """k02: so where all modules are torch's own; a class of the user's makes it raise."""
    plain = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="aot_eager")
    own_class = make_compiled("aot_eager")
    for model in (plain, own_class):
        model(torch.ones(2, 4))
    assert heard_inside(TORCHS, plain) == {"GraphModule", "OptimizedModule"}
    assert heard_inside(DISTRIBUTED, plain) == heard_inside(DISTRIBUTED, own_class) == set()
    with pytest.raises(AssertionError, match="tracked"):
        heard_inside(TORCHS, own_class)


@pytest.mark.parametrize("way", ["module.compile() by aot_eager", "by layer by aot_eager"])
def test_modules_that_compile_themselves_show_a_bogus_module_with_torchs_trackers(dynamo, way):
    """k03, k04"""
    assert "GraphModule" in heard_inside(TORCHS, make_compiled(way))
    assert counters["graph_break"]
    torch._dynamo.reset()
    counters.clear()
    assert "GraphModule" in heard_inside(DISTRIBUTED, make_compiled(way))


class Plain(TorchDispatchMode):
    """A mode that knows nothing of compilers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("before", [0, 1], ids=["first run inside", "compiled before"])
def test_plain_dispatch_mode_makes_torch_skip_compiled_code_with_or_without_tracker(dynamo, before):
    """d10b, d10c: it is torch that goes over to eager; a tracker alone never does it."""
    found = []
    for tracked in (False, True):
        torch._dynamo.reset()
        counting = Counting()
        model = torch.compile(M(), backend=counting)
        ran = []
        for _ in range(before):
            model(torch.ones(2, 4))
        with ModuleTracker(strict=True) if tracked else nullcontext():
            for mode in (Plain(), nullcontext()):
                counting.ran = 0
                with mode:
                    train(model)
                ran.append(counting.ran)
        found.append((counting.made, ran))
    assert found[1] == found[0]
    assert found[0][1][0] == 0


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


# DataParallel.


def test_data_parallel_is_stripped_from_names():
    """d11"""
    model = nn.DataParallel(M())
    assert asked(lambda: train(model)) == M_TRAINS


@BOTH_OF_TORCH
def test_data_parallel_is_in_the_names_of_torch(kind):
    """d11"""
    model = nn.DataParallel(M())
    lines = asked_of_torch(kind, lambda: model(torch.ones(2, 4)))
    assert lines == [
        "addmm forward: DataParallel DataParallel.module DataParallel.module.l",
        "relu forward: DataParallel DataParallel.module",
    ]


def replicas_of(model: nn.Module, count: int) -> list[nn.Module]:
    """What `torch.nn.parallel.replicate` makes, on one device."""
    modules = list(model.modules())
    copies = [{id(each): each._replicate_for_data_parallel() for each in modules} for _ in range(count)]
    for copied in copies:
        for module in modules:
            replica = copied[id(module)]
            for name, child in module._modules.items():
                replica._modules[name] = copied[id(child)]
            replica._former_parameters = {}
            for name, parameter in module._parameters.items():
                copy_ = parameter.view_as(parameter)  # not a leaf, as after broadcasting
                setattr(replica, name, copy_)
                replica._former_parameters[name] = copy_
    return [copied[id(model)] for copied in copies]


def asked_in_threads(tracker: Any, models: list[nn.Module]) -> list[list[str]]:
    """What each thread hears, as `torch.nn.parallel.parallel_apply` runs them."""
    heard: list[list[str]] = [[] for _ in models]

    def run(at: int) -> None:
        with Asked(tracker) as seen:
            models[at](torch.ones(2, 4))
        heard[at] = seen.lines

    in_threads(*(lambda at=at: run(at) for at in range(len(models))))
    return heard


def test_replicas_have_the_names_of_their_originals():
    """d11b"""
    model = M()
    with ModuleTracker(model, strict=True) as tracker:
        for _ in range(3):
            assert asked_in_threads(tracker, replicas_of(model, 2)) == [M_FORWARD, M_FORWARD]
        assert tracker.get_known_fqn(model.l) == "M.l"


def test_replicas_have_the_names_of_an_original_that_ran_before():
    """d11b"""
    model = M()
    with ModuleTracker(strict=True) as tracker:
        model(torch.ones(2, 4))
        assert asked_in_threads(tracker, replicas_of(model, 2)) == [M_FORWARD, M_FORWARD]


def test_backward_through_replicas_has_the_names_of_their_originals():
    """d11b"""
    model = M()
    with ModuleTracker(model, strict=True) as tracker:
        outputs: list[Any] = [None, None]

        def run(at: int, replica: nn.Module) -> None:
            outputs[at] = replica(torch.ones(2, 4))

        in_threads(*(lambda at=at, each=each: run(at, each) for at, each in enumerate(replicas_of(model, 2))))
        for output in outputs:
            with Asked(tracker) as seen:
                output.sum().backward()
            assert seen.lines == M_BACKWARD


@BOTH_OF_TORCH
def test_replicas_are_other_roots_or_merged_with_torch(kind):
    """d11b: a copy that is called alone has its class for a name."""
    model = M()
    with of_torch(kind) as tracker:
        model(torch.ones(2, 4))
        with Asked(tracker) as seen:
            replicas_of(model, 1)[0].l(torch.ones(2, 4))
    assert seen.lines == ["addmm forward: Linear"]


def test_submodule_of_a_replica_called_alone_has_the_name_of_its_original():
    """d11b"""
    model = M()
    with ModuleTracker(model, strict=True) as tracker:
        lines = asked(lambda: replicas_of(model, 1)[0].l(torch.ones(2, 4)), tracker)
    assert lines == ["addmm forward: M.l"]


# Forwards and hooks that are not plain.


class Generating(nn.Module):
    """Its forward returns at once; the work is done as it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = self.l(x).relu()
            yield x


def test_generator_forward_is_over_at_once_and_its_modules_keep_their_names():
    """d14: as docs/limits.md says; the module whose generator runs is found in the frames."""
    model = Generating()
    lines = asked(lambda: list(model(torch.ones(2, 4)))[-1].sum().backward())
    layer = "addmm forward: Generating Generating.l"
    assert [each for each in lines if each.startswith("addmm")] == [layer, layer]
    assert [each for each in lines if each.startswith("mm")] == ["mm backward: Generating Generating.l"] * 3


def test_generator_that_is_dropped_half_way_leaves_nothing_open():
    """d14"""
    model, other = Generating(), M()
    with ModuleTracker(strict=True) as tracker:
        values = model(torch.ones(2, 4))
        next(values)
        assert tracker.parents == {GLOBAL}
        del values
        assert tracker.parents == {GLOBAL}
        assert asked(lambda: train(other), tracker) == M_TRAINS


@BOTH_OF_TORCH
def test_generator_itself_is_missing_with_torch(kind):
    """d14"""
    model = Generating()
    lines = asked_of_torch(kind, lambda: list(model(torch.ones(2, 4))))
    assert lines == ["addmm forward: Generating.l", "relu forward:"] * 2


def test_forward_hook_that_changes_the_output():
    """d16: what the hook of `l` computes is `l`'s caller's or its own; the rest is as ever."""
    model = M()
    model.l.register_forward_hook(lambda module, args, output: output.tanh())
    lines = asked(lambda: train(model))
    assert [each for each in lines if "tanh" not in each] == M_TRAINS
    tanh = [each.partition(":")[2].split()[0] for each in lines if "tanh" in each]
    assert tanh == ["M", "M"]
    where = [each.partition(": ")[2] for each in lines if "tanh" in each]
    assert where[0] == where[1]


def test_full_backward_hook():
    """d17"""
    model = M()
    heard: list[set[str]] = []
    x = torch.ones(2, 4, requires_grad=True)
    with ModuleTracker(strict=True) as tracker:
        model.l.register_full_backward_hook(lambda *_: heard.append(tracker.parents))
        model.l.register_full_backward_pre_hook(lambda *_: heard.append(tracker.parents))
        assert asked(lambda: train(model, x), tracker) == [*M_TRAINS, M_TRAINS[-1]]
    assert [each >= {GLOBAL, "M"} for each in heard] == [True, True]


class Containers(nn.Module):
    """Takes its input out of nested containers and gives its output in some."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, given):
        x = given["x"][0]
        return {"y": [self.a(x), (self.b(x), None)]}


class WithContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i = Containers()

    def forward(self, x):
        found = self.i({"x": [x, 1]})["y"]
        return found[0].relu() + found[1][0].tanh()


CONTAINERS_LINES = [
    "addmm forward: WithContainers WithContainers.i WithContainers.i.a",
    "addmm forward: WithContainers WithContainers.i WithContainers.i.b",
    "relu forward: WithContainers",
    "tanh forward: WithContainers",
    "tanh_backward backward: WithContainers",
    "threshold_backward backward: WithContainers",
    "mm backward: WithContainers WithContainers.i WithContainers.i.b",
    "mm backward: WithContainers WithContainers.i WithContainers.i.a",
]


def test_nested_containers():
    """d18"""
    model = WithContainers()
    assert asked(lambda: train(model)) == CONTAINERS_LINES


# Memory and what is left.


def held_bytes() -> int:
    """What lives of what our code has allocated."""
    gc.collect()
    ours_only = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/modtrace/*")])
    return sum(each.size for each in ours_only.statistics("filename"))


def held_objects() -> int:
    gc.collect()
    return sum(1 for each in gc.get_objects() if str(type(each).__module__).startswith("modtrace."))


def global_hooks() -> int:
    return len(module_globals._global_forward_pre_hooks) + len(module_globals._global_forward_hooks)


@contextmanager
def memory_traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


#: What a tracker may hold. It drops what has ended in batches: 64 outermost calls, with their steps.
MOST_OBJECTS = 400
MOST_BYTES = 100_000


def hold_little(step: Callable[[], Any], base: int) -> None:
    """Runs hundreds of steps; no more lives of ours than a batch of what we drop at once."""
    for _ in range(120):
        step()
    size = held_bytes()
    for _ in range(320):
        step()
    assert held_objects() - base <= MOST_OBJECTS
    assert held_bytes() - size <= MOST_BYTES


@pytest.mark.parametrize("needs_grad", [True, False], ids=["with grad", "without grad"])
def test_hundreds_of_forwards_without_backward_hold_nothing(needs_grad):
    """d15, d15b"""
    model = nn.Sequential(M(), M())
    x = torch.ones(2, 4, requires_grad=needs_grad)
    base = held_objects()
    with memory_traced(), ModuleTracker(strict=True):
        hold_little(lambda: model(x), base)
        assert not x._backward_hooks


def test_hundreds_of_forwards_under_no_grad_hold_nothing():
    """d15b"""
    model = nn.Sequential(M(), M())
    base = held_objects()
    with memory_traced(), ModuleTracker(strict=True), torch.no_grad():
        hold_little(lambda: model(torch.ones(2, 4)), base)


def test_hundreds_of_forwards_whose_outputs_are_kept_hold_nothing_when_those_are_gone():
    """d15"""
    model = nn.Sequential(M(), M())
    base = held_objects()
    with ModuleTracker(strict=True):
        outputs = [model(torch.ones(2, 4)) for _ in range(400)]
        outputs.clear()
        for _ in range(200):
            model(torch.ones(2, 4))
        assert held_objects() - base <= MOST_OBJECTS


def test_forwards_without_backward_pile_up_in_torch():
    """d15, d15b"""
    model = M()
    with of_torch(TORCHS) as tracker:
        for _ in range(100):
            model(torch.ones(2, 4, requires_grad=True))
        assert len(tracker._hooks) == 400
    with of_torch(DISTRIBUTED) as tracker:
        for _ in range(100):
            nn.Linear.__call__(model.l, torch.ones(2, 4))
        assert len(tracker._post_bw_callbacks_to_enqueue) == 100


def test_nothing_is_left_after_exit_and_the_tracker_is_free():
    """d15c"""
    before = global_hooks()
    model = M()
    x = torch.ones(2, 4, requires_grad=True)
    tracker = ModuleTracker(strict=True)
    with tracker:
        assert global_hooks() == before + 2
        kept = model(x)
        kept.sum().backward()
        again = model(x)
    assert global_hooks() == before
    assert not x._backward_hooks
    assert not kept._backward_hooks
    assert not again._backward_hooks
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert not any(each._backward_hooks or each._backward_pre_hooks for each in model.modules())
    dead = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert dead() is None
    again.sum().backward()  # a graph of the context still works


def test_tracker_with_hooks_scopes_and_methods_is_free_after_exit():
    """d15c"""
    model = M()
    before = global_hooks()
    tracker = ModuleTracker(model, strict=True)
    tracker.register_user_hooks(*[lambda *_: None] * 4)
    tracker.methods(model, "forward")
    with tracker, tracker.scope("loop"):
        kept = model(torch.ones(2, 4))
        kept.sum().backward()
        kept = model(torch.ones(2, 4))
    assert global_hooks() == before
    dead = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert dead() is None
    kept.sum().backward()
    assert "forward" in vars(M)
    assert M.forward.__code__.co_filename == __file__


def test_distributed_tracker_of_torch_leaves_hooks_and_itself():
    """d15c"""
    model = M()
    x = torch.ones(2, 4, requires_grad=True)
    with of_torch(DISTRIBUTED) as tracker:
        kept = model(x)
    dead = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert hooks_on_leaf(x) == 2  # of `M` and of `M.l`
    assert dead() is not None
    assert kept.requires_grad


def test_leaf_input_in_hundreds_of_steps_has_no_hook():
    """d15d"""
    model = M()
    x = torch.ones(2, 4, requires_grad=True)

    def step() -> None:
        train(model, x)
        model.zero_grad()

    base = held_objects()
    with memory_traced(), ModuleTracker(strict=True) as tracker:
        hold_little(step, base)
        assert hooks_on_leaf(x) == 0
        assert asked(lambda: train(model, x), tracker) == [*M_TRAINS, M_TRAINS[-1]]
    assert hooks_on_leaf(x) == 0


def test_hundreds_of_backwards_whose_gradients_are_never_cleared_hold_nothing():
    """d15d: all of them are one step, as in a benchmark that has no optimizer."""
    model = M()
    x = torch.ones(2, 4, requires_grad=True)
    base = held_objects()
    with memory_traced(), ModuleTracker(strict=True):
        hold_little(lambda: train(model, x), base)


@pytest.mark.parametrize("hooks", [False, True], ids=["", "with user hooks"])
def test_later_steps_with_a_leaf_input_cost_no_more_python_calls_than_earlier_ones(hooks):
    """d15d: nothing is quadratic."""
    model = M()
    x = torch.ones(2, 4, requires_grad=True)
    calls: list[int] = []

    def count(frame, event, arg) -> None:
        calls[-1] += event == "call"

    with ModuleTracker(strict=True) as tracker:
        if hooks:
            tracker.register_user_hooks(*[lambda *_: None] * 4)
        for _ in range(300):
            calls.append(0)
            sys.setprofile(count)
            try:
                train(model, x)
            finally:
                sys.setprofile(None)
    assert sum(calls[200:]) <= 1.05 * sum(calls[100:200])  # it is looked now and then what can be let go


@BOTH_OF_TORCH
def test_leaf_input_in_fifty_steps_has_fifty_hooks_of_torch(kind):
    """d15d"""
    model = M()
    x = torch.ones(2, 4, requires_grad=True)
    with of_torch(kind):
        for _ in range(50):
            train(model, x)
        inside = hooks_on_leaf(x)
    assert inside >= 50
    assert (hooks_on_leaf(x) >= 50) == (kind is DISTRIBUTED)


def hooks_on_leaf(x: torch.Tensor) -> int:
    return len(x._backward_hooks or {})


def test_process_is_as_before_while_inside_and_afterwards():
    """d15e"""

    def process() -> list[Any]:
        return [
            warnings.formatwarning,
            warnings.showwarning,
            list(warnings.filters),
            torch.get_rng_state().tolist(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch._dynamo.config.skip_nnmodule_hook_guards,
            threading.excepthook,
        ]

    model = M()
    train(model)
    before = process()
    with ModuleTracker(strict=True, additions=True) as tracker:
        assert process() == before
        tracker.register_user_hooks(*[lambda *_: None] * 4)
        tracker.methods(model, "forward")
        train(model)
        model.forward(torch.ones(2, 4))
        with tracker.scope("loss"):
            train(model)
        assert process() == before
    assert process() == before


def test_distributed_tracker_of_torch_replaces_formatwarning():
    """d15e"""
    model = Recursive()
    before = warnings.formatwarning
    with of_torch(DISTRIBUTED):
        model(torch.ones(2, 4))
        assert warnings.formatwarning is not before
    assert warnings.formatwarning is before


class Checkpointed(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(M() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_twenty_steps_of_four_checkpointed_blocks_hold_no_tensor_and_few_objects():
    """AC 20 steps x 4 blocks memory"""
    model = Checkpointed(4)
    tensors: list[int] = []

    def step() -> None:
        train(model)
        model.zero_grad()

    base = held_objects()
    with ModuleTracker(strict=True):
        for _ in range(2):
            for _ in range(20):
                step()
            gc.collect()
            tensors.append(sum(1 for each in gc.get_objects() if type(each) is torch.Tensor))
        assert held_objects() - base <= MOST_OBJECTS
    assert tensors[1] == tensors[0]


def test_hundreds_of_steps_with_checkpointed_blocks_hold_nothing():
    """AC 20 steps x 4 blocks memory"""
    model = Checkpointed(2)

    def step() -> None:
        train(model)
        model.zero_grad()

    base = held_objects()
    with memory_traced(), ModuleTracker(strict=True):
        hold_little(step, base)


def test_checkpointed_blocks_of_torch_leave_their_handles():
    """AC 20 steps x 4 blocks memory"""
    model = Checkpointed(4)
    with of_torch(TORCHS) as tracker:
        for _ in range(20):
            train(model)
        assert len(tracker._hooks) == 20 * 25


def checkpointed_lines(tracker: Any = None) -> list[str]:
    model = Checkpointed(1)
    return asked(lambda: train(model), tracker)


def test_checkpointed_block_is_recomputed_under_its_name():
    assert checkpointed_lines() == [
        "addmm forward: Checkpointed Checkpointed.blocks.0 Checkpointed.blocks.0.l",
        "relu forward: Checkpointed Checkpointed.blocks.0",
        "addmm recompute: Checkpointed Checkpointed.blocks.0 Checkpointed.blocks.0.l",
        "relu recompute: Checkpointed Checkpointed.blocks.0",
        "threshold_backward backward: Checkpointed Checkpointed.blocks.0",
        "mm backward: Checkpointed Checkpointed.blocks.0 Checkpointed.blocks.0.l",
    ]


# Ranks.

NET_FORWARD = [
    "addmm forward: Net Net.a Net.a.l",
    "relu forward: Net Net.a",
    "addmm forward: Net Net.b Net.b.l",
    "relu forward: Net Net.b",
]
NET_BACKWARD = [
    "threshold_backward backward: Net Net.b",
    "mm backward: Net Net.b Net.b.l",
    "mm backward: Net Net.b Net.b.l",
    "threshold_backward backward: Net Net.a",
    "mm backward: Net Net.a Net.a.l",
]
CHECKPOINTED_BACKWARD = [
    "addmm recompute: Net Net.b Net.b.l",
    "relu recompute: Net Net.b",
    *NET_BACKWARD[:3],
    "addmm recompute: Net Net.a Net.a.l",
    "relu recompute: Net Net.a",
    *NET_BACKWARD[3:],
]


@pytest.fixture
def process_group() -> Iterator[None]:
    with ranks.group_of_one():
        yield


def own(lines: list[str]) -> list[str]:
    """Without communication, and without what torch does to gradients as they are accumulated."""
    return [each for each in lines if each.split()[0] not in ranks.COMMUNICATION and not each.endswith("]")]


def ask_ours(name: str) -> list[str]:
    model = ranks.MODELS[name]()
    with ModuleTracker(strict=True) as tracker:
        first = ranks.ask(model, tracker, ranks.with_parameter)
        assert own(ranks.ask(model, tracker, ranks.with_parameter)) == own(first)
    return first


def names_of_torch(kind: Any, name: str) -> set[str]:
    model = ranks.MODELS[name]()
    with of_torch(kind) as tracker:
        lines = ranks.ask(model, tracker)
    return {each for line in lines for each in line.partition(":")[2].split()}


def test_distributed_data_parallel_is_stripped_from_names(process_group):
    """DDP: the bucket's all-reduce is told from the Linear's work by the parameter whose gradient came last."""
    lines = ask_ours("ddp")
    assert own(lines) == NET_FORWARD + NET_BACKWARD
    assert [each for each in lines if each.startswith("allreduce_")] == [
        "allreduce_ backward: Net Net.a Net.a.l [a.l.weight]"
    ]


def test_fully_sharded_model_has_the_name_of_its_own_class(process_group):
    """FSDP2"""
    lines = ask_ours("fsdp2")
    assert own(lines) == NET_FORWARD + NET_BACKWARD
    # The last one runs when the engine is done with all nodes: outside of all modules.
    assert [each for each in lines if each.startswith("chunk_cat")] == [
        "chunk_cat backward: Net Net.b",
        "chunk_cat backward:",
    ]


def test_fully_sharded_and_checkpointed_model_has_plain_names(process_group):
    """FSDP2 + checkpoint_wrapper"""
    assert own(ask_ours("fsdp2_with_checkpoints")) == NET_FORWARD + CHECKPOINTED_BACKWARD


def test_first_fsdp_is_stripped_from_names(process_group):
    """FSDP1"""
    assert own(ask_ours("fsdp1")) == NET_FORWARD + NET_BACKWARD


@BOTH_OF_TORCH
def test_wrappers_of_distributed_models_are_in_the_names_of_torch(process_group, kind):
    """DDP, FSDP2, FSDP2 + checkpoint_wrapper, FSDP1"""
    assert "DistributedDataParallel.module.a.l" in names_of_torch(kind, "ddp")
    assert {"FSDPNet", "FSDPNet.a.l"} <= names_of_torch(kind, "fsdp2")
    assert "FSDPNet.a._checkpoint_wrapped_module.l" in names_of_torch(kind, "fsdp2_with_checkpoints")
    twice = "FullyShardedDataParallel._fsdp_wrapped_module.a._fsdp_wrapped_module.l"
    assert twice in names_of_torch(kind, "fsdp1")


def test_names_in_two_processes_are_those_in_one(tmp_path):
    """DDP and FSDP2, gloo, 2 processes"""
    for found in ranks.in_processes(2, ["ddp", "fsdp2"], tmp_path):
        assert {name: own(lines) for name, lines in found.items()} == {
            "ddp": NET_FORWARD + NET_BACKWARD,
            "fsdp2": NET_FORWARD + NET_BACKWARD,
        }


# Scopes.

LOSS_LINES = [
    *M_FORWARD,
    "sub forward: loss",
    "pow forward: loss",
    "pow backward: loss",
    *M_BACKWARD,
]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).pow(3).sum()


def without_mul(lines: list[str]) -> list[str]:
    """Without the `mul`s of a power's derivative."""
    return [each for each in lines if not each.startswith("mul ")]


def test_scope_names_a_loss_in_forward_and_backward():
    model = M()
    tracker = ModuleTracker(strict=True)

    def run() -> None:
        output = model(torch.ones(2, 4))
        with tracker.scope("loss"):
            loss = loss_of(output)
            assert tracker.parents == {GLOBAL, "loss"}
            assert (tracker.phase, tracker.stack, tracker.current) == ("forward", ("loss",), "loss")
        assert tracker.parents == {GLOBAL}
        loss.backward()

    lines = asked(run, tracker)
    assert without_mul(lines) == LOSS_LINES
    assert {each for each in lines if each.startswith("mul ")} <= {"mul backward: loss"}


def test_scope_outside_of_the_context_is_a_misuse():
    with pytest.raises(MisuseError, match="loss"), ModuleTracker().scope("loss"):
        pass


@pytest.mark.parametrize("name", ["", None, 3])
def test_scope_needs_a_name(name):
    with pytest.raises(TypeError), ModuleTracker(strict=True) as tracker:
        tracker.scope(name)


def test_scope_around_a_training_loop_is_around_its_modules():
    model = M()
    optimizer = torch.optim.SGD(model.parameters())
    tracker = ModuleTracker(strict=True)
    stepped: list[list[str]] = []

    def run() -> None:
        with tracker.scope("loop"):
            for _ in range(3):
                seen.lines.clear()
                optimizer.zero_grad()
                loss_of(model(torch.ones(2, 4))).backward()
                assert tracker.parents == {GLOBAL, "loop"}
                optimizer.step()
                assert tracker.parents == {GLOBAL, "loop"}
                stepped.append(without_mul(seen.lines))
            assert tracker.parents == {GLOBAL, "loop"}
        assert tracker.parents == {GLOBAL}

    with tracker, Asked(tracker) as seen:
        run()
    assert (
        stepped
        == [
            [
                "addmm forward: loop M M.l",
                "relu forward: loop M",
                "sub forward: loop",
                "pow forward: loop",
                "pow backward: loop",
                "threshold_backward backward: loop M",
                "mm backward: loop M M.l",
            ]
        ]
        * 3
    )


def test_modules_in_a_scope_around_the_loop_keep_their_call_numbers_and_steps():
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters())
    numbers: list[Any] = []
    model.layer.register_forward_pre_hook(lambda *_: numbers.append(tuple(tracker.call[:4])))
    with ModuleTracker(strict=True) as tracker, tracker.scope("loop"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert numbers == [("Twice.layer", "layer", nth, step) for step in range(3) for nth in range(4)]


@pytest.mark.parametrize("with_backward", [True, False], ids=["training", "forward only"])
def test_scope_around_hundreds_of_steps_holds_nothing_more(with_backward):
    model = M()
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with nullcontext() if with_backward else torch.no_grad():
            loss = loss_of(model(torch.ones(2, 4)))
        if with_backward:
            loss.backward()
            optimizer.step()

    base = held_objects()
    with (
        memory_traced(),
        ModuleTracker(strict=True) as tracker,
        tracker.scope("loop"),
        tracker.scope("inner"),
    ):
        hold_little(step, base)


def test_scopes_in_each_of_hundreds_of_steps_hold_nothing_more():
    model = M()
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        output = model(torch.ones(2, 4))
        with tracker.scope("loss"):
            loss = loss_of(output)
        loss.backward()
        optimizer.step()

    base = held_objects()
    with memory_traced(), ModuleTracker(strict=True) as tracker:
        hold_little(step, base)


def test_scope_around_hundreds_of_steps_without_modules_holds_nothing_more():
    x = torch.ones(4, requires_grad=True)
    base = held_objects()
    with memory_traced(), ModuleTracker(strict=True) as tracker, tracker.scope("loop"):

        def step() -> None:
            with tracker.scope("loss"):
                loss = loss_of(x)
            loss.backward()
            x.grad = None

        hold_little(step, base)


def test_nested_scopes_are_in_each_other():
    model = M()
    tracker = ModuleTracker(strict=True)

    def run() -> None:
        with tracker.scope("epoch"):
            with tracker.scope("batch"):
                output = model(torch.ones(2, 4)).tanh()
            loss = output.mul(2)
            with tracker.scope("epoch"):
                loss = loss.relu()
        loss.sum().backward()

    assert asked(run, tracker) == [
        "addmm forward: epoch batch M M.l",
        "relu forward: epoch batch M",
        "tanh forward: epoch batch",
        "mul forward: epoch",
        "relu forward: epoch epoch",
        "threshold_backward backward: epoch epoch",
        "mul backward: epoch",
        "tanh_backward backward: epoch batch",
        "threshold_backward backward: epoch batch M",
        "mm backward: epoch batch M M.l",
    ]


class Scoped(nn.Module):
    """Names a part of its forward."""

    def __init__(self, tracker: ModuleTracker, error: Exception | None = None) -> None:
        super().__init__()
        self.__dict__.update(tracker=tracker, error=error)
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        x = x.mul(2)
        with self.tracker.scope("mix"):
            x = self.l(x).tanh()
            if self.error is not None:
                raise self.error
        return x.relu()


SCOPED_FORWARD = [
    "mul forward: Scoped",
    "addmm forward: Scoped Scoped.mix Scoped.l",
    "tanh forward: Scoped Scoped.mix",
    "relu forward: Scoped",
]
SCOPED_BACKWARD = [
    "threshold_backward backward: Scoped",
    "tanh_backward backward: Scoped Scoped.mix",
    "mm backward: Scoped Scoped.mix Scoped.l",
]


def test_scope_in_a_forward_stands_below_the_module():
    tracker = ModuleTracker(strict=True)
    model = Scoped(tracker)
    assert asked(lambda: train(model), tracker) == SCOPED_FORWARD + SCOPED_BACKWARD


def test_scope_in_a_forward_in_a_scope_around_it():
    tracker = ModuleTracker(strict=True)
    model = Scoped(tracker)

    def run() -> None:
        with tracker.scope("loop"):
            train(model)

    lines = [each.replace("Scoped", "loop Scoped", 1) for each in SCOPED_FORWARD + SCOPED_BACKWARD]
    assert asked(run, tracker) == lines


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_scope_in_a_checkpointed_module_is_recomputed(reentrant):
    tracker = ModuleTracker(strict=True)
    model = Scoped(tracker)
    x = torch.ones(2, 4, requires_grad=True)
    lines = asked(lambda: train(lambda given: checkpoint(model, given, use_reentrant=reentrant), x), tracker)
    assert lines[:4] == SCOPED_FORWARD
    assert lines[4:8] == [each.replace("forward", "recompute") for each in SCOPED_FORWARD]
    assert [each for each in lines[8:] if not each.startswith("mul")] == [
        *SCOPED_BACKWARD,
        SCOPED_BACKWARD[-1],
    ]


class CheckpointsFunction(nn.Module):
    """Checkpoints a function of its own, in which there is a scope."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.__dict__["tracker"] = tracker
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        def part(x):
            with self.tracker.scope("part"):
                return self.l(x).tanh()

        return checkpoint(part, x, use_reentrant=False).relu()


def test_scope_in_a_checkpointed_function_is_recomputed_below_its_module():
    tracker = ModuleTracker(strict=True)
    model = CheckpointsFunction(tracker)
    name = "CheckpointsFunction"
    assert asked(lambda: train(model), tracker) == [
        f"addmm forward: {name} {name}.part {name}.l",
        f"tanh forward: {name} {name}.part",
        f"relu forward: {name}",
        f"threshold_backward backward: {name}",
        f"addmm recompute: {name} {name}.part {name}.l",
        f"tanh recompute: {name} {name}.part",
        f"tanh_backward backward: {name} {name}.part",
        f"mm backward: {name} {name}.part {name}.l",
    ]


def test_scope_in_a_checkpointed_function_outside_of_modules_is_recomputed():
    tracker = ModuleTracker(strict=True)
    model = M()

    def part(x):
        with tracker.scope("part"):
            return model(x).tanh()

    lines = asked(lambda: train(lambda x: checkpoint(part, x, use_reentrant=False)), tracker)
    assert lines == [
        "addmm forward: part M M.l",
        "relu forward: part M",
        "tanh forward: part",
        "addmm recompute: part M M.l",
        "relu recompute: part M",
        "tanh recompute: part",
        "tanh_backward backward: part",
        "threshold_backward backward: part M",
        "mm backward: part M M.l",
    ]


def test_scope_around_a_checkpoint_is_around_its_recompute():
    tracker = ModuleTracker(strict=True)
    model = Checkpointed(1)

    def run() -> None:
        with tracker.scope("inside"):
            output = model(torch.ones(2, 4))
        output.sum().backward()

    lines = [each.replace("Checkpointed", "inside Checkpointed", 1) for each in checkpointed_lines()]
    assert asked(run, tracker) == lines


@pytest.mark.parametrize("error", [ValueError("on purpose"), KeyboardInterrupt()], ids=["", "interrupt"])
def test_exception_in_a_scope_closes_it(error):
    model = M()
    with ModuleTracker(strict=True) as tracker:
        with pytest.raises(type(error)), tracker.scope("outer"), tracker.scope("inner"):
            model(torch.ones(2, 4))
            raise error
        assert tracker.parents == {GLOBAL}
        assert asked(lambda: train(model), tracker) == M_TRAINS


@pytest.mark.parametrize("error", [ValueError("on purpose"), KeyboardInterrupt()], ids=["", "interrupt"])
def test_exception_in_a_scope_in_a_forward_closes_both(error):
    with ModuleTracker(strict=True) as tracker:
        model = Scoped(tracker, error)
        with tracker.scope("loop"):
            with pytest.raises(type(error)):
                model(torch.ones(2, 4))
            model.__dict__["error"] = None
            lines = asked(lambda: train(model), tracker)
            assert tracker.parents == {GLOBAL, "loop"}
        assert tracker.parents == {GLOBAL}
    assert lines == [each.replace("Scoped", "loop Scoped", 1) for each in SCOPED_FORWARD + SCOPED_BACKWARD]


def test_scope_object_entered_again_is_a_second_one():
    with ModuleTracker(strict=True) as tracker:
        scope = tracker.scope("part")
        with scope:
            with scope:
                assert tracker.stack == ("part", "part")
            assert tracker.stack == ("part",)
        assert tracker.stack == ()


def test_scope_left_after_the_tracker_does_nothing():
    with ModuleTracker(strict=True) as tracker:
        scope = tracker.scope("part")
        scope.__enter__()
    scope.__exit__(None, None, None)
    with tracker:
        assert tracker.stack == ()
        assert asked(lambda: train(M()), tracker) == M_TRAINS


def test_scopes_in_two_threads_are_their_own():
    barrier = threading.Barrier(2)
    heard: dict[str, set[str]] = {}
    with ModuleTracker(strict=True) as tracker:

        def run(name: str) -> None:
            with tracker.scope(name):
                barrier.wait(TIMEOUT_S)
                heard[name] = tracker.parents
                barrier.wait(TIMEOUT_S)

        in_threads(lambda: run("one"), lambda: run("other"))
    assert heard == {"one": {GLOBAL, "one"}, "other": {GLOBAL, "other"}}


def test_full_graph_with_a_scope_in_it_compiles_as_one_graph(dynamo):
    """The scope inside compiled code is not seen."""
    tracker = ModuleTracker(strict=True)
    plain = torch.compile(Scoped(ModuleTracker()), backend="aot_eager", fullgraph=True)
    with tracker, tracker.scope("loop"):
        model = torch.compile(Scoped(tracker), backend="aot_eager", fullgraph=True)
        lines = asked(lambda: train(model), tracker)
        assert compiled_graphs() == (1, {})
    assert lines == [
        "mul forward: loop Scoped",
        "addmm forward: loop Scoped",
        "tanh forward: loop Scoped",
        "relu forward: loop Scoped",
        "threshold_backward backward: loop Scoped",
        "tanh_backward backward: loop Scoped",
        "mm backward: loop Scoped",
    ]
    assert plain is not model


def test_scope_around_a_full_graph_changes_nothing_of_it(dynamo):
    model = make_compiled("aot_eager full graph")
    tracker = ModuleTracker(strict=True)

    def run() -> None:
        for _ in range(2):
            with tracker.scope("loss"):
                train(model)

    lines = asked(run, tracker, ours_compiled)
    assert lines == 2 * [each.replace("M", "loss M", 1) for each in COMPILED_M]
    assert compiled_graphs() == (1, {})


# Methods.


class Encoder(nn.Module):
    """Has entry points that are no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def encode(self, x):
        return self.l(x).tanh()

    def generate(self, x):
        return self.encode(x).relu()

    def forward(self, x):
        return self.encode(x).mul(2)


@pytest.fixture
def plain_classes() -> Iterator[None]:
    """The classes have their own methods again, whatever a test has left there."""
    kept = {kind: dict(vars(kind)) for kind in (Encoder, Louder)}
    yield
    for kind, members in kept.items():
        kind.encode = members["encode"]


ENCODE_FORWARD = [
    "addmm forward: Encoder Encoder.encode() Encoder.l",
    "tanh forward: Encoder Encoder.encode()",
]
ENCODE_BACKWARD = [
    "tanh_backward backward: Encoder Encoder.encode()",
    "mm backward: Encoder Encoder.encode() Encoder.l",
]


def test_scope_of_a_module_stands_below_it_and_opens_it():
    model = Encoder()
    tracker = ModuleTracker(strict=True)

    def run() -> None:
        with tracker.scope("encode", model):
            output = model.l(torch.ones(2, 4)).tanh()
            assert tracker.stack == ("Encoder", "Encoder.encode")
            assert tracker.paths == ("", "encode")
        assert tracker.parents == {GLOBAL}
        output.sum().backward()

    assert asked(run, tracker) == [
        "addmm forward: Encoder Encoder.encode Encoder.l",
        "tanh forward: Encoder Encoder.encode",
        "tanh_backward backward: Encoder Encoder.encode",
        "mm backward: Encoder Encoder.encode Encoder.l",
    ]


def test_scope_of_a_module_that_runs_already_does_not_open_it_again():
    class Uses(Encoder):
        def forward(self, x):
            with tracker.scope("encode", self):
                return self.encode(x)

    with ModuleTracker(strict=True) as tracker:
        assert asked(lambda: train(Uses()), tracker) == [
            "addmm forward: Uses Uses.encode Uses.l",
            "tanh forward: Uses Uses.encode",
            "tanh_backward backward: Uses Uses.encode",
            "mm backward: Uses Uses.encode Uses.l",
        ]


def test_scope_of_a_module_inside_a_scope_of_nobody():
    model = Encoder()
    tracker = ModuleTracker(strict=True)

    def run() -> None:
        with tracker.scope("loop"), tracker.scope("encode", model):
            output = model.l(torch.ones(2, 4))
        output.sum().backward()

    assert asked(run, tracker) == [
        "addmm forward: loop Encoder Encoder.encode Encoder.l",
        "mm backward: loop Encoder Encoder.encode Encoder.l",
    ]


@pytest.mark.parametrize("known", [True, False], ids=["given as root", "not given"])
def test_methods_are_scopes_of_their_module_in_forward_and_backward(known):
    model = Encoder()
    tracker = ModuleTracker(model if known else None, strict=True)
    tracker.methods(model, "encode", "generate")
    assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
    assert asked(lambda: train(model.generate), tracker) == [
        "addmm forward: Encoder Encoder.generate() Encoder.encode() Encoder.l",
        "tanh forward: Encoder Encoder.generate() Encoder.encode()",
        "relu forward: Encoder Encoder.generate()",
        "threshold_backward backward: Encoder Encoder.generate()",
        "tanh_backward backward: Encoder Encoder.generate() Encoder.encode()",
        "mm backward: Encoder Encoder.generate() Encoder.encode() Encoder.l",
    ]


def test_method_called_by_the_forward_opens_no_second_module():
    model = Encoder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    lines = asked(lambda: train(model), tracker)
    assert lines == [
        *ENCODE_FORWARD,
        "mul forward: Encoder",
        "mul backward: Encoder",
        *ENCODE_BACKWARD,
    ]


def test_method_of_a_child_stands_below_the_modules_that_run():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = Encoder()

        def forward(self, x):
            return self.enc.encode(x).relu()

    model = Holder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model.enc, "encode")
    assert asked(lambda: train(model), tracker) == [
        "addmm forward: Holder Holder.enc Holder.enc.encode() Holder.enc.l",
        "tanh forward: Holder Holder.enc Holder.enc.encode()",
        "relu forward: Holder",
        "threshold_backward backward: Holder",
        "tanh_backward backward: Holder Holder.enc Holder.enc.encode()",
        "mm backward: Holder Holder.enc Holder.enc.encode() Holder.enc.l",
    ]


def test_methods_given_inside_the_context_are_followed_at_once_and_until_removed():
    model = Encoder()
    with ModuleTracker(strict=True) as tracker:
        handle = tracker.methods(model, "encode")
        assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
        handle.remove()
        assert Encoder.encode.__code__.co_filename == __file__
        assert asked(lambda: model.encode(torch.ones(2, 4)), tracker)[1] == "tanh None:"
        handle.remove()


def test_methods_are_plain_before_and_after_and_followed_in_each_context():
    model = Encoder()
    plain = vars(Encoder)["encode"]
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    for _ in range(2):
        assert vars(Encoder)["encode"] is plain
        with tracker:
            assert vars(Encoder)["encode"] is not plain
            assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
        assert vars(Encoder)["encode"] is plain
    assert "encode" not in model.__dict__


def test_methods_that_are_none_are_refused():
    model = Encoder()
    tracker = ModuleTracker(strict=True)
    with pytest.raises(AttributeError, match="decode"):
        tracker.methods(model, "decode")
    with pytest.raises(TypeError, match="'l'"):
        tracker.methods(model, "l")
    with pytest.raises(TypeError):
        tracker.methods(model)
    with pytest.raises(TypeError):
        tracker.methods("model", "encode")


def test_other_instances_of_the_class_are_not_followed():
    model, other = Encoder(), Encoder()
    tracker = ModuleTracker({"one": model, "other": other}, strict=True)
    tracker.methods(model, "encode")
    assert asked(lambda: train(other.encode), tracker) == [
        "addmm forward: other other.l",
        "tanh None:",
        "tanh_backward backward:",
        "mm backward: other other.l",
    ]


def test_both_of_two_instances_are_followed_when_both_are_given(plain_classes):
    model, other = Encoder(), Encoder()
    tracker = ModuleTracker(strict=True)
    first = tracker.methods(model, "encode")
    tracker.methods(other, "encode")
    with tracker:
        assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
        lines = [each.replace("Encoder", "Encoder#1") for each in ENCODE_FORWARD + ENCODE_BACKWARD]
        assert asked(lambda: train(other.encode), tracker) == lines
        first.remove()
        assert asked(lambda: train(other.encode), tracker) == lines
    assert Encoder.encode.__code__.co_filename == __file__


def test_copy_and_pickle_of_a_model_inside_the_context_are_models_of_their_own():
    model = Encoder()
    tracker = ModuleTracker(model, strict=True)
    tracker.methods(model, "encode")
    with tracker:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)]
        for each in copies:
            assert each.encode.__self__ is each
            assert "encode" not in each.__dict__
            lines = asked(lambda each=each: each.encode(torch.ones(2, 4)), tracker)
            assert lines[1] == "tanh None:"
        with torch.no_grad():
            model.l.weight.zero_()
            model.l.bias.zero_()
        assert model.encode(torch.ones(2, 4)).abs().sum() == 0
        assert copies[0].encode(torch.ones(2, 4)).abs().sum() > 0
    assert [each.encode(torch.ones(2, 4)).shape for each in copies] == [(2, 4)] * 3


class Louder(Encoder):
    """Overrides a method and calls the one it overrides."""

    def encode(self, x):
        return super().encode(x).mul(2)


LOUDER_LINES = [
    "addmm forward: Louder Louder.encode() Louder.l",
    "tanh forward: Louder Louder.encode()",
    "mul forward: Louder Louder.encode()",
    "mul backward: Louder Louder.encode()",
    "tanh_backward backward: Louder Louder.encode()",
    "mm backward: Louder Louder.encode() Louder.l",
]


def test_method_that_calls_the_one_it_overrides_is_one_scope():
    model = Louder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    assert asked(lambda: train(model.encode), tracker) == LOUDER_LINES


def test_method_that_calls_the_one_it_overrides_beside_an_instance_of_that_class(plain_classes):
    """The overridden one is wrapped too, for the other instance."""
    model, other = Louder(), Encoder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(other, "encode")
    tracker.methods(model, "encode")
    with tracker:
        assert asked(lambda: train(model.encode), tracker) == LOUDER_LINES
        assert asked(lambda: train(other.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
    assert {each.encode.__code__.co_filename for each in (Louder, Encoder)} == {__file__}


class Inherits(Encoder):
    """Has its methods from its parent."""


def test_inherited_method_is_followed_and_inherited_again():
    model = Inherits()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    with tracker:
        lines = [each.replace("Encoder", "Inherits") for each in ENCODE_FORWARD + ENCODE_BACKWARD]
        assert asked(lambda: train(model.encode), tracker) == lines
    assert "encode" not in vars(Inherits)


def test_method_that_stands_in_the_instance_is_followed_and_put_back():
    model = Encoder()
    model.encode = own_method = lambda x: model.l(x).tanh()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    with tracker:
        assert asked(lambda: train(model.encode), tracker) == ENCODE_FORWARD + ENCODE_BACKWARD
    assert model.__dict__["encode"] is own_method


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    @staticmethod
    def squash(x):
        return x.tanh()

    @classmethod
    def scale(cls, x):
        assert cls is Static
        return x.mul(2)


def test_static_and_class_methods_are_followed_and_put_back():
    model = Static()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "squash", "scale")
    assert asked(lambda: model.scale(model.squash(torch.ones(2, 4))), tracker) == [
        "tanh forward: Static Static.squash()",
        "mul forward: Static Static.scale()",
    ]
    assert isinstance(vars(Static)["squash"], staticmethod)
    assert isinstance(vars(Static)["scale"], classmethod)
    assert {"squash", "scale"}.isdisjoint(model.__dict__)
    assert model.scale(model.squash(torch.zeros(2, 4))).sum() == 0


def test_method_keeps_its_signature_and_what_it_returns():
    class Documented(nn.Module):
        def encode(self, x, *, twice: bool = False):
            """Says something."""
            return (x, twice)

    model = Documented()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    with tracker:
        assert model.encode(1, twice=True) == (1, True)
        assert (model.encode.__name__, model.encode.__doc__) == ("encode", "Says something.")
        assert Documented.encode(model, 2) == (2, False)


class Fails(Encoder):
    """Raises in the middle of a method."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.__dict__["error"] = error

    def encode(self, x):
        x = self.l(x)
        raise self.error


@pytest.mark.parametrize("error", [ValueError("on purpose"), KeyboardInterrupt()], ids=["", "interrupt"])
def test_exception_in_a_method_closes_it_and_is_the_users(error):
    model, other = Fails(error), M()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode", "generate", "forward")
    with tracker:
        for call in (model.encode, model.generate, model.forward, model):
            with pytest.raises(type(error)) as raised:
                call(torch.ones(2, 4))
            assert raised.value is error
            if not isinstance(error, KeyboardInterrupt):
                assert tracker.parents == {GLOBAL}
        assert asked(lambda: train(other), tracker) == M_TRAINS


def test_methods_of_replicas_run_on_the_replica():
    """d11b: a method of the module that was given is followed in its replicas too, on their own parameters."""
    model = Encoder()
    tracker = ModuleTracker(model, strict=True)
    tracker.methods(model, "encode")
    with tracker:
        for replica in replicas_of(model, 2):
            assert replica.encode.__self__ is replica
            assert "encode" not in replica.__dict__
            assert asked(lambda replica=replica: replica.encode(torch.ones(2, 4)), tracker) == [
                "addmm forward: Encoder Encoder.encode() Encoder.l",
                "tanh forward: Encoder Encoder.encode()",
            ]
        lines = [
            "addmm forward: Encoder Encoder.encode() Encoder.l",
            "tanh forward: Encoder Encoder.encode()",
            "mul forward: Encoder",
        ]
        assert asked_in_threads(tracker, replicas_of(model, 2)) == [lines, lines]


def test_forward_called_directly_counts_as_a_call():
    model = Encoder()
    numbers: list[Any] = []
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "forward")
    lines = [
        "addmm forward: Encoder Encoder.l",
        "tanh forward: Encoder",
        "mul forward: Encoder",
        "mul backward: Encoder",
        "tanh_backward backward: Encoder",
        "mm backward: Encoder Encoder.l",
    ]
    with tracker:
        assert asked(lambda: train(model.forward), tracker) == lines
        model.zero_grad()
        assert asked(lambda: train(model), tracker) == lines
        model.zero_grad()
        model.l.register_forward_pre_hook(lambda *_: numbers.append(tracker.call.nth))
        train(model)
        train(model.forward)
        train(model)
    assert numbers == [0, 1, 2]


def test_methods_of_a_fully_compiled_model_make_no_break(dynamo):
    model = Encoder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode", "forward")
    with tracker:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        train(compiled)
        assert compiled_graphs() == (1, {})
        lines = asked(lambda: train(compiled), tracker)
        assert compiled_graphs() == (1, {})
    assert lines == [
        "addmm forward: Encoder",
        "tanh forward: Encoder",
        "mul forward: Encoder",
        "mul backward: Encoder",
        "tanh_backward backward: Encoder",
        "mm backward: Encoder",
    ]


def test_compiled_method_of_a_followed_model_makes_no_break(dynamo):
    model = Encoder()
    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    with tracker:
        compiled = torch.compile(model.encode, backend="aot_eager", fullgraph=True)
        train(compiled)
        train(compiled)
        assert compiled_graphs() == (1, {})


def test_user_hooks_in_methods_hear_modules_only():
    model = Encoder()
    heard: list[tuple[str, Any, tuple[str, ...]]] = []

    def hear(kind: str) -> Callable[..., None]:
        return lambda module, *_: heard.append((kind, type(module).__name__, tracker.stack))

    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "encode")
    tracker.register_user_hooks(hear("pre_fw"), hear("post_fw"), hear("pre_bw"), hear("post_bw"))
    x = torch.ones(2, 4, requires_grad=True)
    with tracker:
        output = model.encode(x)
        output.sum().backward()
    inside = ("Encoder", "Encoder.encode()", "Encoder.l")
    assert [each for each in heard if each[1] == "Linear"] == [
        ("pre_fw", "Linear", inside),
        ("post_fw", "Linear", inside),
        ("pre_bw", "Linear", inside),
        ("post_bw", "Linear", inside),
    ]
    assert "NoneType" not in {name for _, name, _ in heard}  # None is for modules that have died
    counts = {
        kind: [each for each in heard if each[:2] == (kind, "Encoder")] for kind in ("pre_fw", "pre_bw")
    }
    assert len(counts["pre_fw"]) == len(counts["pre_bw"])  # a call is heard of in both, or in neither


def test_user_hooks_hear_of_no_scope():
    model = M()
    heard: list[tuple[str, str]] = []

    def hear(kind: str) -> Callable[..., None]:
        return lambda module, *_: heard.append((kind, type(module).__name__))

    with ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(hear("pre_fw"), hear("post_fw"), hear("pre_bw"), hear("post_bw"))
        x = torch.ones(2, 4, requires_grad=True)
        with tracker.scope("loop"):
            with tracker.scope("loss"):
                loss = loss_of(model(x).mul(2))
            loss.backward()
    assert heard == [
        ("pre_fw", "M"),
        ("pre_fw", "Linear"),
        ("post_fw", "Linear"),
        ("post_fw", "M"),
        ("pre_bw", "M"),
        ("pre_bw", "Linear"),
        ("post_bw", "M"),  # both end at one node, and the input of both needs a gradient: outer before inner
        ("post_bw", "Linear"),
    ]


def test_user_hooks_hear_of_a_forward_that_is_called_directly():
    """It counts as a call of the module."""
    model = M()
    heard: list[tuple[str, str]] = []

    def hear(kind: str) -> Callable[..., None]:
        return lambda module, *_: heard.append((kind, type(module).__name__))

    tracker = ModuleTracker(strict=True)
    tracker.methods(model, "forward")
    with tracker:
        tracker.register_user_hooks(hear("pre_fw"), hear("post_fw"), hear("pre_bw"), hear("post_bw"))
        train(model.forward, torch.ones(2, 4, requires_grad=True))
        directly = list(heard)
        heard.clear()
        train(model, torch.ones(2, 4, requires_grad=True))
    assert directly == heard
