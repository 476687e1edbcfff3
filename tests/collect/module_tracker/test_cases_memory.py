"""What trackers hold, and what they leave behind."""

import gc
import sys
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn
from torch.nn.modules import module as module_globals

from helpers.tracker_runs import (
    BOTH_OF_TORCH,
    DISTRIBUTED,
    M_TRAINS,
    MARKS,
    MOST_OBJECTS,
    TORCHS,
    Checkpointed,
    M,
    asked,
    checkpointed_lines,
    held_objects,
    hold_little,
    memory_traced,
    of_torch,
    train,
)
from modtrace import ModuleTracker
from zoo import Recursive

pytestmark = MARKS


def global_hooks() -> int:
    return len(module_globals._global_forward_pre_hooks) + len(module_globals._global_forward_hooks)


@pytest.mark.parametrize(
    "needs_grad",
    [pytest.param(True, id="with grad"), pytest.param(False, id="without grad", marks=pytest.mark.soak)],
)
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
    assert M.forward.__code__.co_filename == sys.modules[M.__module__].__file__


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


def test_checkpointed_block_is_recomputed_under_its_name():
    assert checkpointed_lines() == [
        "addmm forward: Checkpointed Checkpointed.blocks.0 Checkpointed.blocks.0.l",
        "relu forward: Checkpointed Checkpointed.blocks.0",
        "addmm recompute: Checkpointed Checkpointed.blocks.0 Checkpointed.blocks.0.l",
        "relu recompute: Checkpointed Checkpointed.blocks.0",
        "threshold_backward backward: Checkpointed Checkpointed.blocks.0",
        "mm backward: Checkpointed Checkpointed.blocks.0 Checkpointed.blocks.0.l",
    ]
