"""Ways to run the autograd engine, torch.func and no_grad, in which PyTorch's trackers were tried."""

import pytest
import torch
from torch import nn

from helpers.tracker_case_models import (
    GRADIENTS,
    INPUT_GRADIENT,
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
    BOTH,
    MOD_TRACKER,
    MODULE_TRACKER,
    Hooks,
    TheirOps,
    left_behind_put_right,
    ours,
    theirs,
)

pytestmark = MARKS


# Ways to run the engine.


def energy():
    class E(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, x):
            return self.l(x).square().sum()

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = E()

        def forward(self, x):
            return torch.autograd.grad(self.e(x), x, create_graph=True)[0].neg()

    return M()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_gradient_taken_inside_a_forward_is_a_backward_of_what_it_goes_through(hooked):
    """d03: what that backward does is work of the module whose forward asked for it, so its derivative is too."""
    model, value = energy(), x(requires_grad=True)
    with ours() as ops:
        if hooked:
            hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.e > M.e.l", LINEAR),
            ("forward", "M > M.e", "pow sum"),
            ("forward", "M", "ones_like"),
            ("backward", "M > M.e", "expand pow mul mul"),
            ("backward", "M > M.e > M.e.l", INPUT_GRADIENT),
            ("forward", "M", "neg"),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M", "neg t mm t mm t mul mul pow mul mul"),
            ("backward", "M > M.e > M.e.l", "t mm t t mm add"),
            ("backward", "", "detach"),
            ("backward", "M > M.e > M.e.l", "t"),
            ("backward", "M > M.e > M.e.l -> e.l.weight", "detach"),
        ]
        if hooked:
            assert hooks.events == [
                ("fw", "forward", "+M +M.e +M.e.l -M.e.l -M.e"),
                ("bw", "backward", "+M +M.e +M.e.l -M -M.e -M.e.l"),
                ("fw", "forward", "-M"),
                ("bw", "backward", "+M +M.e +M.e.l -M -M.e -M.e.l"),
            ]


def test_a_gradient_taken_inside_a_forward_is_given_to_the_hooks():
    """d03"""
    model, value = energy(), x(requires_grad=True)
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        y = model(value)
        assert hooks.inputs["M.e"]["[0]"].equal(-y)
        assert hooks.inputs["M.e.l"]["[0]"].equal(-y)
        assert hooks.outputs["M.e"][""].equal(torch.tensor(1.0))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_double_backward(hooked):
    """d03b: whose the nodes are that a backward has made is known only while hooks follow it."""
    model, value = nn.Sequential(linear(), nn.Tanh()), x(requires_grad=True)
    with ours() as ops:
        if hooked:
            hooks = Hooks(ops.tracker)
        gradient = torch.autograd.grad(model(value).sum(), value, create_graph=True)[0]
        assert ops.lines == [
            ("forward", "Sequential > Sequential.0", LINEAR),
            ("forward", "Sequential > Sequential.1", "tanh detach"),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Sequential > Sequential.1", "detach tanh_backward"),
            ("backward", "Sequential > Sequential.0", INPUT_GRADIENT),
        ]
        gradient.sum().backward()
        assert ops.lines == [
            LOSS,
            LOSS_GRADIENT,
            *(
                [
                    ("backward", "Sequential > Sequential.0", "t mm t mm t"),
                    ("backward", "Sequential > Sequential.1", "mul mul mul detach tanh_backward"),
                ]
                if hooked
                else [
                    ("backward", "unknown", "t mm t mm t mul mul mul"),
                    ("backward", "Sequential > Sequential.1", "detach tanh_backward"),
                ]
            ),
            ("backward", "Sequential > Sequential.0", "t mm t t mm add"),
            ("backward", "", "detach"),
            ("backward", "Sequential > Sequential.0", "t"),
            ("backward", "Sequential > Sequential.0 -> 0.weight", "detach"),
        ]
        if hooked:  # one more backward of each call
            once = "+Sequential +Sequential.1 -Sequential.1 +Sequential.0 -Sequential -Sequential.0"
            assert hooks.events[1:] == [("bw", "backward", f"{once} {once}")]


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_stop_a_gradient_of_a_leaf_that_is_an_input(kind):
    """d03, d03b, d04c"""
    value = x(requires_grad=True)
    with theirs(kind):
        with pytest.raises(RuntimeError, match="leaf node"):
            energy()(value)
        with pytest.raises(RuntimeError, match="leaf node"):
            torch.autograd.grad(MLP()(value).sum(), value, create_graph=True)
        with pytest.raises(RuntimeError, match="leaf node"):
            torch.autograd.grad(MLP()(value).sum(), value)


MLP_FORWARD = [
    ("forward", "MLP > MLP.first", LINEAR),
    ("forward", "MLP > MLP.act", "relu detach"),
    ("forward", "MLP > MLP.second", LINEAR),
]


MLP_FORWARD_EVENTS = (
    "fw",
    "forward",
    "+MLP +MLP.first -MLP.first +MLP.act -MLP.act +MLP.second -MLP.second -MLP",
)


def test_backward_twice_through_one_graph_has_the_same_answers():
    """d04"""
    model, value = MLP(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        loss = model(value).sum()
        loss.backward(retain_graph=True)
        assert ops.lines == [
            *MLP_FORWARD,
            LOSS,
            LOSS_GRADIENT,
            ("backward", "MLP > MLP.second", GRADIENTS),
            ("backward", "MLP > MLP.second -> second.weight", "detach"),
            ("backward", "MLP > MLP.act", "detach threshold_backward"),
            ("backward", "MLP > MLP.first", WEIGHT_GRADIENT),
            ("backward", "MLP > MLP.first -> first.weight", "detach"),
        ]
        loss.backward()
        assert ops.lines == [
            (None, "", "ones_like"),
            LOSS_GRADIENT,
            ("backward", "MLP > MLP.second", GRADIENTS),
            ("backward", "MLP > MLP.second -> second.weight", "add_"),
            ("backward", "MLP > MLP.act", "detach threshold_backward"),
            ("backward", "MLP > MLP.first", WEIGHT_GRADIENT),
            ("backward", "MLP > MLP.first -> first.weight", "add_"),
        ]
        events = "+MLP +MLP.second -MLP.second +MLP.act -MLP.act +MLP.first -MLP.first -MLP"
        assert hooks.events == [MLP_FORWARD_EVENTS, ("bw", "backward", f"{events} {events}")]


def test_the_gradient_of_an_intermediate_runs_no_module_below_it():
    """d04b"""

    class M(MLP):
        def forward(self, x):
            self.hidden = self.act(self.first(x))
            return self.second(self.hidden)

    model, value = M(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        loss = model(value).sum()
        torch.autograd.grad(loss, model.hidden)
        assert ops.lines[3:] == [LOSS, LOSS_GRADIENT, ("backward", "M > M.second", INPUT_GRADIENT)]
        assert hooks.events[1:] == [("bw", "backward", "+M +M.second -M.second -M")]
        assert hooks.inputs["M.second"]["[0]"].equal(torch.ones(2, 4) @ model.second.weight)


def test_the_gradient_of_a_leaf_can_be_asked_for():
    """d04c"""
    model, value = MLP(), x(requires_grad=True)
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        gradient = torch.autograd.grad(model(value).sum(), value)[0]
        assert ops.lines == [
            *MLP_FORWARD,
            LOSS,
            LOSS_GRADIENT,
            ("backward", "MLP > MLP.second", INPUT_GRADIENT),
            ("backward", "MLP > MLP.act", "detach threshold_backward"),
            ("backward", "MLP > MLP.first", INPUT_GRADIENT),
        ]
        assert hooks.events == [
            MLP_FORWARD_EVENTS,
            ("bw", "backward", "+MLP +MLP.second -MLP.second +MLP.act -MLP.act +MLP.first -MLP -MLP.first"),
        ]
        assert hooks.inputs["MLP"]["[0]"].equal(gradient)


def test_backward_to_some_inputs_runs_only_what_is_on_the_way():
    """d04d"""
    model, value = MLP(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward(inputs=[model.second.weight])
        assert ops.lines == [
            *MLP_FORWARD,
            LOSS,
            LOSS_GRADIENT,
            ("backward", "MLP > MLP.second", WEIGHT_GRADIENT),
            ("backward", "MLP > MLP.second -> second.weight", "detach"),
        ]
        assert hooks.events == [MLP_FORWARD_EVENTS, ("bw", "backward", "+MLP +MLP.second -MLP.second -MLP")]
        assert hooks.inputs == {"MLP.second": {"[0]": None}, "MLP": {}}


def test_a_backward_after_the_end_is_not_tracked():
    """d04e"""
    model, value = MLP(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        loss = model(value).sum()
        assert ops.lines == [*MLP_FORWARD, (None, "", "sum")]
        assert hooks.events == [MLP_FORWARD_EVENTS]
    with ops:
        loss.backward()
    assert ops.lines == [
        (None, "", "ones_like expand t mm t t mm t detach detach threshold_backward t mm t t detach"),
    ]
    assert hooks.events == []


@pytest.mark.parametrize(
    ("kind", "after"),
    [(MODULE_TRACKER, ["", "", ""]), (MOD_TRACKER, ["MLP MLP.second", "MLP MLP.second", "MLP MLP.first"])],
    ids=["ModuleTracker", "ModTracker"],
)
def test_pytorchs_mod_tracker_goes_on_after_its_end(kind, after):
    """d04e"""
    model = MLP()
    with left_behind_put_right():
        with kind() as tracker:
            loss = model(x()).sum()
        with TheirOps(tracker) as ops:
            loss.backward()
    assert ops.at("mm") == after


# torch.func, and gradients that are off.


def test_gradients_of_torch_func_have_their_modules():
    """d05"""
    model, value = nn.Sequential(linear(), nn.Tanh()), x()
    with ours() as ops:
        torch.func.grad(lambda value: model(value).sum())(value)
        assert ops.lines == [
            ("forward", "Sequential > Sequential.0", LINEAR),
            ("forward", "Sequential > Sequential.1", "tanh detach"),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Sequential > Sequential.1", "tanh_backward"),
            ("backward", "Sequential > Sequential.0", INPUT_GRADIENT),
        ]


def test_gradients_of_torch_func_by_sample_have_their_modules():
    """d05b: the ops are those that a batch of samples becomes."""
    model, value = nn.Sequential(linear(), nn.Tanh()), x()
    with ours() as ops:
        torch.func.vmap(torch.func.grad(lambda value: model(value).sum()))(value)
        assert ops.at("mm") == [
            ("forward", "Sequential > Sequential.0"),
            ("backward", "Sequential > Sequential.0"),
        ]
        assert ops.at("tanh") == [("forward", "Sequential > Sequential.1")]
        assert ops.at("tanh_backward") == [("backward", "Sequential > Sequential.1")]
        assert ops.at("sum") == [(None, "")]


def test_tangents_of_torch_func_are_work_of_the_forward_of_their_modules():
    """d05c: nothing tells them from the values."""
    model, value = nn.Sequential(linear(), nn.Tanh()), x()
    with ours() as ops:
        torch.func.jvp(model, (value,), (value,))
        assert {*ops.at("mm")} == {("forward", "Sequential > Sequential.0")}
        assert len(ops.at("mm")) > 1
        assert ops.at("tanh") == [("forward", "Sequential > Sequential.1")]
        assert ops.at("tanh_backward") == [("forward", "Sequential > Sequential.1")]


@pytest.mark.parametrize(("off", "op"), [(torch.no_grad, LINEAR), (torch.inference_mode, "linear")])
def test_modules_are_tracked_without_gradients(off, op):
    """d06"""
    model, value = MLP(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        with off():
            model(value)
        assert ops.lines == [
            ("forward", "MLP > MLP.first", op),
            ("forward", "MLP > MLP.act", "relu"),
            ("forward", "MLP > MLP.second", op),
        ]
        assert hooks.events == [MLP_FORWARD_EVENTS]
