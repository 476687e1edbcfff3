"""The cases of modules and of autograd in which PyTorch's own module trackers were tried, and what is right in each."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
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


@pytest.mark.parametrize(
    ("additions", "addition"),
    [(False, ("backward", "Twice > Twice.l", "t mm t t add")), (True, None)],
    ids=["ops", "additions"],
)
def test_two_calls_of_a_module_are_told_apart(additions, addition):
    """c02: and the addition of their two gradients of one weight from the work of either."""
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
                else [addition]
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
            ("forward", "Encoder > Encoder.l", LINEAR),
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
    def __init__(self, l):
        super().__init__()
        self.l = l

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
    ("kind", "last"), [(MODULE_TRACKER, "P P.x"), (MOD_TRACKER, "P P.x P.y.l")], ids=["ModuleTracker", "ModTracker"]
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


# What goes in and out.


def assert_gradients_are_pytorchs(hooks, model, run, *, full):
    """Ours are those of a second run with PyTorch's own hooks."""
    model.zero_grad()
    with TorchsGradients(model, full=full) as torchs:
        run()
    hooks.assert_same_gradients(torchs)


class OfKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = linear()

    def forward(self, *, x):
        return self.l(x)


class CallsByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.j = linear()
        self.i = OfKeyword()

    def forward(self, x):
        return self.i(x=self.j(x))


def test_a_module_called_by_keyword_ends_where_its_backward_does():
    """c05"""
    model, value = CallsByKeyword(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "CallsByKeyword > CallsByKeyword.j", LINEAR),
            ("forward", "CallsByKeyword > CallsByKeyword.i > CallsByKeyword.i.l", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "CallsByKeyword > CallsByKeyword.i > CallsByKeyword.i.l", GRADIENTS),
            ("backward", "CallsByKeyword > CallsByKeyword.i > CallsByKeyword.i.l -> i.l.weight", "detach"),
            ("backward", "CallsByKeyword > CallsByKeyword.j", WEIGHT_GRADIENT),
            ("backward", "CallsByKeyword > CallsByKeyword.j -> j.weight", "detach"),
        ]
        assert hooks.events == []
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_never_leave_the_backward_of_a_module_called_by_keyword(kind):
    """c05"""
    model = CallsByKeyword()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm")[-1] == "CallsByKeyword CallsByKeyword.i CallsByKeyword.j"


@dataclass
class Out:
    y: torch.Tensor
    note: str = ""


class OfOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = linear()

    def forward(self, x):
        return Out(self.l(x).neg())


class ModelOutput(OrderedDict):
    """As transformers has it: a dict that is read by attributes."""

    def __getattr__(self, name):
        return self[name]


class OfModelOutput(OfOut):
    def forward(self, x):
        return ModelOutput(y=self.l(x).neg())


class M(nn.Module):
    """Runs `i`, and `j` on what `i` gives in `y`."""

    def __init__(self, i):
        super().__init__()
        self.i = i
        self.j = linear()

    def forward(self, x):
        return self.j(self.i(x).y)


@pytest.mark.parametrize("inner", [OfOut, OfModelOutput])
def test_a_module_that_returns_an_object_has_its_backward(inner):
    """c06, c06b"""
    model, value = M(inner()), x()
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
        assert hooks.events == []
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("inner", [OfOut, OfModelOutput])
def test_pytorchs_trackers_do_not_enter_the_backward_of_a_module_that_returns_an_object(kind, inner):
    """c06, c06b"""
    model = M(inner())
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("neg") == ["M"]


class TakesOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = linear()

    def forward(self, out):
        return self.l(out.y)


class GivesOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.j = linear()
        self.i = TakesOut()

    def forward(self, x):
        return self.i(Out(self.j(x)))


def test_a_module_that_takes_an_object_ends_where_its_backward_does():
    """c06c"""
    model, value = GivesOut(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "GivesOut > GivesOut.j", LINEAR),
            ("forward", "GivesOut > GivesOut.i > GivesOut.i.l", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "GivesOut > GivesOut.i > GivesOut.i.l", GRADIENTS),
            ("backward", "GivesOut > GivesOut.i > GivesOut.i.l -> i.l.weight", "detach"),
            ("backward", "GivesOut > GivesOut.j", WEIGHT_GRADIENT),
            ("backward", "GivesOut > GivesOut.j -> j.weight", "detach"),
        ]
        assert hooks.events == []
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_never_leave_the_backward_of_a_module_that_takes_an_object(kind):
    """c06c"""
    model = GivesOut()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm")[-1] == "GivesOut GivesOut.i GivesOut.j"


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(linear()), nn.Sequential(linear())

    def forward(self, x):
        return self.a(x) + self.b(x)


def test_the_backward_of_one_branch_is_not_the_other_ones():
    """c07"""
    model, value = Branches(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "Branches > Branches.a > Branches.a.0", LINEAR),
            ("forward", "Branches > Branches.b > Branches.b.0", LINEAR),
            ("forward", "Branches", "add"),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Branches > Branches.b > Branches.b.0", WEIGHT_GRADIENT),
            ("backward", "Branches > Branches.b > Branches.b.0 -> b.0.weight", "detach"),
            ("backward", "Branches > Branches.a > Branches.a.0", WEIGHT_GRADIENT),
            ("backward", "Branches > Branches.a > Branches.a.0 -> a.0.weight", "detach"),
        ]
        assert hooks.events == []
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=True)


def test_two_branches_get_each_its_own_part_of_the_gradient_of_their_input():
    """c07: full backward hooks give the parts, a hook on the tensor their sum."""
    model, value = Branches(), x(requires_grad=True)
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert [event for event in hooks.events if event[0].endswith("bw")] == []
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=True)


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_never_leave_the_backward_of_a_branch_whose_input_needs_no_gradient(kind):
    """c07"""
    model = Branches()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm") == [
            "Branches Branches.b Branches.b.0",
            "Branches Branches.a Branches.a.0 Branches.b Branches.b.0",
        ]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = linear()

    def forward(self, x):
        return x + self.l(x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = linear()
        self.block = Block()

    def forward(self, x):
        return self.block(self.first(x))


@pytest.mark.parametrize("additions", [False, True])
def test_gradients_that_meet_at_a_residual_are_added_by_its_block(additions):
    """c07b: without `additions` that they are added cannot be told from the work of the module before."""
    model, value = Residual(), x()
    with ours(additions=additions) as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "Residual > Residual.first", LINEAR),
            ("forward", "Residual > Residual.block > Residual.block.l", LINEAR),
            ("forward", "Residual > Residual.block", "add"),
            LOSS,
            LOSS_GRADIENT,
            *(
                [
                    ("backward", "Residual > Residual.block > Residual.block.l", "t mm t t mm"),
                    ("backward", "Residual > Residual.block +", "add"),
                    ("backward", "Residual > Residual.block > Residual.block.l", "t"),
                ]
                if additions
                else [("backward", "Residual > Residual.block > Residual.block.l", "t mm t t mm add t")]
            ),
            ("backward", "Residual > Residual.block > Residual.block.l -> block.l.weight", "detach"),
            ("backward", "Residual > Residual.first", WEIGHT_GRADIENT),
            ("backward", "Residual > Residual.first -> first.weight", "detach"),
        ]
        assert hooks.events == []
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=True)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = linear()

    def forward(self, x):
        y = self.l(x)
        return y.neg(), y.exp()


class UsesOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = TwoOutputs()
        self.j = linear()

    def forward(self, x):
        return self.j(self.i(x)[0])


def test_an_output_that_nobody_uses_keeps_no_module_open():
    """c08"""
    model, value = UsesOne(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "UsesOne > UsesOne.i > UsesOne.i.l", LINEAR),
            ("forward", "UsesOne > UsesOne.i", "neg exp detach"),
            ("forward", "UsesOne > UsesOne.j", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "UsesOne > UsesOne.j", GRADIENTS),
            ("backward", "UsesOne > UsesOne.j -> j.weight", "detach"),
            ("backward", "UsesOne > UsesOne.i", "neg"),
            ("backward", "UsesOne > UsesOne.i > UsesOne.i.l", WEIGHT_GRADIENT),
            ("backward", "UsesOne > UsesOne.i > UsesOne.i.l -> i.l.weight", "detach"),
        ]
        assert hooks.events == []
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        h = self.a(x)
        return self.b(h), h


def run_auxiliary(model, value):
    y, h = model(value)
    (y.sum() + h.exp().sum()).backward()


@pytest.mark.parametrize("additions", [False, True])
def test_a_model_whose_inner_output_is_in_the_loss_is_around_all_of_its_backward(additions):
    """c08b: the gradients of the inner output meet outside, where the loss is."""
    model, value = Auxiliary(), x()
    with ours(additions=additions) as ops:
        hooks = Hooks(ops.tracker)
        run_auxiliary(model, value)
        assert ops.lines == [
            ("forward", "Auxiliary > Auxiliary.a", LINEAR),
            ("forward", "Auxiliary > Auxiliary.b", LINEAR),
            (None, "", "sum exp detach sum add ones_like"),
        ]
        assert hooks.events == []


@pytest.mark.parametrize(
    ("kind", "around"), [(MODULE_TRACKER, ""), (MOD_TRACKER, "Auxiliary ")], ids=["ModuleTracker", "ModTracker"]
)
def test_pytorchs_module_tracker_waits_for_all_outputs_of_a_model(kind, around):
    """c08b"""
    model = Auxiliary()
    with theirs(kind) as ops:
        run_auxiliary(model, x())
        assert ops.at("mm") == [f"{around}Auxiliary.b", f"{around}Auxiliary.b", "Auxiliary Auxiliary.a"]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        return self.b(self.a(x).relu_())


def test_work_in_place_on_an_output_is_the_parents():
    """c09"""
    model, value = InPlace(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "InPlace > InPlace.a", LINEAR),
            ("forward", "InPlace", "relu_ detach"),
            ("forward", "InPlace > InPlace.b", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "InPlace > InPlace.b", GRADIENTS),
            ("backward", "InPlace > InPlace.b -> b.weight", "detach"),
            ("backward", "InPlace", "detach threshold_backward"),
            ("backward", "InPlace > InPlace.a", WEIGHT_GRADIENT),
            ("backward", "InPlace > InPlace.a -> a.weight", "detach"),
        ]
        assert hooks.events == []
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=False)


class Passing(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.a, self.i, self.b = linear(), i, linear()

    def forward(self, x):
        return self.b(self.i(self.a(x)))


@pytest.mark.parametrize("inner", [nn.Identity(), nn.Dropout(0.5).eval()])
def test_a_module_that_gives_back_its_input_is_not_around_the_backward_of_the_one_before(inner):
    """c10"""
    model, value = Passing(inner), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "Passing > Passing.a", LINEAR),
            ("forward", "Passing > Passing.b", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Passing > Passing.b", GRADIENTS),
            ("backward", "Passing > Passing.b -> b.weight", "detach"),
            ("backward", "Passing > Passing.a", WEIGHT_GRADIENT),
            ("backward", "Passing > Passing.a -> a.weight", "detach"),
        ]
        assert hooks.events == []
        assert_gradients_are_pytorchs(hooks, model, lambda: model(value).sum().backward(), full=True)


@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_keep_a_module_that_gives_back_its_input_open(kind):
    """c10"""
    model = Passing(nn.Identity())
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm")[-1] == "Passing Passing.a Passing.i"


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear().requires_grad_(False), linear()

    def forward(self, x):
        return self.b(self.a(x))


def test_the_frozen_part_of_a_model_has_no_backward():
    """c11"""
    model, value = Halves(), x()
    with ours() as ops:
        hooks = Hooks(ops.tracker)
        model(value).sum().backward()
        assert ops.lines == [
            ("forward", "Halves > Halves.a", LINEAR),
            ("forward", "Halves > Halves.b", LINEAR),
            LOSS,
            LOSS_GRADIENT,
            ("backward", "Halves > Halves.b", WEIGHT_GRADIENT),
            ("backward", "Halves > Halves.b -> b.weight", "detach"),
        ]
        assert hooks.events == []
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
