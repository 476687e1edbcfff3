"""Chains of modules, and modules that run more than once: which ops belong to whom."""

import pytest
from torch import nn

from helpers.tracker_case_models import (
    GRADIENTS,
    LINEAR,
    LOSS,
    LOSS_GRADIENT,
    MARKS,
    MLP,
    WEIGHT_GRADIENT,
    linear,
    x,
)
from helpers.tracker_cases import (
    MOD_TRACKER,
    MODULE_TRACKER,
    ours,
    theirs,
)

pytestmark = MARKS


def test_ops_of_a_chain_belong_to_their_modules_and_the_gradient_of_a_leaf_is_accumulated_outside():
    """c01, c01b"""
    model, value = MLP(), x(requires_grad=True)
    with ours() as ops:
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "MLP > MLP.first", LINEAR),
            ("forward", "MLP > MLP.act", "relu detach"),
            ("forward", "MLP > MLP.second", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "MLP > MLP.second", GRADIENTS),
            ("backward", "MLP > MLP.second -> second.weight", "detach"),
            ("backward", "MLP > MLP.act", "detach threshold_backward"),
            ("backward", "MLP > MLP.first", "t mm t t mm"),
            ("backward", "", "detach"),
            ("backward", "MLP > MLP.first", "t"),
            ("backward", "MLP > MLP.first -> first.weight", "detach"),
        ]


# Modules that run more than once.


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = linear()

    def forward(self, x):
        return self.l(self.l(x))


@pytest.mark.parametrize("additions", [False, True])
def test_two_calls_of_a_module_are_told_apart(additions):
    """c02: and with `additions` the sum of their two gradients of one weight from the work of either."""
    model, value = Twice(), x()
    with ours(additions=additions) as ops:
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "Twice > Twice.l", LINEAR),
            ("forward", "Twice > Twice.l @1", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Twice > Twice.l @1", GRADIENTS),
            *(
                [("backward", "Twice > Twice.l", WEIGHT_GRADIENT), ("backward", "Twice +", "add")]
                if additions
                else [("backward", "Twice > Twice.l", "t mm t t add")]
            ),
            ("backward", "Twice > Twice.l -> l.weight", "detach"),
        ]


class R(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = linear()

    def forward(self, x, depth=1):
        x = self.l(x)
        x = self(x, depth - 1) if depth else x
        return x.neg()


def test_a_module_that_calls_itself_is_in_the_stack_as_often():
    """c02b"""
    model, value = R(), x()
    with ours(additions=True) as ops:
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "R > R.l", LINEAR),
            ("forward", "R > R > R.l @1", LINEAR),
            ("forward", "R > R @1", "neg"),
            ("forward", "R", "neg"),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "R", "neg"),
            ("backward", "R > R @1", "neg"),
            ("backward", "R > R > R.l @1", GRADIENTS),
            ("backward", "R > R.l", WEIGHT_GRADIENT),
            ("backward", "R +", "add"),
            ("backward", "R > R.l -> l.weight", "detach"),
        ]


@pytest.mark.parametrize(
    ("kind", "after_inner"), [(MODULE_TRACKER, ""), (MOD_TRACKER, "R")], ids=["ModuleTracker", "ModTracker"]
)
def test_pytorchs_module_tracker_leaves_a_module_that_calls_itself_too_early(kind, after_inner):
    """c02b"""
    model = R()
    with theirs(kind) as ops:
        model(x())
        assert ops.at("neg", "forward") == ["R", after_inner]
