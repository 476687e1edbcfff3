"""A proof leaves the model, its arguments and the generators as they were, also when the model raises."""

import copy
import random

import pytest
import torch
from torch import nn

import modtrace
from zoo import Failing


class Busy(nn.Module):
    """Changes whatever a forward can change."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0
        self.seen = []

    def forward(self, x, cache):
        self.calls += 1
        self.seen.append(x)
        self.stashed = x * random.random()
        self.count += 1
        cache["x"] = x
        x.mul_(2)
        return self.norm(self.layer(x)) + torch.rand(4)


def state_of(model):
    return {name: each.clone() for name, each in model.state_dict().items()}


def test_model_and_arguments_are_as_they_were(seeded):
    model, x, cache = Busy(), torch.randn(3, 4), {}
    model.layer.weight.grad = given = torch.ones(4, 4)
    before, content = state_of(model), x.clone()
    generators = torch.get_rng_state(), random.getstate()
    found = modtrace.verify(model, (x, cache))
    assert found, f"\n{found}"
    assert all(torch.equal(each, before[name]) for name, each in state_of(model).items())
    assert torch.equal(x, content) and cache == {}
    assert (model.calls, model.seen, hasattr(model, "stashed")) == (0, [], False)
    assert model.layer.weight.grad is given and torch.equal(given, torch.ones(4, 4))
    assert model.layer.bias.grad is None
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]


def test_model_that_raises_is_as_it_was_and_raises(seeded):
    model = nn.Sequential(nn.BatchNorm1d(4), Failing(ValueError("boom")))
    model[1].first.weight.grad = given = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"^boom$"):
        modtrace.verify(model, (torch.randn(2, 4),))
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert model[1].first.weight.grad is given and torch.equal(given, torch.ones(4, 4))


def test_no_backward_runs_into_a_graph_of_the_users(seeded):
    weight = torch.randn(4, requires_grad=True)
    x = (weight * 2).expand(3, 4)
    assert modtrace.verify(nn.Linear(4, 4), (x,))
    assert weight.grad is None
    x.sum().backward()
    assert weight.grad.tolist() == [6.0, 6.0, 6.0, 6.0]


def test_without_grad_mode_there_is_no_backward(seeded):
    with torch.no_grad():
        found = modtrace.verify(nn.Linear(4, 4), (torch.randn(2, 4),))
    assert found
    assert found.unchecked == (("backward", "no output with real numbers requires a gradient"),)
