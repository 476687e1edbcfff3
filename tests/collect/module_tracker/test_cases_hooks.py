"""What the user's hooks are given around forwards and backwards, in which PyTorch's trackers were tried."""

from collections import OrderedDict
from dataclasses import dataclass

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
    Hooks,
    ours,
    theirs,
)

pytestmark = MARKS


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


NOT_BY_POSITION = pytest.mark.parametrize("make", [calling_by_keyword, taking_an_object])


@NOT_BY_POSITION
def test_a_module_called_by_keyword_or_with_an_object_ends_where_its_backward_does(make):
    """c05, c06c"""
    model, value = make(), x()
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


@NOT_BY_POSITION
@pytest.mark.parametrize("kind", BOTH)
def test_pytorchs_trackers_never_leave_the_backward_of_a_module_called_by_keyword_or_with_an_object(
    kind, make
):
    """c05, c06c"""
    model = make()
    with theirs(kind) as ops:
        model(x()).sum().backward()
        assert ops.at("mm") == ["M M.i M.i.l", "M M.i M.i.l", "M M.i M.j"]
