"""Activation checkpointing, in which PyTorch's trackers were tried."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.tracker_case_models import (
    LINEAR,
    LOSS,
    LOSS_GRADIENT,
    MARKS,
    WEIGHT_GRADIENT,
    assert_gradients_are_pytorchs,
    linear,
    x,
)
from helpers.tracker_cases import (
    BOTH,
    Hooks,
    ours,
    theirs,
)

pytestmark = MARKS


# Activation checkpointing.


def checkpointing(reentrant):
    class B(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = linear()
            self.last = linear()

        def forward(self, x):
            return self.last(self.l(x).neg())

    class CK(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), B()

        def forward(self, x):
            return checkpoint(self.b, self.a(x), use_reentrant=reentrant)

    return CK()


def saved_arguments(path):
    """The ops of torch 2.11 that save what a non-reentrant checkpoint was given."""
    return [("forward", path, "empty empty")] if torch.__version__ < "2.12" else []


def test_what_a_checkpoint_runs_again_is_a_recompute():
    """d01, d02c: the module whose backward asks for it is kept apart."""
    model, value = checkpointing(False), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "CK > CK.a", LINEAR),
            *saved_arguments("CK"),
            ("forward", "CK > CK.b > CK.b.l", LINEAR),
            ("forward", "CK > CK.b", "neg"),
            ("forward", "CK > CK.b > CK.b.last", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("recompute", "CK > CK.b > CK.b.l for CK.b.last", "t detach detach mm"),
            ("recompute", "CK > CK.b for CK.b.last", "neg"),
            ("recompute", "CK > CK.b > CK.b.last for CK.b.last", "t detach detach"),
            ("backward", "CK > CK.b > CK.b.last", "detach detach t mm t t mm t"),
            ("backward", "CK > CK.b > CK.b.last -> b.last.weight", "detach"),
            ("backward", "CK > CK.b", "neg"),
            ("backward", "CK > CK.b > CK.b.l", "detach detach t mm t t mm t"),
            ("backward", "CK > CK.b > CK.b.l -> b.l.weight", "detach"),
            ("backward", "CK > CK.a", WEIGHT_GRADIENT),
            ("backward", "CK > CK.a -> a.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+CK +CK.a -CK.a +CK.b +CK.b.l -CK.b.l +CK.b.last -CK.b.last -CK.b -CK"),
            ("bw", "backward", "+CK +CK.b +CK.b.last"),
            ("fw", "recompute", "+CK.b +CK.b.l -CK.b.l +CK.b.last -CK.b.last -CK.b"),
            ("bw", "backward", "-CK.b.last +CK.b.l -CK.b -CK.b.l +CK.a -CK.a -CK"),
        ]
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


def checkpointing_a_function(reentrant, forward=None):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x):
            return checkpoint(lambda x: self.b(x).exp(), self.a(x), use_reentrant=reentrant)

        def with_other_name(this, x):
            return checkpoint(lambda x: this.b(x).exp(), this.a(x), use_reentrant=reentrant)

        def with_a_method(this, x):
            return checkpoint(this.tail, this.a(x), use_reentrant=reentrant)

        def tail(this, x):
            return this.b(x).exp()

    if forward is not None:
        M.forward = getattr(M, forward)
    return M()


@pytest.mark.parametrize("forward", ["forward", "with_other_name", "with_a_method"])
def test_a_checkpointed_function_is_recomputed_in_the_module_that_has_it(forward):
    """d02b"""
    model, value = checkpointing_a_function(False, forward), x()
    with ours() as ops:
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.a", LINEAR),
            *saved_arguments("M"),
            ("forward", "M > M.b", LINEAR),
            ("forward", "M", "exp"),
            LOSS,
            LOSS_GRADIENT,
            ("recompute", "M > M.b for M", "t detach detach mm"),
            ("recompute", "M", "exp"),
            ("backward", "M", "detach detach mul"),
            ("backward", "M > M.b", "detach detach t mm t t mm t"),
            ("backward", "M > M.b -> b.weight", "detach"),
            ("backward", "M > M.a", WEIGHT_GRADIENT),
            ("backward", "M > M.a -> a.weight", "detach"),
        ]


def test_a_function_with_a_reentrant_checkpoint_is_recomputed_in_the_module_that_has_it():
    """d02b"""
    model, value = checkpointing_a_function(True), x()
    with ours() as ops:
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.a", LINEAR),
            ("forward", "M > M.b", LINEAR),
            ("forward", "M", "exp"),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M", "detach"),
            ("recompute", "M > M.b for M", LINEAR),
            ("recompute", "M", "exp detach"),
            ("backward", "M", "detach mul"),
            ("backward", "M > M.b", "t mm t t mm"),
            ("backward", "M", "detach"),
            ("backward", "M > M.b", "t"),
            ("backward", "M > M.b -> b.weight", "detach"),
            ("backward", "M > M.a", WEIGHT_GRADIENT),
            ("backward", "M > M.a -> a.weight", "detach"),
        ]


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_call_a_recompute_backward_and_charge_it_to_who_asked_for_it(kind):
    """d01, d02c"""
    model = checkpointing(False)
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.lines[7 + len(saved_arguments("CK")) :] == [
            ("backward", "CK CK.b CK.b.l CK.b.last", "t detach detach mm"),
            ("backward", "CK CK.b CK.b.last", "neg t detach detach detach detach t mm t t mm t detach"),
            ("backward", "CK CK.b", "neg"),
            ("backward", "CK CK.b CK.b.l", "detach detach t mm t t mm t detach"),
            ("backward", "CK CK.a", "t mm t t detach"),
        ]
