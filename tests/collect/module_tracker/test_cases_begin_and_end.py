"""Trackers that begin and end in the middle of a run, in which PyTorch's trackers were tried."""

import pytest
import torch
from torch import nn

import modtrace
from helpers.tracker_case_models import (
    GRADIENTS,
    LINEAR,
    LOSS,
    LOSS_GRADIENT,
    MARKS,
    WEIGHT_GRADIENT,
    linear,
    x,
)
from helpers.tracker_cases import (
    MOD_TRACKER,
    Hooks,
    Ops,
    left_behind_put_right,
    ours,
)

pytestmark = MARKS


# Where a tracker begins and ends.


def test_a_tracker_opened_in_a_forward_sees_what_runs_in_it_below_that_module():
    """d12: the one around it sees it all."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x):
            x = self.a(x)
            with ours() as inner:
                x = self.b(x)
                self.inner = inner.lines
            return x

    model, value = M(), x()
    with ours() as outer:
        hooks = Hooks(outer.tracker)
        model(value).sum().backward()
        assert outer.lines == [
            ("forward", "M > M.a", LINEAR),
            ("forward", "M > M.b", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M > M.b", GRADIENTS),
            ("backward", "M > M.b -> b.weight", "detach"),
            ("backward", "M > M.a", WEIGHT_GRADIENT),
            ("backward", "M > M.a -> a.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+M +M.a -M.a +M.b -M.b -M"),
            ("bw", "backward", "+M +M.b -M.b +M.a -M.a -M"),
        ]
    assert model.inner == [("forward", "M > M.b", LINEAR)]


def test_a_tracker_opened_in_a_forward_that_ends_after_it():
    """d12b: what ran before is not known, and the end of the module that ran already does no harm."""
    trackers = []

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x):
            x = self.a(x)
            trackers.append(modtrace.ModuleTracker(strict=True))
            trackers[0].__enter__()
            return self.b(x)

    model, value = M(), x()
    model.register_forward_hook(lambda module, args, output: None)
    y = model(value)
    with Ops(trackers[0]) as ops:
        y.sum().backward()
        with torch.no_grad():
            model.b(value)
    trackers[0].__exit__(None, None, None)
    assert ops.lines == [
        LOSS,
        LOSS_GRADIENT,
        ("backward", "M > M.b", GRADIENTS),
        ("backward", "M > M.b -> b.weight", "detach"),
        ("backward", "unknown", WEIGHT_GRADIENT),
        ("backward", "M.a -> a.weight", "detach"),
        ("forward", "M.b", LINEAR),
    ]


def test_pytorchs_mod_tracker_raises_where_a_module_ends_that_it_has_not_seen_begin():
    """d12b"""
    tracker = MOD_TRACKER()

    class M(nn.Module):
        def forward(self, x):
            tracker.__enter__()
            return x

    model = M()
    model.register_forward_hook(lambda module, args, output: None)
    with left_behind_put_right():
        with pytest.raises(RuntimeError, match="hierarchy tracking is wrong"):
            model(x())
        tracker.__exit__(None, None, None)
