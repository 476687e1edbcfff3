"""The cases of modules and of autograd in which PyTorch's own module trackers were tried, and what is right in each."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.tracker_cases import (
    BOTH,
    MOD_TRACKER,
    MODULE_TRACKER,
    Hooks,
    Ops,
    TheirOps,
    TorchsGradients,
    left_behind_put_right,
    ours,
    theirs,
)

#: The ops of a Linear without bias: its forward; its backward with and without a gradient for the input.
LINEAR = "t mm"
GRADIENTS = "t mm t t mm t"
WEIGHT_GRADIENT = "t mm t t"
#: ... and for the input alone.
INPUT_GRADIENT = "t mm"

LOSS = (None, "", "sum ones_like")
LOSS_GRADIENT = ("backward", "", "expand")


pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@pytest.fixture(autouse=True)
def fixed_seed(seeded):
    """The same parameters in every run."""


def linear():
    return nn.Linear(4, 4, bias=False)


def x(requires_grad=False):
    return (torch.arange(8.0).view(2, 4) / 8).requires_grad_(requires_grad)


# Plain chains.


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = linear()
        self.act = nn.ReLU()
        self.second = linear()

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def test_ops_of_a_chain_belong_to_their_modules():
    """c01"""
    model, value = MLP(), x()
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
            ("backward", "MLP > MLP.first", WEIGHT_GRADIENT),
            ("backward", "MLP > MLP.first -> first.weight", "detach"),
        ]


def test_the_gradient_of_a_leaf_that_is_no_parameter_is_accumulated_outside():
    """c01b"""
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


def test_a_module_with_integer_input_has_its_backward():
    """c01c"""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.l = linear()

        def forward(self, tokens):
            return self.l(self.embed(tokens))

    model, tokens = M(), torch.tensor([1, 3])
    with ours() as ops:
        model(tokens).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.embed", "embedding"),
            ("forward", "M > M.l", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M > M.l", GRADIENTS),
            ("backward", "M > M.l -> l.weight", "detach"),
            ("backward", "M > M.embed", "embedding_dense_backward"),
            ("backward", "M > M.embed -> embed.weight", "detach"),
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


def test_a_module_under_two_names_has_the_first_and_counts_its_calls():
    """c04"""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = linear()

        def forward(self, x):
            return self.b(self.a(x))

    model, value = M(), x()
    with ours(additions=True) as ops:
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.a", LINEAR),
            ("forward", "M > M.a @1", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M > M.a @1", GRADIENTS),
            ("backward", "M > M.a", WEIGHT_GRADIENT),
            ("backward", "M +", "add"),
            ("backward", "M > M.a -> a.weight", "detach"),
        ]


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


# What goes in and out. In the events `+M` is the pre hook and `-M` the post hook. Of backwards that end at one node,
# those of calls with an input that needs a gradient are told the outer before the inner, then the others.


def assert_gradients_are_pytorchs(hooks, model, run, *, full):
    """Ours are those of a second run with PyTorch's own hooks."""
    model.zero_grad()
    with TorchsGradients(model, full=full) as torchs:
        run()
    hooks.assert_same_gradients(torchs)


def calling_by_keyword():
    class I(nn.Module):  # noqa: E742
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, *, x):
            return self.l(x)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.j = linear()
            self.i = I()

        def forward(self, x):
            return self.i(x=self.j(x))

    return M()


def test_a_module_called_by_keyword_ends_where_its_backward_does():
    """c05"""
    model, value = calling_by_keyword(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.j", LINEAR),
            ("forward", "M > M.i > M.i.l", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M > M.i > M.i.l", GRADIENTS),
            ("backward", "M > M.i > M.i.l -> i.l.weight", "detach"),
            ("backward", "M > M.j", WEIGHT_GRADIENT),
            ("backward", "M > M.j -> j.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+M +M.j -M.j +M.i +M.i.l -M.i.l -M.i -M"),
            ("bw", "backward", "+M +M.i +M.i.l -M.i -M.i.l +M.j -M.j -M"),
        ]
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_never_leave_the_backward_of_a_module_called_by_keyword(kind):
    """c05"""
    model = calling_by_keyword()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm") == ["M M.i M.i.l", "M M.i M.i.l", "M M.i M.j"]


@dataclass
class Out:
    y: torch.Tensor
    note: str = ""


class ModelOutput(OrderedDict):
    """As transformers has it: a dict that is read by attributes."""

    def __getattr__(self, name):
        return self[name]


def returning(kind):
    class I(nn.Module):  # noqa: E742
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, x):
            return kind(y=self.l(x).neg())

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.i = I()
            self.j = linear()

        def forward(self, x):
            return self.j(self.i(x).y)

    return M()


@pytest.mark.parametrize("output", [Out, ModelOutput])
def test_a_module_that_returns_an_object_has_its_backward(output):
    """c06, c06b"""
    model, value = returning(output), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.i > M.i.l", LINEAR),
            ("forward", "M > M.i", "neg"),
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
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("output", [Out, ModelOutput])
def test_pytorchs_trackers_do_not_enter_the_backward_of_a_module_that_returns_an_object(kind, output):
    """c06, c06b"""
    model = returning(output)
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("neg") == ["M"]


def taking_an_object():
    class I(nn.Module):  # noqa: E742
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, out):
            return self.l(out.y)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.j = linear()
            self.i = I()

        def forward(self, x):
            return self.i(Out(self.j(x)))

    return M()


def test_a_module_that_takes_an_object_ends_where_its_backward_does():
    """c06c"""
    model, value = taking_an_object(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "M > M.j", LINEAR),
            ("forward", "M > M.i > M.i.l", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "M > M.i > M.i.l", GRADIENTS),
            ("backward", "M > M.i > M.i.l -> i.l.weight", "detach"),
            ("backward", "M > M.j", WEIGHT_GRADIENT),
            ("backward", "M > M.j -> j.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+M +M.j -M.j +M.i +M.i.l -M.i.l -M.i -M"),
            ("bw", "backward", "+M +M.i +M.i.l -M.i -M.i.l +M.j -M.j -M"),
        ]
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_never_leave_the_backward_of_a_module_that_takes_an_object(kind):
    """c06c"""
    model = taking_an_object()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm") == ["M M.i M.i.l", "M M.i M.i.l", "M M.i M.j"]


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


def passing_on(i):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.i, self.b = linear(), i, linear()

        def forward(self, x):
            return self.b(self.i(self.a(x)))

    return M()


@pytest.mark.parametrize("inner", [nn.Identity(), nn.Dropout(0.5).eval()], ids=["Identity", "Dropout"])
def test_a_module_that_gives_back_its_input_is_not_around_the_backward_of_the_one_before(inner):
    """c10: its own backward is where gradients pass it, between two nodes."""
    model, value = passing_on(inner), x()
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
    model = passing_on(nn.Identity())
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


def test_a_loss_outside_of_modules_is_outside_and_in_a_scope_its_own_region():
    """c12"""
    model, value = linear(), x()
    with ours() as ops:
        (model(value) - 1).square().mean().backward()
        assert ops.lines == [
            ("forward", "Linear", LINEAR),
            (None, "", "sub pow mean ones_like"),
            ("backward", "", "expand div pow mul mul"),
            ("backward", "Linear", WEIGHT_GRADIENT),
            ("backward", "Linear -> weight", "detach"),
        ]
        model.zero_grad()
        y = model(value)
        with ops.tracker.scope("loss"):
            loss = (y - 1).square().mean()
        loss.backward()
        assert ops.lines == [
            ("forward", "Linear", LINEAR),
            ("forward", "loss @?", "sub pow mean"),
            (None, "", "ones_like"),
            ("backward", "loss @?", "expand div pow mul mul"),
            ("backward", "Linear", WEIGHT_GRADIENT),
            ("backward", "Linear -> weight", "detach"),
        ]


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


def test_what_a_checkpoint_runs_again_is_a_recompute():
    """d01, d02c: the module whose backward asks for it is kept apart."""
    model, value = checkpointing(False), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "CK > CK.a", LINEAR),
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


def test_the_recompute_of_a_reentrant_checkpoint_is_one_and_its_backward_is_inside():
    """d02"""
    model, value = checkpointing(True), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "CK > CK.a", LINEAR),
            ("forward", "CK > CK.b > CK.b.l", LINEAR),
            ("forward", "CK > CK.b", "neg"),
            ("forward", "CK > CK.b > CK.b.last", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "CK", "detach"),
            ("recompute", "CK > CK.b > CK.b.l for CK", LINEAR),
            ("recompute", "CK > CK.b for CK", "neg"),
            ("recompute", "CK > CK.b > CK.b.last for CK", LINEAR),
            ("backward", "CK > CK.b > CK.b.last", GRADIENTS),
            ("backward", "CK > CK.b > CK.b.last -> b.last.weight", "detach"),
            ("backward", "CK > CK.b", "neg"),
            ("backward", "CK > CK.b > CK.b.l", "t mm t t mm"),
            ("backward", "CK", "detach"),  # into the input that the checkpoint has detached
            ("backward", "CK > CK.b > CK.b.l", "t"),
            ("backward", "CK > CK.b > CK.b.l -> b.l.weight", "detach"),
            ("backward", "CK > CK.a", WEIGHT_GRADIENT),
            ("backward", "CK > CK.a -> a.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+CK +CK.a -CK.a +CK.b +CK.b.l -CK.b.l +CK.b.last -CK.b.last -CK.b -CK"),
            ("bw", "backward", "+CK"),
            ("fw", "recompute", "+CK.b +CK.b.l -CK.b.l +CK.b.last -CK.b.last -CK.b"),
            ("bw", "backward", "+CK.b +CK.b.last -CK.b.last +CK.b.l -CK.b -CK.b.l +CK.a -CK.a -CK"),
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
        assert ops.lines[7:] == [
            ("backward", "CK CK.b CK.b.l CK.b.last", "t detach detach mm"),
            ("backward", "CK CK.b CK.b.last", "neg t detach detach detach detach t mm t t mm t detach"),
            ("backward", "CK CK.b", "neg"),
            ("backward", "CK CK.b CK.b.l", "detach detach t mm t t mm t detach"),
            ("backward", "CK CK.a", "t mm t t detach"),
        ]


@pytest.mark.parametrize(
    ("kind", "last"),
    [(MODULE_TRACKER, "CK CK.b.l"), (MOD_TRACKER, "CK")],
    ids=["ModuleTracker", "ModTracker"],
)
def test_pytorchs_trackers_lose_the_modules_around_a_reentrant_checkpoint(kind, last):
    """d02"""
    model = checkpointing(True)
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm") == ["CK CK.b CK.b.l", "CK CK.b CK.b.last", "CK", "CK", last, last, "CK CK.a"]


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
            Hooks(ops.tracker)
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


def test_a_double_backward_is_one_more_backward_of_each_call():
    """d03b"""
    model, value = nn.Sequential(linear(), nn.Tanh()), x(requires_grad=True)
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        gradient = torch.autograd.grad(model(value).sum(), value, create_graph=True)[0]
        assert hooks.events[1:] == [
            (
                "bw",
                "backward",
                "+Sequential +Sequential.1 -Sequential.1 +Sequential.0 -Sequential -Sequential.0",
            ),
        ]
        gradient.sum().backward()
        assert hooks.events == [
            (
                "bw",
                "backward",
                "+Sequential +Sequential.1 -Sequential.1 +Sequential.0 -Sequential -Sequential.0",
            ),
        ]


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


def test_an_exception_that_is_caught_outside_leaves_nothing():
    """d07"""
    model, after, value = Failing(), linear(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        with pytest.raises(ValueError, match="so it goes"):
            model(value)
        assert ops.tracker.parents == {"Global"}
        after(value).sum().backward()
        assert ops.lines == [
            ("forward", "Failing > Failing.bad", "exp"),
            ("forward", "Linear", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Linear", WEIGHT_GRADIENT),
            ("backward", "Linear -> weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+Failing +Failing.bad -Failing.bad -Failing +Linear -Linear"),
            ("bw", "backward", "+Linear -Linear"),
        ]


def test_an_exception_that_the_parent_catches_ends_only_the_child():
    """d07b"""
    model, value = Catching(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.tracker.parents == {"Global"}
        assert ops.lines == [
            ("forward", "Catching > Catching.bad", "exp"),
            ("forward", "Catching", "neg"),
            ("forward", "Catching > Catching.ok", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Catching > Catching.ok", WEIGHT_GRADIENT),
            ("backward", "Catching > Catching.ok -> ok.weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+Catching +Catching.bad -Catching.bad +Catching.ok -Catching.ok -Catching"),
            ("bw", "backward", "+Catching +Catching.ok -Catching.ok -Catching"),
        ]


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


def test_an_exception_in_a_backward_leaves_nothing():
    """d07d: the next backward is as if nothing had been."""
    model, after, value = FailingBackward(), linear(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        with pytest.raises(ValueError, match="so it goes"):
            model(value).sum().backward()
        assert (ops.tracker.parents, ops.tracker.phase) == ({"Global"}, None)
        after(value).sum().backward()
        assert ops.lines == [
            ("forward", "FailingBackward > FailingBackward.l", LINEAR),
            ("forward", "FailingBackward", "clone"),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "FailingBackward", "exp"),
            ("forward", "Linear", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Linear", WEIGHT_GRADIENT),
            ("backward", "Linear -> weight", "detach"),
        ]
        assert hooks.events == [
            ("fw", "forward", "+FailingBackward +FailingBackward.l -FailingBackward.l -FailingBackward"),
            ("bw", "backward", "+FailingBackward"),
            ("fw", "forward", "+Linear -Linear"),
            ("bw", "backward", "+Linear -Linear"),
        ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_that_leaves_the_block_ends_the_tracking(error):
    """d07e"""

    class M(nn.Module):
        def forward(self, x):
            raise error

    model = M()
    with pytest.raises(error), modtrace.ModuleTracker(strict=True) as tracker:
        model(x())
    assert tracker.parents == {"Global"}
    with pytest.raises(error):
        model(x())
    assert tracker.parents == {"Global"}


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


def test_backward_through_a_part_of_time_belongs_to_the_calls_of_that_part():
    """d13"""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, state):
            for _ in range(2):
                state = self.l(state)
            return state

    model, state = M(), x()
    with ours(additions=True) as ops:
        hooks = Hooks(ops.tracker)
        for _ in range(2):
            state = model(state)
            loss = state.sum()
            loss.backward()
            state = state.detach()
            model.zero_grad()
            assert ops.lines == [
                ("forward", "M > M.l", LINEAR),
                ("forward", "M > M.l @1", LINEAR),
                LOSS,
                LOSS_GRADIENT,
                ("backward", "M > M.l @1", GRADIENTS),
                ("backward", "M > M.l", WEIGHT_GRADIENT),
                ("backward", "M +", "add"),
                ("backward", "M > M.l -> l.weight", "detach"),
                (None, "", "detach"),
            ]
            assert hooks.events == [
                ("fw", "forward", "+M +M.l -M.l +M.l -M.l -M"),
                ("bw", "backward", "+M +M.l -M.l +M.l -M.l -M"),
            ]
    assert set(ops.steps) == {None, 0, 1}
