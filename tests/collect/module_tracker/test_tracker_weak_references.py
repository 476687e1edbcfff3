"""What a tracker leaves of weak references is harmless: none of them does anything when its module dies."""

import gc
import weakref

import pytest
import torch
from torch import nn

import modtrace


@pytest.mark.parametrize("contexts", [1, 3])
def test_no_weak_reference_with_a_callback_is_left_on_a_module(contexts):
    """Two on one object, and a collection while it dies, end in a segmentation fault of CPython 3.11."""
    model = nn.Sequential(nn.Linear(2, 2))
    before = _with_callbacks(model)  # Dynamo, once it is imported, has some of its own on every module
    gc.collect()
    gc.disable()
    try:
        for _ in range(contexts):
            with modtrace.ModuleTracker(strict=True) as tracker:
                model(torch.ones(1, 2)).sum().backward()
            with modtrace.record(model, strict=True):
                model(torch.ones(1, 2))
        assert _with_callbacks(model) == before
    finally:
        gc.enable()
    assert tracker.get_known_fqn(model[0]) == "Sequential.0"


def _with_callbacks(model):
    refs = [ref for module in model.modules() for ref in weakref.getweakrefs(module)]
    return {id(ref) for ref in refs if ref.__callback__ is not None}


def test_exception_of_a_hook_is_not_kept():
    class Batch:
        pass

    def fail(module, gradients):
        raise ValueError("from a hook")

    def step():
        batch = Batch()
        kept.append(weakref.ref(batch))
        model(torch.ones(1, 2)).sum().backward()

    model = nn.Linear(2, 2)
    kept = []
    with modtrace.ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(pre_bw_hook=fail)
        with pytest.raises(ValueError, match="from a hook"):
            step()
        gc.collect()
        assert kept[0]() is None


@pytest.mark.parametrize("strict", [True, False])
def test_exception_of_a_hook_that_leaves_its_tracker_is_raised(strict):
    def leave(module, gradients):
        tracker.clear_user_hooks()
        tracker.__exit__()
        raise ValueError("from a hook")

    tracker = modtrace.ModuleTracker(strict=strict)
    tracker.register_user_hooks(pre_bw_hook=leave)
    tracker.__enter__()
    with pytest.raises(ValueError, match="from a hook"):
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()


def test_strictness_leaves_with_the_tracker_that_asked_for_it():
    from modtrace.collect.scopes import process

    with modtrace.ModuleTracker():
        with modtrace.ModuleTracker(strict=True):
            assert process.current().subscribers.strict
        assert not process.current().subscribers.strict


class PassesBeside(nn.Module):
    """A dropout in evaluation beside another use of the same tensor, as residual blocks have it."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.drop = nn.Linear(2, 2), nn.Linear(2, 2), nn.Dropout()

    def forward(self, x):
        h = self.first(x)
        r = self.other(h)
        return self.drop(h) + r


def test_gradient_that_a_module_passes_on_is_its_own():
    model = PassesBeside().eval()
    told = []
    with modtrace.ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(
            pre_bw_hook=lambda module, gradients: told.append(("pre", type(module).__name__, *gradients)),
            post_bw_hook=lambda module, gradients: told.append(("post", type(module).__name__, *gradients)),
        )
        model(torch.ones(1, 2)).sum().backward()
    of_dropout = [
        (kind, *(each.tolist() for each in found)) for kind, name, *found in told if name == "Dropout"
    ]
    assert of_dropout == [("pre", [[1.0, 1.0]]), ("post", [[1.0, 1.0]])]


def test_module_whose_result_nobody_uses_has_no_backward():
    """A probe of a tensor that is used otherwise."""
    linear, probe, told = nn.Linear(2, 2), nn.Identity(), []
    with modtrace.ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(pre_bw_hook=lambda module, gradients: told.append(type(module).__name__))
        h = linear(torch.ones(1, 2))
        loss = h.sum()
        probe(h)
        loss.backward()
    assert told == ["Linear"]


def test_gradient_of_an_input_is_what_came_before_the_hooks_of_the_tensor():
    linear, told = nn.Linear(2, 2), []
    x = torch.ones(1, 2, requires_grad=True) * 1
    x.register_hook(lambda gradient: gradient * 100)
    with modtrace.ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(post_bw_hook=lambda module, gradients: told.append(gradients))
        linear(x).sum().backward()
    assert told[0][0].equal(linear.weight.sum(0, keepdim=True))


def test_module_that_a_tensor_hook_calls_is_no_recompute():
    linear, metric, told = nn.Linear(2, 2), nn.Linear(2, 2), []
    with modtrace.ModuleTracker(strict=True) as tracker:
        tracker.register_user_hooks(lambda module, args: told.append((tracker.phase, tracker.current)))
        y = linear(torch.ones(1, 2))
        y.register_hook(lambda gradient: (metric(gradient), None)[1])
        y.sum().backward()
    assert told == [("forward", "Linear"), ("backward", "Linear#1")]
