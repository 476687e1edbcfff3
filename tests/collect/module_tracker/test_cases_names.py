"""The names that trackers give to modules, in which PyTorch's trackers were tried."""

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
    linear,
    x,
)
from helpers.tracker_cases import (
    BOTH,
    MOD_TRACKER,
    MODULE_TRACKER,
    ours,
    theirs,
)

pytestmark = MARKS


# Names.


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = linear()

    def encode(self, x):
        return self.l(x).neg()

    def forward(self, x):
        return self.encode(x)


class OtherNames(Encoder):
    def encode(this, x):
        return this.l(x).neg()

    def any_arguments(*args):
        return args[0].l(args[1]).neg()


@pytest.mark.parametrize("name", ["encode", "any_arguments"])
def test_a_method_whose_first_parameter_has_another_name_is_around_what_it_calls(name):
    model, value = OtherNames(), x()
    with ours() as ops:
        getattr(model, name)(value)
        assert ops.lines == [("forward", "OtherNames > OtherNames.l", LINEAR), (None, "", "neg")]


def test_a_function_that_is_given_a_model_tells_names_and_is_not_the_model():
    def encode(model, value):
        return model.l(value).neg()

    model, value = Encoder(), x()
    with ours() as ops:
        encode(model, value)
        assert ops.lines == [("forward", "Encoder.l", LINEAR), (None, "", "neg")]


def test_a_child_called_by_a_method_has_its_name_below_the_root_from_the_start():
    """c03: what the method itself does is outside, and its module's with `methods`."""
    model, value = Encoder(), x()
    with ours() as ops:
        model.encode(value).sum().backward()
        assert ops.lines == [
            ("forward", "Encoder > Encoder.l", LINEAR),
            (None, "", "neg sum ones_like"),
            ("backward", "", "expand neg"),
            ("backward", "Encoder > Encoder.l", WEIGHT_GRADIENT),
            ("backward", "Encoder > Encoder.l -> l.weight", "detach"),
        ]
        with torch.no_grad():
            model(value)
            model.encode(value)
        assert ops.lines == [
            ("forward", "Encoder > Encoder.l", LINEAR),
            ("forward", "Encoder", "neg"),
            ("forward", "Encoder > Encoder.l @1", LINEAR),
            (None, "", "neg"),
        ]


def test_a_method_that_was_named_stands_in_the_stack():
    """c03"""
    model, value = Encoder(), x()
    with ours() as ops:
        ops.tracker.methods(model, "encode")
        model.encode(value).sum().backward()
        assert ops.lines == [
            ("forward", "Encoder > Encoder.encode() > Encoder.l", LINEAR),
            ("forward", "Encoder > Encoder.encode() @?", "neg"),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Encoder > Encoder.encode() @?", "neg"),
            ("backward", "Encoder > Encoder.encode() > Encoder.l", WEIGHT_GRADIENT),
            ("backward", "Encoder > Encoder.encode() > Encoder.l -> l.weight", "detach"),
        ]


def test_a_child_called_before_its_root_is_renamed_backwards_in_time():
    """c03b: what its name is says who asks late."""
    model, value = nn.Sequential(linear()), x()
    with ours() as ops:
        early = model[0](value)
        assert ops.lines == [("forward", "Linear", LINEAR)]
        with torch.no_grad():
            model(value)
            model[0](value)
        assert ops.lines == [
            ("forward", "Sequential > Sequential.0", LINEAR),
            ("forward", "Sequential.0 @1", LINEAR),
        ]
        early.sum().backward()
        assert ops.lines == [
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Sequential.0", WEIGHT_GRADIENT),
            ("backward", "Sequential.0 -> 0.weight", "detach"),
        ]
        assert ops.tracker.get_known_fqn(model[0]) == "Sequential.0"


class Holder(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.l = held

    def forward(self, x):
        return self.l(x)


class P(nn.Module):
    def __init__(self):
        super().__init__()
        shared = linear()
        self.x, self.y = Holder(shared), Holder(shared)

    def forward(self, value):
        return self.y(self.x(value))


def test_a_module_in_two_parents_has_the_name_that_it_has_in_the_one_that_runs_it():
    """c04b: the accumulation into its weight is in what both have in common."""
    model, value = P(), x()
    with ours(additions=True) as ops:
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "P > P.x > P.x.l", LINEAR),
            ("forward", "P > P.y > P.y.l @1", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "P > P.y > P.y.l @1", GRADIENTS),
            ("backward", "P > P.x > P.x.l", WEIGHT_GRADIENT),
            ("backward", "P +", "add"),
            ("backward", "P -> x.l.weight", "detach"),
        ]


@pytest.mark.parametrize(
    ("kind", "last"),
    [(MODULE_TRACKER, "P P.x"), (MOD_TRACKER, "P P.x P.y.l")],
    ids=["ModuleTracker", "ModTracker"],
)
def test_pytorchs_trackers_name_a_shared_module_after_one_parent_while_the_other_runs_it(kind, last):
    """c04b"""
    model = P()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm", "forward") == ["P P.x P.y.l", "P P.y P.y.l"]
        assert ops.at("mm") == ["P P.y P.y.l", "P P.y P.y.l", last]


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = linear()

    def forward(self, x):
        x = self.first(x)
        return self.late(x) if hasattr(self, "late") else x


def test_a_module_that_is_added_between_two_calls_has_its_name():
    """c04c"""
    model, late, value = Late(), linear(), x()
    with ours() as ops:
        model(value)
        assert ops.lines == [("forward", "Late > Late.first", LINEAR)]
        model.late = late
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "Late > Late.first", LINEAR),
            ("forward", "Late > Late.late", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Late > Late.late", GRADIENTS),
            ("backward", "Late > Late.late -> late.weight", "detach"),
            ("backward", "Late > Late.first", WEIGHT_GRADIENT),
            ("backward", "Late > Late.first -> first.weight", "detach"),
        ]


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = [linear(), linear()]

    def forward(self, x):
        for layer in self.hidden:
            x = layer(x)
        return x


def test_modules_in_a_plain_list_are_told_apart_below_the_one_that_runs_them():
    """c04d"""
    model, value = Hidden(), x()
    with ours() as ops:
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "Hidden > Hidden.(Linear#0)", LINEAR),
            ("forward", "Hidden > Hidden.(Linear#1)", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Hidden > Hidden.(Linear#1)", GRADIENTS),
            ("backward", "Hidden > Hidden.(Linear#1) -> (Linear#1).weight", "detach"),
            ("backward", "Hidden > Hidden.(Linear#0)", WEIGHT_GRADIENT),
            ("backward", "Hidden > Hidden.(Linear#0) -> (Linear#0).weight", "detach"),
        ]
        model(value)
        assert ops.lines == [
            ("forward", "Hidden > Hidden.(Linear#0) @1", LINEAR),
            ("forward", "Hidden > Hidden.(Linear#1) @1", LINEAR),
        ]


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_know_only_the_class_of_modules_that_came_late_or_are_in_a_list(kind):
    """c04c, c04d"""
    late, hidden = Late(), Hidden()
    with theirs(kind) as ops:
        late(x())
        late.late = linear()
        late(x())
        assert ops.at("mm", "forward") == ["Late Late.first", "Late Late.first", "Late Linear"]
        hidden(x())
        assert ops.at("mm", "forward")[3:] == ["Hidden Linear", "Hidden Linear"]
