"""What trackers hold, and what they leave behind."""

import gc
import sys
import threading
import tracemalloc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn

from helpers.ours import assert_bounded, objects_of_ours, tracker_sizes
from helpers.tracker_runs import (
    BOTH_OF_TORCH,
    DISTRIBUTED,
    MARKS,
    TORCHS,
    Checkpointed,
    M,
    loss_of,
    of_torch,
    train,
)
from modtrace import ModuleTracker
from modtrace.collect.scopes import process
from zoo import Recursive

pytestmark = MARKS


Step = Callable[[ModuleTracker], object]

INPUT = torch.ones(2, 4, requires_grad=True)


def forward(model: nn.Module) -> Step:
    return lambda tracker: model(INPUT)


def forward_without_gradients(model: nn.Module) -> Step:
    def step(tracker: ModuleTracker) -> None:
        with torch.no_grad():
            model(INPUT)

    return step


def training(model: nn.Module) -> Step:
    def step(tracker: ModuleTracker) -> None:
        train(model, INPUT)
        model.zero_grad()

    return step


def training_that_never_clears_gradients(model: nn.Module) -> Step:
    """All of them are one step, as in a benchmark that has no optimizer."""
    return lambda tracker: train(model, INPUT)


def training_with_a_scope_in_each_step(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters())

    def step(tracker: ModuleTracker) -> None:
        optimizer.zero_grad()
        output = model(INPUT)
        with tracker.scope("loss"):
            loss = loss_of(output)
        loss.backward()
        optimizer.step()

    return step


def training_without_modules(model: nn.Module) -> Step:
    def step(tracker: ModuleTracker) -> None:
        with tracker.scope("loss"):
            loss = loss_of(INPUT)
        loss.backward()
        INPUT.grad = None

    return step


def held() -> Counter[str]:
    """The objects of ours that live when the spans of dead graphs are let go."""
    tracker = process.current()
    assert tracker is not None
    for log in tracker.logs.all:
        log.prune_at = 0
        log.prune()
    return objects_of_ours() + tracker_sizes()


def held_bytes() -> int:
    """What lives of what our code has allocated."""
    gc.collect()
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/modtrace/*")])
    return sum(each.size for each in traces.statistics("filename"))


@pytest.mark.parametrize(
    ("make_step", "model", "hooked", "scoped"),
    [
        (forward, M, False, False),
        (forward, M, True, False),
        (forward_without_gradients, M, False, False),
        (training, M, False, False),
        (training, M, True, True),
        (training, Checkpointed, False, False),
        (training_that_never_clears_gradients, M, False, False),
        (training_with_a_scope_in_each_step, M, False, True),
        (training_without_modules, M, False, True),
    ],
)
def test_hundreds_of_steps_hold_nothing_more(make_step, model, hooked, scoped):
    """d15, d15b, d15d, AC 20 steps x 4 blocks memory"""
    step = make_step(model())
    counts: list[Counter[str]] = []
    sizes: list[int] = []
    with ModuleTracker(strict=True) as tracker, tracker.scope("loop") if scoped else nullcontext():
        if hooked:
            tracker.register_user_hooks(*[lambda *_: None] * 4)
        tracemalloc.start()
        try:
            for repeats in (70, 70, 70):
                for _ in range(repeats):
                    step(tracker)
                counts.append(held())
                sizes.append(held_bytes())
        finally:
            tracemalloc.stop()
        assert not INPUT._backward_hooks
    assert_bounded(counts, slack=64)  # what is dead is looked for each 64 calls
    assert sizes[-1] - sizes[0] <= 100_000
    INPUT.grad = None


def test_spans_are_let_go_while_forwards_go_on():
    """Without any help: their number stays below a bound however many there are."""
    model = nn.Sequential(M(), M())
    most = 0
    with ModuleTracker(strict=True):
        tracker = process.current()
        for _ in range(400):
            model(torch.ones(2, 4))
            most = max(most, len(tracker.logs.current.spans))
    assert most < 100


def test_forwards_whose_outputs_are_kept_hold_nothing_when_those_are_gone():
    """d15"""
    model = nn.Sequential(M(), M())
    with ModuleTracker(strict=True):
        before = held()
        outputs = [model(torch.ones(2, 4)) for _ in range(200)]
        outputs.clear()
        for _ in range(70):
            model(torch.ones(2, 4))
        assert_bounded([before, held()], slack=64)


def test_steps_of_checkpointed_blocks_hold_no_tensor():
    """AC 20 steps x 4 blocks memory"""
    step = training(Checkpointed(4))
    tensors: list[int] = []
    with ModuleTracker(strict=True) as tracker:
        for _ in range(2):
            for _ in range(10):
                step(tracker)
            gc.collect()
            tensors.append(sum(1 for each in gc.get_objects() if type(each) is torch.Tensor))
    assert tensors[1] == tensors[0]


def test_later_steps_with_a_leaf_input_cost_no_more_python_calls_than_earlier_ones():
    """d15d: nothing is quadratic."""
    step = training(M())
    calls: list[int] = []

    def count(frame, event, arg) -> None:
        calls[-1] += event == "call"

    with ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(*[lambda *_: None] * 4)
        for _ in range(192):
            calls.append(0)
            sys.setprofile(count)
            try:
                step(tracker)
            finally:
                sys.setprofile(None)
    assert sum(calls[128:]) <= 1.05 * sum(calls[64:128])  # it is looked now and then what can be let go


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
