"""Models with branches and odd outputs, in which PyTorch's trackers were tried."""

import pytest
import torch
from torch import nn

from helpers.tracker_case_models import (
    GRADIENTS,
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
    MOD_TRACKER,
    MODULE_TRACKER,
    Hooks,
    ours,
    theirs,
)

pytestmark = MARKS


# Branches and outputs.


def branching():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Sequential(linear()), nn.Sequential(linear())

        def forward(self, x):
            return self.a(x) + self.b(x)

    return M()


def test_the_backward_of_one_branch_is_not_the_other_ones():
    """c07"""
    model, value = branching(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.a > M.a.0", LINEAR),
            ("forward", "M > M.b > M.b.0", LINEAR),
            ("forward", "M", "add"),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M > M.b > M.b.0", WEIGHT_GRADIENT),
            ("backward", "M > M.b > M.b.0 -> b.0.weight", "detach"),
            ("backward", "M > M.a > M.a.0", WEIGHT_GRADIENT),
            ("backward", "M > M.a > M.a.0 -> a.0.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+M +M.a +M.a.0 -M.a.0 -M.a +M.b +M.b.0 -M.b.0 -M.b -M"),
            ("bw", "backward", "+M +M.b +M.b.0 -M.b.0 -M.b +M.a +M.a.0 -M.a.0 -M.a -M"),
        ]
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=True)


def test_two_branches_get_each_its_own_part_of_the_gradient_of_their_input():
    """c07: full backward hooks give the parts, and the model the sum of both."""
    model, value = branching(), x(requires_grad=True)
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert hooks.events[1:] == [
            ("bw", "backward", "+M +M.b +M.b.0 -M.b -M.b.0 +M.a +M.a.0 -M -M.a -M.a.0"),
        ]
        assert hooks.inputs["M"]["[0]"].equal(value.grad)
        assert hooks.inputs["M.a"]["[0]"].equal(torch.ones(2, 4) @ model.a[0].weight)
        assert hooks.inputs["M.b"]["[0]"].equal(torch.ones(2, 4) @ model.b[0].weight)
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=True)


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_never_leave_the_backward_of_a_branch_whose_input_needs_no_gradient(kind):
    """c07"""
    model = branching()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm") == ["M M.b M.b.0", "M M.a M.a.0 M.b M.b.0"]


def residual():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, x):
            return x + self.l(x)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = linear()
            self.block = Block()

        def forward(self, x):
            return self.block(self.first(x))

    return M()


@pytest.mark.parametrize("additions", [False, True])
def test_gradients_that_meet_at_a_residual_are_added_by_its_block(additions):
    """c07b: without `additions` adding cannot be told from the work of the module that ran last."""
    model, value = residual(), x()
    with ours(additions=additions) as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.first", LINEAR),
            ("forward", "M > M.block > M.block.l", LINEAR),
            ("forward", "M > M.block", "add"),
            LOSS,
            LOSS_GRADIENT,
            *(
                [
                    ("backward", "M > M.block > M.block.l", "t mm t t mm"),
                    ("backward", "M > M.block +", "add"),
                    ("backward", "M > M.block > M.block.l", "t"),
                ]
                if additions
                else [("backward", "M > M.block > M.block.l", "t mm t t mm add t")]
            ),
            ("backward", "M > M.block > M.block.l -> block.l.weight", "detach"),
            ("backward", "M > M.first", WEIGHT_GRADIENT),
            ("backward", "M > M.first -> first.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+M +M.first -M.first +M.block +M.block.l -M.block.l -M.block -M"),
            ("bw", "backward", "+M +M.block +M.block.l -M.block -M.block.l +M.first -M.first -M"),
        ]
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=True)


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_charge_the_addition_at_a_residual_to_the_module_before(kind):
    """c07b"""
    model = residual()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("add") == ["M M.block M.block.l"]


def using_one_of_two_outputs():
    class I(nn.Module):  # noqa: E742
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, x):
            y = self.l(x)
            return y.neg(), y.exp()

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.i = I()
            self.j = linear()

        def forward(self, x):
            return self.j(self.i(x)[0])

    return M()


def test_an_output_that_nobody_uses_keeps_no_module_open():
    """c08"""
    model, value = using_one_of_two_outputs(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.i > M.i.l", LINEAR),
            ("forward", "M > M.i", "neg exp detach"),
            ("forward", "M > M.j", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M > M.j", GRADIENTS),
            ("backward", "M > M.j -> j.weight", "detach"),
            ("backward", "M > M.i", "neg"),
            ("backward", "M > M.i > M.i.l", WEIGHT_GRADIENT),
            ("backward", "M > M.i > M.i.l -> i.l.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+M +M.i +M.i.l -M.i.l -M.i +M.j -M.j -M"),
            ("bw", "backward", "+M +M.j -M.j +M.i +M.i.l -M.i.l -M.i -M"),
        ]
        assert list(hooks.outputs["M.i"]) == ["[0]"]
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


def giving_an_inner_output():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x):
            h = self.a(x)
            return self.b(h), h

    return M()


def run_with_auxiliary_loss(model, value):
    y, h = model(value)
    (y.sum() + h.exp().sum()).backward()


@pytest.mark.parametrize("additions", [False, True])
def test_a_model_whose_inner_output_is_in_the_loss_is_around_all_of_its_backward(additions):
    """c08b: the gradients of the inner output meet outside, where the loss is."""
    model, value = giving_an_inner_output(), x()
    with ours(additions=additions) as ops:
        hooks = Hooks(ops.tracker)
        run_with_auxiliary_loss(model, value)
        assert ops.lines == [
            ("forward", "M > M.a", LINEAR),
            ("forward", "M > M.b", LINEAR),
            (None, "", "sum exp detach sum add ones_like"),
            ("backward", "", "expand detach mul expand"),
            *(
                [
                    ("backward", "M > M.b", "t mm t t mm"),
                    ("backward", "+", "add"),
                    ("backward", "M > M.b", "t"),
                ]
                if additions
                else [("backward", "M > M.b", "t mm t t mm add t")]
            ),
            ("backward", "M > M.b -> b.weight", "detach"),
            ("backward", "M > M.a", WEIGHT_GRADIENT),
            ("backward", "M > M.a -> a.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+M +M.a -M.a +M.b -M.b -M"),
            ("bw", "backward", "+M +M.b -M.b +M.a -M.a -M"),
        ]
        assert_gradients_are_pytorchs(hooks, model, lambda: run_with_auxiliary_loss(model, value), full=True)


@pytest.mark.parametrize(
    ("kind", "around"), [(MODULE_TRACKER, ""), (MOD_TRACKER, "M ")], ids=["ModuleTracker", "ModTracker"]
)
def test_pytorchs_module_tracker_waits_for_all_outputs_of_a_model(kind, around):
    """c08b"""
    model = giving_an_inner_output()
    with theirs(kind) as ops:
        run_with_auxiliary_loss(model, x())
        assert ops.at("mm") == [f"{around}M.b", f"{around}M.b", "M M.a"]


def working_in_place():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x):
            return self.b(self.a(x).relu_())

    return M()


def test_work_in_place_on_an_output_is_the_parents():
    """c09"""
    model, value = working_in_place(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.a", LINEAR),
            ("forward", "M", "relu_ detach"),
            ("forward", "M > M.b", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M > M.b", GRADIENTS),
            ("backward", "M > M.b -> b.weight", "detach"),
            ("backward", "M", "detach threshold_backward"),
            ("backward", "M > M.a", WEIGHT_GRADIENT),
            ("backward", "M > M.a -> a.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+M +M.a -M.a +M.b -M.b -M"),
            ("bw", "backward", "+M +M.b -M.b +M.a -M.a -M"),
        ]
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


def passing_on():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.i, self.b = linear(), nn.Identity(), linear()

        def forward(self, x):
            return self.b(self.i(self.a(x)))

    return M()


def test_a_module_that_gives_back_its_input_is_not_around_the_backward_of_the_one_before():
    """c10: its own backward is where gradients pass it, between two nodes."""
    model, value = passing_on(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
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
            ("fw", "forward", "+M +M.a -M.a +M.i -M.i +M.b -M.b -M"),
            ("bw", "backward", "+M +M.b -M.b +M.i -M.i +M.a -M.a -M"),
        ]
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=True)


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_keep_a_module_that_gives_back_its_input_open(kind):
    """c10"""
    model = passing_on()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm") == ["M M.b", "M M.b", "M M.a M.i"]


def test_the_frozen_part_of_a_model_has_no_backward():
    """c11"""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear().requires_grad_(False), linear()

        def forward(self, x):
            return self.b(self.a(x))

    model, value = M(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.a", LINEAR),
            ("forward", "M > M.b", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M > M.b", WEIGHT_GRADIENT),
            ("backward", "M > M.b -> b.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+M +M.a -M.a +M.b -M.b -M"),
            ("bw", "backward", "+M +M.b -M.b -M"),
        ]
        assert hooks.inputs == {"M.b": {}, "M": {}}
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=True)
