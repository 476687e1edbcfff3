"""What the cases of trackers share: a small model, its ops, and a comparison with PyTorch's own gradients."""

import pytest
import torch
from torch import nn

from helpers.tracker_cases import (
    TorchsGradients,
)

#: Of every module of cases: the same parameters in every run, and torch's own hooks may warn.
MARKS = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

#: The ops of a Linear without bias: its forward; its backward with and without a gradient for the input.
LINEAR = "t mm"


GRADIENTS = "t mm t t mm t"


WEIGHT_GRADIENT = "t mm t t"


#: ... and for the input alone.
INPUT_GRADIENT = "t mm"


LOSS = (None, "", "sum ones_like")


LOSS_GRADIENT = ("backward", "", "expand")


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


# What goes in and out. In the events `+M` is the pre hook and `-M` the post hook. Of backwards that end at one node,
# those of calls with an input that needs a gradient are told the outer before the inner, then the others.


def assert_gradients_are_pytorchs(hooks, model, run, *, full):
    """Ours are those of a second run with PyTorch's own hooks."""
    model.zero_grad()
    with TorchsGradients(model, full=full) as torchs:
        run()
    hooks.assert_same_gradients(torchs)
