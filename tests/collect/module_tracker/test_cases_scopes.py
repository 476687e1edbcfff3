"""Code that the user has named by `tracker.scope`."""

import threading
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.asked import GLOBAL
from helpers.tracker_runs import (
    M_BACKWARD,
    M_FORWARD,
    M_TRAINS,
    MARKS,
    TIMEOUT_S,
    Checkpointed,
    M,
    asked,
    checkpointed_lines,
    compiled_graphs,
    in_threads,
    loss_of,
    train,
)
from modtrace import ModuleTracker
from modtrace.errors import MisuseError
from zoo import Twice

pytestmark = MARKS


# Scopes.

LOSS_LINES = [
    *M_FORWARD,
    "sub forward: loss",
    "pow forward: loss",
    "pow backward: loss",
    *M_BACKWARD,
]


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
            assert tracker.parents == {GLOBAL, "loop"}
            optimizer.step()
            assert tracker.parents == {GLOBAL, "loop"}
    assert numbers == [("Twice.layer", "layer", nth, step) for step in range(3) for nth in range(4)]


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
