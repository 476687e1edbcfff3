"""A module tracker leaves nothing behind, however its context ends, and changes nothing of what runs inside."""

import gc
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.graph
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._pytree import tree_leaves

import modtrace
from collect.recorder.test_bit_identity import train_gpt
from collect.values.test_values_bit_identity import (
    autocast,
    create_graph,
    func_grad,
    fused_adamw_after_micro_batches,
)
from helpers.ours import objects_of_ours
from helpers.twins import outcome, state
from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.collect.backward.graph_watch import GraphWatch
from modtrace.collect.scopes import process
from modtrace.torch_internals.deep_graphs import ReleasedInTurn

OURS = os.path.dirname(modtrace.__file__) + os.sep
HOOKS = ("pre_fw_hook", "post_fw_hook", "pre_bw_hook", "post_bw_hook")


def installed() -> dict[str, Any]:
    """Everything global that a hook could stand in."""
    found: dict[str, Any] = {"engine": (torch.autograd._engine_run_backward, _engine_entry())}
    for place in (module_hooks, optimizer_hooks):
        for name, value in vars(place).items():
            if name.startswith("_global_"):
                found[name] = list(value) if hasattr(value, "__iter__") else value
    return found


def _engine_entry() -> Any:
    return torch.autograd.graph._engine_run_backward


class Stumble(torch.autograd.Function):
    """Does nothing, but has something called in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: "Trap") -> Tensor:
        ctx.trap = trap
        trap.at("forward")
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.trap.at("backward")
        return gradient, None


class Trap:
    """Raises once, at the place that it is set for."""

    def __init__(self, place: str, error: type[BaseException]) -> None:
        self.place = place
        self.error = error
        self.is_set = False

    def at(self, place: str) -> None:
        if self.is_set and place == self.place:
            self.is_set = False
            raise self.error("on purpose")

    def hook(self, kind: str) -> Callable[..., None]:
        """A user hook, which may raise for a module in the middle: with calls open around it."""

        def hook(module: nn.Module | None, *args: Any) -> None:
            if type(module) is Middle:
                self.at(kind)

        return hook


class Middle(nn.Module):
    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.__dict__["trap"] = trap

    def forward(self, x: Tensor) -> Tensor:
        return Stumble.apply(self.layer(x), self.trap)


class Model(nn.Module):
    """Has a method besides its forward, and its trap in a module that has one before it and one behind it."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.parts = nn.Sequential(Middle(trap), nn.Softplus())
        self.last = nn.Linear(4, 1)
        self.trained = nn.Parameter(
            torch.ones(1)
        )  # in no graph: a graph that is kept needs its weights as they were

    def encode(self, x: Tensor) -> Tensor:
        return self.parts(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x).relu_())


PLAIN_ENCODE = Model.encode

#: What a step looks like to who asks: in the middle of the forward, and in the middle of the backward.
RIGHT = [
    ("forward", ("Model", "Model.encode()", "Model.parts", "Model.parts.0")),
    ("backward", ("Model", "Model.encode()", "Model.parts", "Model.parts.0")),
]


class Asks:
    """Asks the tracker in the middle of the model, in forward and in backward."""

    def __init__(self, model: Model, tracker: modtrace.ModuleTracker) -> None:
        self._model = model
        self._tracker = tracker
        self.answers: list[tuple[str | None, tuple[str, ...]]] = []

    def __enter__(self) -> list[Any]:
        trap = self._model.parts[0].trap
        self._at = trap.at

        def at(place: str) -> None:
            if place not in HOOKS:
                where = self._tracker.where()
                self.answers.append((where.phase, where.stack))
            self._at(place)

        trap.at = at
        return self.answers

    def __exit__(self, *error: Any) -> None:
        self._model.parts[0].trap.at = self._at


def step(model: Model, keep: list[Any]) -> Tensor:
    """A forward, a backward through a graph that stays, and an optimizer step; `keep` gets what there was."""
    x = torch.ones(2, 4, requires_grad=True)
    loss = model(x).square().sum()
    keep += [x, loss]
    loss.backward(retain_graph=True)
    model.trained.grad = torch.ones(1)
    torch.optim.SGD([model.trained], lr=0.1).step()
    return loss


def tensors_of(model: nn.Module, keep: list[Any]) -> list[Tensor]:
    return [*model.parameters(), *(each for each in keep if isinstance(each, Tensor))]


def nodes_below(tensors: list[Tensor]) -> list[Any]:
    pending = [each.grad_fn for each in tensors if each.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [below for below, _ in node.next_functions if below is not None]
    return list(seen)


@contextmanager
def calls_of_ours() -> Iterator[list[str]]:
    """The functions of modtrace that are called inside."""
    called: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            called.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(before)


def assert_clean(model: Model, keep: list[Any], before: dict[str, Any]) -> None:
    """Nothing of ours is in torch, in the model or in its graphs, which are alive."""
    assert installed() == before
    assert process.current() is None
    assert Model.__dict__["encode"] is PLAIN_ENCODE
    for each in model.modules():
        assert not {"encode", "forward", "__call__"} & set(vars(each))
        assert not [*each._forward_hooks, *each._forward_pre_hooks, *each._backward_hooks]
    tensors = tensors_of(model, keep)
    for each in tensors:
        assert not each._backward_hooks
        assert not each._post_accumulate_grad_hooks
    for left in (each for node in nodes_below(tensors) for each in node.metadata.values()):
        if type(left) is not ReleasedInTurn:  # which refers to the nodes below, as the node itself does
            assert type(left) is GraphWatch  # torch has no way to take it out, but it is empty
            assert [each for each in gc.get_referents(left) if each is not None] == [GraphWatch]
    with calls_of_ours() as called:
        for loss in tensors:
            if loss.grad_fn is not None:
                torch.autograd.grad(loss.sum(), model.first.weight, retain_graph=True)
        model(torch.ones(2, 4)).sum().backward()
    assert called == []


def hooked_tracker(model: Model, trap: Trap) -> modtrace.ModuleTracker:
    tracker = modtrace.ModuleTracker(strict=True)
    tracker.register_user_hooks(**{kind: trap.hook(kind) for kind in HOOKS})
    tracker.methods(model, "encode")
    return tracker


def run_into(tracker: Any, model: Model, trap: Trap, keep: list[Any], inside: bool) -> None:
    """A step that succeeds, then one that fails; the error leaves the context unless it is caught `inside`."""
    with tracker:
        step(model, keep)
        trap.is_set = True
        if not inside:
            step(model, keep)
            return
        with suppress(trap.error):
            step(model, keep)
        assert not trap.is_set, "nothing was raised"
        assert (tracker.parents, tracker.is_bw, tracker.phase) == ({"Global"}, False, None)
        with Asks(model, tracker) as answers:
            step(model, keep)
        assert answers == RIGHT


WAYS = pytest.mark.parametrize("inside", [True, False], ids=["caught inside", "leaves the context"])
ERRORS = pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
PLACES = pytest.mark.parametrize("place", ["forward", "backward", *HOOKS])


def stumble(place: str, error: type[BaseException], inside: bool) -> tuple[Any, Model, list[Any]]:
    """Runs into the error, and gives a weak reference to the tracker, the model and its living graphs."""
    trap = Trap(place, error)
    model = Model(trap)
    keep: list[Any] = []
    before = installed()
    tracker = hooked_tracker(model, trap)
    try:
        run_into(tracker, model, trap, keep, inside)
    except error as raised:
        assert not inside
        assert str(raised) == "on purpose"
        raised.__traceback__ = None
    assert not trap.is_set, "nothing was raised"
    assert (tracker.parents, tracker.stack, tracker.phase) == ({"Global"}, (), None)
    assert not tracker.is_bw
    assert_clean(model, keep, before)
    with tracker, Asks(model, tracker) as answers:
        step(model, keep)
    assert answers == RIGHT
    assert_clean(model, keep, before)
    return weakref.ref(tracker), model, keep


@WAYS
@ERRORS
@PLACES
def test_after_an_exception_nothing_is_left_and_the_tracker_works_again(place, error, inside):
    before = objects_of_ours()
    tracker, model, keep = stumble(place, error, inside)
    left = objects_of_ours() - before
    assert len(keep) > 2 and model is not None  # graphs are alive
    assert tracker() is None
    assert set(left) <= {"GraphWatch"}  # as long as the graph lives
    keep.clear()
    assert objects_of_ours() - before == Counter()


def test_backward_after_the_exit_runs_nothing_of_ours():
    model = Model(Trap("nowhere", ValueError))
    seen: list[str] = []
    with modtrace.ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(
            pre_bw_hook=lambda *args: seen.append("pre_bw"), post_bw_hook=lambda *args: seen.append("post_bw")
        )
        loss = model(torch.ones(2, 4)).sum()
    with calls_of_ours() as called:
        loss.backward()
    assert (called, seen) == ([], [])


def test_after_a_normal_exit_nothing_is_left():
    before_all = objects_of_ours()
    trap = Trap("nowhere", ValueError)
    model = Model(trap)
    keep: list[Any] = []
    before = installed()
    tracker = hooked_tracker(model, trap)
    for _ in range(2):
        with tracker, Asks(model, tracker) as answers:
            step(model, keep)
            with tracker.scope("loop"):
                model.encode(torch.ones(2, 4))
        assert answers[:2] == RIGHT
        assert tracker.parents == {"Global"}
        assert_clean(model, keep, before)
    alive = weakref.ref(tracker)
    del tracker
    assert set(objects_of_ours() - before_all) <= {"GraphWatch"}  # as long as the graph lives
    assert alive() is None
    keep.clear()
    assert objects_of_ours() - before_all == Counter()


def test_tracker_is_freed_by_its_last_reference_alone():
    model = Model(Trap("nowhere", ValueError))
    tracker = modtrace.ModuleTracker(model, strict=True)
    gc.collect()
    gc.disable()
    try:
        with tracker:
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
        alive = weakref.ref(tracker)
        del tracker
        assert alive() is None
    finally:
        gc.enable()


def test_no_tensor_gets_a_hook_while_the_context_lasts():
    trap = Trap("nowhere", ValueError)
    model = Model(trap)
    keep: list[Any] = []
    with hooked_tracker(model, trap):
        for _ in range(3):
            step(model, keep)
            assert [each for each in tensors_of(model, keep) if each._backward_hooks] == []
            assert [each for each in tensors_of(model, keep) if each._post_accumulate_grad_hooks] == []


# Sharing.


def test_tracker_inside_a_recording_shares_its_hooks():
    trap = Trap("nowhere", ValueError)
    model = Model(trap)
    with modtrace.record(model, strict=True) as rec:
        recording = installed()
        assert len(recording["_global_forward_pre_hooks"]) == len(recording["_global_forward_hooks"]) == 1
        with hooked_tracker(model, trap) as tracker, Asks(model, tracker) as answers:
            assert installed() == recording
            step(model, [])
            assert installed() == recording
        assert answers == RIGHT
        assert installed() == recording
        assert tracker.parents == {"Global"}
        step(model, [])
    assert [row["kind"] for row in rec.table("steps").to_pylist()] == ["train", "train"]
    assert rec.meta.marks == ()


def test_recording_inside_a_tracker_shares_its_hooks():
    model = Model(Trap("nowhere", ValueError))
    with modtrace.ModuleTracker(strict=True) as tracker:
        tracking = installed()
        with modtrace.record(model, strict=True, values=None):
            assert installed()["_global_forward_hooks"] == tracking["_global_forward_hooks"]
            assert installed()["_global_forward_pre_hooks"] == tracking["_global_forward_pre_hooks"]
            step(model, [])
        assert installed() == tracking
        tracker.methods(model, "encode")
        with Asks(model, tracker) as answers:
            step(model, [])
        assert answers == RIGHT


@pytest.mark.parametrize("first_ends", [True, False], ids=["the first ends first", "the second ends first"])
def test_two_trackers_share_their_hooks_whichever_ends_first(first_ends):
    before = installed()
    model = Model(Trap("nowhere", ValueError))
    first, second = modtrace.ModuleTracker(strict=True), modtrace.ModuleTracker(strict=True)
    ends, stays = (first, second) if first_ends else (second, first)
    stays.methods(model, "encode")
    with ExitStack() as stays_open, ExitStack() as ends_open:
        for each in (first, second):
            (ends_open if each is ends else stays_open).enter_context(each)
        tracking = installed()
        assert len(tracking["_global_forward_pre_hooks"]) == len(tracking["_global_forward_hooks"]) == 1
        ends_open.close()
        assert installed() == tracking
        with Asks(model, stays) as answers:
            step(model, [])
        assert answers == RIGHT
    assert installed() == before


# What runs inside is the same with the tracker and without it.


class Looking:
    """A tracker with user hooks of all kinds, which look at everything they are given and keep nothing."""

    def __init__(self, **options: Any) -> None:
        self.tracker = modtrace.ModuleTracker(strict=True, additions=True)
        self.called: Counter[str] = Counter()
        self.tracker.register_user_hooks(**{kind: self._hook(kind) for kind in HOOKS}, **options)

    def _hook(self, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module | None, *args: Any) -> None:
            for each in tree_leaves(args):
                assert each is None or id(each)
            assert "Global" in self.tracker.parents
            self.called[kind] += 1

        return hook

    def __enter__(self) -> "Looking":
        self.tracker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.tracker.__exit__(*error)


@contextmanager
def watched(values: str | None, **options: Any) -> Iterator[Looking]:
    """A tracker with all user hooks; beside a recording of values, if any are named."""
    with ExitStack() as stack:
        if values is not None:
            recording = modtrace.record(strict=True, values=values)
            stack.enter_context(recording)
        looking = stack.enter_context(Looking(**options))
        yield looking
    if values is not None:
        assert recording.meta.marks == ()


class Meets(nn.Module):
    """Gives its input to two modules, and one of its parameters to both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x) * x


def gradients_that_meet() -> Any:
    """The engine adds them in place where nobody else holds them."""
    model = nn.Sequential(Meets(), nn.Identity(), Meets())
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward()
    model(x.sin()).sum().backward()
    return [x.grad, state(model)]


def gradient_of_a_leaf() -> Any:
    """`AccumulateGrad` takes the gradient as it is where nobody else holds it, and else copies it."""
    model = Meets().requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.randn(3, 4, requires_grad=True)
    (model(x) + nn.Tanh()(y)).sum().backward()
    return [x.grad, y.grad]


RUNS = {
    "GPT": train_gpt,
    "GPT, reentrant checkpoints": partial(train_gpt, reentrant=True),
    "GPT, non-reentrant checkpoints": partial(train_gpt, reentrant=False),
    "GPT, fused AdamW": fused_adamw_after_micro_batches,
    "autocast to bfloat16": autocast,
    "gradient of a gradient": create_graph,
    "torch.func.grad": func_grad,
    "gradients that meet": gradients_that_meet,
    "gradient of a leaf": gradient_of_a_leaf,
}
EVERY_RUN = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())


@EVERY_RUN
def test_results_and_generators_are_the_same_bits(run):
    """With hooks that want all there is, and beside a recording of values."""
    plain = outcome(run)
    alone = watched(None, with_kwargs=True, with_slots=True)
    with alone as looking:
        called = looking.called
        assert outcome(run) == plain
    assert called["pre_fw_hook"] == called["post_fw_hook"] > 0
    if run is not func_grad:  # its backwards do not go through the engine's entry
        assert called["pre_bw_hook"] == called["post_bw_hook"] > 0
    assert outcome(run, watched("stats")) == plain


@EVERY_RUN
def test_modes_of_the_user_see_the_same_ops_and_functions(run):
    def seen(context: Any, *, inside: bool) -> tuple[list[str], list[str]]:
        """What modes see that are entered inside of the context, or around it."""
        ops, functions = SeesOps(), SeesFunctions()
        torch.manual_seed(0)
        with ExitStack() as stack:
            for each in (context, ops, functions) if inside else (ops, functions, context):
                stack.enter_context(each)
            run()
        return ops.seen, functions.seen

    plain = seen(nullcontext(), inside=True)
    assert min(map(len, plain)) > 10
    assert seen(watched(None), inside=True) == plain
    assert seen(watched("stats"), inside=True) == plain
    assert seen(watched("stats"), inside=False) == plain
