"""Laws of what is seen of a graph, whatever is chosen together: names are distinct, edges lead on unless they loop."""

import itertools
from typing import Any

import pytest
import torch

import modtrace
from builders import RecordingBuilder
from helpers.architectures import ARCHITECTURES
from helpers.typed_graphs import edge_lines
from helpers.typed_steps import begin_net, given_to, run_op
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph


def assert_lawful(graph: ModelGraph) -> None:
    """Keys are distinct, no two edges join the same two nodes, and within a phase those that are no loops lead on."""
    nodes, edges = graph.nodes, graph.edges
    assert len({each.key for each in nodes}) == len(nodes)
    assert len({each.key for each in graph.boxes}) == len(graph.boxes)
    assert len({(each.source, each.target) for each in edges}) == len(edges)
    back = [each for each in edges if each.source >= each.target and not each.is_loop]
    ends = [(nodes[each.source], nodes[each.target]) for each in back]
    assert [(one.key, other.key) for one, other in ends if one.phase == other.phase] == []


def record_blocks() -> RecordingBuilder:
    """Three blocks, each of which reads what the one before returns."""
    build, net, outer = begin_net()
    made = given_to(build, net)
    blocks = build.module("blocks", "ModuleList", parent=net)
    for at in range(3):
        block = build.module(f"blocks.{at}", "Block", parent=blocks)
        call = build.call(block, 10 * at, 10 * at + 9, parent=outer)
        made = run_op(build, call, "aten.neg.default", 10 * at + 1, made)
        made = run_op(build, call, "aten.relu.default", 10 * at + 3, made)
    build.use(made, call=outer, slot="output")
    return build


def record_parts() -> RecordingBuilder:
    """An op that returns two tensors, a view of each, and an op that reads both views."""
    build, net, outer = begin_net()
    halves = build.op(outer, "aten.chunk_copy.default", 10, 15)
    build.use(given_to(build, net), op=halves, slot="self")
    parts = [build.tensor([2], producer=halves, slot=slot) for slot in ("[0]", "[1]")]
    views = [
        run_op(build, outer, "aten.t.default", 20 + at, each, is_view=True) for at, each in enumerate(parts)
    ]
    run_op(build, outer, "aten.mul.Tensor", 30, *views)
    return build


def test_tensor_that_the_next_of_folded_layers_reads_has_a_loop():
    graph = graph_of(record_blocks().data()).fold().with_tensors()
    neg, relu = "forward/Net/blocks.0/aten.neg.default", "forward/Net/blocks.0/aten.relu.default"
    assert edge_lines(graph) == [
        f"input:[0] -> {neg} ([0])",
        f"{neg} -> {neg}:tensor () ×3",
        f"{neg}:tensor -> {relu} ([0]) ×3",
        f"{relu} -> {relu}:tensor () ×3",
        f"{relu}:tensor -> {neg} ([0]) ×2 loop",
        f"{relu}:tensor -> forward/output:output (output)",
    ]
    assert_lawful(graph)


def test_tensors_without_their_views_are_told_apart():
    graph = graph_of(record_parts().data()).without_views().with_tensors()
    assert len(graph.nodes) == 1 + 1 + 2 + 1
    assert_lawful(graph)


@pytest.fixture(scope="module", params=["GPT-2", "T5", "Mixtral", "Mamba"])
def step(request: pytest.FixtureRequest) -> ModelGraph:
    """A training step of a tiny model with an optimizer that writes to many tensors at once."""
    pytest.importorskip("transformers")
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[request.param]()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        model(**inputs).loss.backward()
        optimizer.step()
    torch.set_rng_state(state)
    return rec.graph()


PARTS = ({}, {"phase": "backward"}, {"op": ["*mm*", "add*"]})
CHOICES = [*itertools.product(PARTS, (None, 1, 3), (False, True))]


@pytest.mark.parametrize(("part", "depth", "folded"), CHOICES)
def test_any_choice_is_lawful(step: ModelGraph, part: dict[str, Any], depth: int | None, folded: bool):
    chosen = choose(step, part, depth, folded)
    assert_lawful(chosen)
    assert_lawful(choose(step.without_views(), part, depth, folded))


def choose(graph: ModelGraph, part: dict[str, Any], depth: int | None, folded: bool) -> ModelGraph:
    graph = graph.filter(**part) if part else graph
    graph = graph if depth is None else graph.collapse(depth=depth)
    return graph.fold() if folded else graph


def test_tensors_of_all_ops_are_told_apart(step: ModelGraph):
    assert_lawful(step.with_tensors())


@pytest.mark.parametrize("depth", [1, 3])
def test_tensors_between_modules_are_lawful(step: ModelGraph, depth: int):
    assert_lawful(choose(step, {}, depth, False).with_tensors())


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_no_op_and_no_flop_is_lost_by_collapsing(step: ModelGraph, depth: int):
    whole = step.without_views()
    seen = whole.collapse(depth=depth)
    assert sum(each.ops for each in seen.nodes) == sum(each.ops for each in whole.nodes)
    known = [sum(each.flops or 0 for each in one.nodes) for one in (whole, seen)]
    assert known[0] == known[1] or any(each.flops is None for each in whole.nodes if each.kind == "op")
