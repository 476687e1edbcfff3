"""The thread that built a running graph is found by one visit of each node, as by a walk from each node."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.collect.backward import graph_watch
from modtrace.collect.backward.graph_watch import GraphOwners, _segment_of
from modtrace.collect.backward.watcher import BackwardWatcher
from modtrace.collect.scopes import process
from zoo import TiedGPT


def run_in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def nodes_of(tensor: torch.Tensor) -> list[Any]:
    pending, nodes = [tensor.grad_fn], {}
    while pending:
        node = pending.pop()
        if node not in nodes:
            nodes[node] = None
            pending += [below for below, _ in node.next_functions if below is not None]
    return list(nodes)


def below_by_a_walk(node: Any) -> frozenset[Any]:
    """Walks from the node down to the first outputs of outermost calls, whatever was found before."""
    found = set()
    pending, seen = [node], {node}
    while pending:
        at = pending.pop()
        segment = _segment_of(at)
        if segment is not None:
            found.add(segment.log)
            continue
        for below, _ in at.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)
    return frozenset(found)


class Asked:
    """What `owner` has answered, what was found below nodes, what a walk finds, and how many nodes were visited."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.numbers_below: list[tuple[list[int], list[int]]] = []
        self.visited = 0


@pytest.fixture
def asked(monkeypatch) -> Iterator[Asked]:
    found = Asked()
    owner, below, walk = BackwardWatcher.owner, GraphOwners.below, graph_watch.walk_graph

    def answered(watcher: BackwardWatcher, log: Any, task: int, node: Any) -> Any:
        answer = owner(watcher, log, task, node)
        found.answers.append(answer)
        return answer

    def both(owners: GraphOwners, node: Any) -> Any:
        answer = below(owners, node)
        found.numbers_below.append(
            tuple(sorted(log.number for log in logs) for logs in (answer, below_by_a_walk(node)))
        )
        return answer

    def counted(*args: Any) -> Iterator[Any]:
        for node in walk(*args):
            found.visited += 1
            yield node

    monkeypatch.setattr(BackwardWatcher, "owner", answered)
    monkeypatch.setattr(GraphOwners, "below", both)
    monkeypatch.setattr(graph_watch, "walk_graph", counted)
    yield found
    assert [visited for visited, _ in found.numbers_below] == [walked for _, walked in found.numbers_below]


def ask_at_each_node(loss: torch.Tensor) -> int:
    """Asks where the run is before each node of a graph, as each op on the engine's own threads does."""
    nodes = nodes_of(loss)
    for node in nodes:
        if node.next_functions:
            node.register_prehook(lambda _: process.current().where() and None)
    return len(nodes)


@pytest.mark.parametrize("layers", [1, 4])
def test_each_node_is_visited_once(asked, layers):
    model = TiedGPT(layers=layers)
    with modtrace.record(model, values=None):
        loss = model(torch.zeros(2, 8, dtype=torch.long)).sum()
        nodes = ask_at_each_node(loss)
        run_in_thread(loss.backward)
    assert asked.visited <= nodes
    assert {answer is None for answer in asked.answers} == {False}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_regions(asked, reentrant):
    model = TiedGPT(layers=3)
    with modtrace.record(model, values=None, backward_times=True):
        loss = model(torch.zeros(2, 8, dtype=torch.long), reentrant).sum()
        ask_at_each_node(loss)
        run_in_thread(loss.backward)
    assert len(asked.answers) > 10


class Halves(nn.Module):
    """Its parts are run on threads of their own by those who use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))


@pytest.mark.parametrize("runs_backward", [run_in_thread, lambda function: function()])
def test_graph_that_two_threads_have_built(asked, runs_backward):
    model = Halves()
    with modtrace.record(model, values=None, backward_times=True):
        x = torch.ones(2, 4, requires_grad=True) * 1
        first = run_in_thread(lambda: model.first(x))
        second = run_in_thread(lambda: model.second(first + x))
        third = model.third(x).sum() + (model.first[0].weight ** 2).sum()
        loss = second.sum() + third + first.sum()
        ask_at_each_node(loss)
        runs_backward(loss.backward)
        assert len({*asked.answers} - {None}) >= 2


def test_backward_inside_of_a_backward(asked):
    model = Halves()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return model.second(checkpoint(model.first, x, use_reentrant=True))

    with modtrace.record(model, values=None):
        loss = model.third(checkpoint(inner, torch.ones(2, 4, requires_grad=True), use_reentrant=True)).sum()
        ask_at_each_node(loss)
        run_in_thread(loss.backward)
    assert len(asked.answers) >= 4


def test_graphs_of_several_outputs_are_visited_once(asked):
    model = Halves()
    with modtrace.record(model, values=None):
        shared = model.first(torch.ones(2, 4))
        losses = [model.second(shared).sum(), model.third(shared).sum(), model.third(shared * 2).sum()]
        nodes = {node for loss in losses for node in nodes_of(loss)}
        for loss in losses:
            ask_at_each_node(loss)
        run_in_thread(lambda: torch.autograd.backward(losses))
    assert asked.visited <= len(nodes)
