"""Small models, each with one difficulty in which PyTorch's trackers were tried, with keyword arguments."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.tracker_case_models import MLP, linear


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(linear()), nn.Sequential(linear())

    def forward(self, x):
        return self.a(x) + self.b(x)


class Residual(nn.Module):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, x):
            return x + self.l(x)

    def __init__(self):
        super().__init__()
        self.first, self.block = linear(), self.Block()

    def forward(self, x):
        return self.block(self.first(x))


class Pair(nn.Module):
    """Two layers, between which a subclass does something."""

    def __init__(self):
        super().__init__()
        self.a, self.i, self.b = linear(), nn.Identity(), linear()

    def forward(self, x):
        return self.b(self.i(self.a(x)))


class GivesInnerOutput(Pair):
    def forward(self, x):
        h = self.a(x)
        return self.b(h), h


class WorksInPlace(Pair):
    def forward(self, x):
        return self.b(self.a(x).relu_())


class CallsItself(Pair):
    def forward(self, x, depth=1):
        x = self.a(x)
        return (self(x, depth - 1) if depth else x).neg()


class CallsTwice(Pair):
    def forward(self, x):
        return self.a(self.a(x))


class Catches(Pair):
    """A child raises in the middle of its work."""

    class Bad(nn.Module):
        def forward(self, x):
            x.exp()
            raise ValueError("so it goes")

    def __init__(self):
        super().__init__()
        self.bad = self.Bad()

    def forward(self, x):
        try:
            return self.bad(x)
        except ValueError:
            return self.b(x.neg())


class ChecksChild(Pair):
    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant, self.i = reentrant, WorksInPlace()

    def forward(self, x):
        return checkpoint(self.i, self.a(x), use_reentrant=self.reentrant)


def frozen():
    model = Pair()
    model.a.requires_grad_(False)
    return model


@dataclass
class Out:
    y: torch.Tensor
    note: str = ""


class ModelOutput(OrderedDict):
    """As transformers has it: a dict that is read by attributes."""

    def __getattr__(self, name):
        return self[name]


class Returning(nn.Module):
    """A child returns an object, or is given one, or a keyword."""

    class Returns(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind, self.l = kind, linear()

        def forward(self, x):
            return self.kind(y=self.l(x).neg())

    def __init__(self, kind):
        super().__init__()
        self.i, self.j = self.Returns(kind), linear()

    def forward(self, x):
        return self.j(self.i(x).y)


class Taking(nn.Module):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, *, x):
            return self.l(x.y if isinstance(x, Out) else x)

    def __init__(self, kind=None):
        super().__init__()
        self.j, self.i, self.kind = linear(), self.Takes(), kind

    def forward(self, x):
        y = self.j(x)
        return self.i(x=y if self.kind is None else self.kind(y))


class UsesOneOfTwoOutputs(nn.Module):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = linear()

        def forward(self, x):
            y = self.l(x)
            return y.neg(), y.exp()

    def __init__(self):
        super().__init__()
        self.i, self.j = self.Two(), linear()

    def forward(self, x):
        return self.j(self.i(x)[0])


def loss_in(output: Any) -> torch.Tensor:
    """Of the loss that a model computes itself, or of all that it returns."""
    if hasattr(output, "loss"):
        return output.loss
    return sum(each.exp().sum() for each in (output if isinstance(output, tuple) else (output,)))


SMALL: dict[str, Callable[[], nn.Module]] = {
    "chain": MLP,
    "branches": Branching,
    "residual": Residual,
    "one of two outputs": UsesOneOfTwoOutputs,
    "inner output in the loss": GivesInnerOutput,
    "work in place": WorksInPlace,
    "input given back": Pair,
    "frozen part": frozen,
    "module called twice": CallsTwice,
    "module that calls itself": CallsItself,
    "exception caught": Catches,
    "dataclass returned": lambda: Returning(Out),
    "ModelOutput returned": lambda: Returning(ModelOutput),
    "called by keyword": Taking,
    "dataclass given": lambda: Taking(Out),
    "checkpoint": ChecksChild,
    "reentrant checkpoint": lambda: ChecksChild(True),
}
