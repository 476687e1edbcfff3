"""Forwards and hooks that are not plain, in which PyTorch's trackers fail."""

import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn

from helpers.asked import GLOBAL
from helpers.tracker_runs import (
    BOTH_OF_TORCH,
    M_TRAINS,
    MARKS,
    M,
    asked,
    asked_of_torch,
    train,
)
from modtrace import ModuleTracker

pytestmark = MARKS


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
