"""Exceptions in forwards, backwards and hooks, in which PyTorch's trackers were tried."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

import modtrace
from helpers.tracker_case_models import (
    LINEAR,
    MARKS,
    linear,
    x,
)
from helpers.tracker_cases import (
    BOTH,
    MOD_TRACKER,
    MODULE_TRACKER,
    Ops,
    left_behind_put_right,
    ours,
    theirs,
)

pytestmark = MARKS


# Exceptions.


class Bad(nn.Module):
    def forward(self, x):
        x.exp()
        raise ValueError("so it goes")


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.bad = Bad()

    def forward(self, x):
        return self.bad(x)


class Catching(nn.Module):
    def __init__(self):
        super().__init__()
        self.bad, self.ok = Bad(), linear()

    def forward(self, x):
        try:
            return self.bad(x)
        except ValueError:
            return self.ok(x.neg())


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient.exp()
        raise ValueError("so it goes")


class FailingBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = linear()

    def forward(self, x):
        return RaisesInBackward.apply(self.l(x))


def raise_in_hook(module, args):
    args[0].exp()
    raise ValueError("so it goes")


def test_an_exception_in_a_users_hook_leaves_nothing():
    """d07c: a hook of a module runs before or inside its call."""
    model, value = nn.Sequential(linear()), x()
    model[0].register_forward_pre_hook(raise_in_hook)
    with ours() as ops:
        with pytest.raises(ValueError, match="so it goes"):
            model(value)
        assert ops.tracker.parents == {"Global"}
        linear()(value)
        assert ops.lines[:1] == [("forward", "Sequential > Sequential.0", "exp")]


def test_a_tracker_entered_in_its_own_context_goes_on_to_the_outermost_end():
    """d07f"""
    model, value = linear(), x()
    tracker = modtrace.ModuleTracker(strict=True)
    with tracker, Ops(tracker) as ops:
        with tracker:
            model(value)
        model(value)
        assert ops.lines == [("forward", "Linear", f"{LINEAR} {LINEAR}")]
    with Ops(tracker) as ops:
        model(value)
    assert ops.lines == [(None, "", LINEAR)]


@pytest.mark.parametrize(("kind", "left"), [(MODULE_TRACKER, True), (MOD_TRACKER, False)])
def test_pytorchs_module_tracker_does_not_come_back_from_exceptions(kind, left):
    """d07, d07b, d07c, d07d, d07e"""
    after = linear()
    with theirs(kind) as ops:
        with pytest.raises(ValueError, match="so it goes"):
            Failing()(x())
        after(x())
        assert ops.at("mm", "forward") == ["Failing Failing.bad Linear" if left else "Linear"]
    with theirs(kind) as ops:
        Catching()(x())
        expected = "Catching Catching.bad Catching.ok" if left else "Catching Catching.ok"
        assert ops.at("mm", "forward") == [expected]
        assert ops.tracker.parents == ({"Global", "Catching.bad"} if left else {"Global"})
    with theirs(kind) as ops:
        after.register_forward_pre_hook(raise_in_hook)
        with pytest.raises(ValueError, match="so it goes"):
            after(x())
        assert ops.tracker.parents == ({"Global", "Linear"} if left else {"Global"})
    with theirs(kind) as ops:
        with pytest.raises(ValueError, match="so it goes"):
            FailingBackward()(x()).sum().backward()
        assert ops.tracker.parents == {"Global", "FailingBackward"}
        assert ops.tracker._has_callback
    with pytest.raises(ValueError, match="so it goes"), theirs(kind) as ops:
        Failing()(x())
    assert ops.tracker.parents == ({"Global", "Failing", "Failing.bad"} if left else {"Global"})


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_leave_hooks_behind_when_entered_in_their_own_context(kind):
    """d07f"""
    tracker = kind()
    with left_behind_put_right():
        with tracker, tracker:
            pass
        assert len(module_hooks._global_forward_pre_hooks) == 1
        assert len(module_hooks._global_forward_hooks) == 1
