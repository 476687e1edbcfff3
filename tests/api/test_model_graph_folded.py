"""`ModelGraph` of real training: choosing among folded modules, steps of a recording that goes on, several roots."""

import pytest
import torch
from torch import nn

import modtrace
from modtrace.api.model_graph import ModelGraph


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def folded() -> ModelGraph:
    model = Blocks()
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return rec.graph().without_views().fold()


FOLDED = [("forward/Blocks/blocks.0", 3), ("backward/Blocks/blocks.2", 3)]


@pytest.mark.parametrize("path", ["blocks.0", "blocks.1", "blocks.2", "blocks.0..2"])
def test_any_of_the_folded_modules_closes_all_of_them_in_every_phase(folded: ModelGraph, path: str):
    closed = [(each.key, each.repeats) for each in folded.collapse(path).nodes if each.kind == "layer"]
    assert closed == FOLDED


@pytest.mark.parametrize("path", ["blocks.0", "blocks.1", "blocks.2", "blocks.0..2"])
def test_any_of_the_folded_modules_opens_all_of_them_in_every_phase(folded: ModelGraph, path: str):
    opened = folded.collapse(depth=2).expand(path)
    assert [(each.key, each.repeats) for each in opened.boxes if each.repeats > 1] == FOLDED


def test_graph_of_a_recording_that_goes_on_stays_that_of_its_step():
    model = nn.Linear(2, 2)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        for _ in range(2):
            model(torch.ones(1, 2))
        graph = rec.graph()
        for _ in range(3):
            model(torch.ones(1, 2))
        step = graph.view.step
        assert step is not None
        for other in (graph.without_views(), graph.filter(phase="forward"), graph.collapse(depth=0)):
            assert other.view.step is not None and other.view.step.step == step.step


def test_parameters_of_several_roots_are_named_the_same_whichever_is_called_first():
    one, other = nn.Linear(3, 3), nn.ReLU()
    with modtrace.record({"one": one, "other": other}, ops=True, values=None, strict=True) as rec:
        for roots in ((one, other), (other, one)):
            for root in roots:
                root(torch.ones(1, 3))
            rec.step()
    for step in (0, 1):
        keys = {each.key for each in rec.graph(step).nodes if each.kind in ("parameter", "output")}
        assert keys == {
            "parameter:one/weight",
            "parameter:one/bias",
            "forward/output:one/output",
            "forward/output:other/output",
        }


def test_module_that_is_put_in_later_has_named_parameters():
    with modtrace.record(ops=True, values=None, strict=True) as rec:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model(torch.ones(2, 3))
        model[1] = nn.Linear(3, 4)
        model(torch.ones(2, 3))
        model.double()
        model(torch.ones(2, 3).double())
    for step in (1, 2):
        names = {each.name for each in rec.graph(step).nodes if each.kind == "parameter"}
        assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_lazy_parameters_are_named_once_they_are_there():
    model = nn.Sequential(nn.LazyLinear(3))
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        for _ in range(2):
            model(torch.ones(2, 5))
            rec.step()
    assert {each.name for each in rec.graph(1).nodes if each.kind == "parameter"} == {"0.weight", "0.bias"}


def test_names_of_ops_cannot_choose_where_there_are_none():
    model = nn.Linear(2, 2)
    with modtrace.record(model, strict=True) as rec:
        model(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"filter\(op='\*mm'\): no ops were recorded in this step"):
        rec.graph().filter(op="*mm")
