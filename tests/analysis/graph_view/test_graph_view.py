"""What is seen of an execution graph: laws that hold for every recording, and small ones spelled out."""

import itertools
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import modtrace
from builders import RecordingBuilder
from helpers.architectures import ARCHITECTURES
from helpers.fuzzed import FUZZ
from helpers.typed_graphs import Action, box_lines, edge_lines, node_lines, programs, run_program
from helpers.typed_steps import begin_net, given_to, run_op, typed_net
from modtrace.analysis.graph_view.records import LAYER, GraphView
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph

Choose = Callable[[ModelGraph], ModelGraph]

choices: dict[str, Choose] = {
    "all": lambda graph: graph,
    "root": lambda graph: graph.collapse(depth=0),
    "depth 1": lambda graph: graph.collapse(depth=1),
    "depth 2": lambda graph: graph.collapse(depth=2),
    "all modules": lambda graph: graph.collapse("**"),
    "folded": lambda graph: graph.fold(),
    "folded, depth 1": lambda graph: graph.collapse(depth=1).fold(),
    "without views": lambda graph: graph.without_views(),
}
chosen = st.sampled_from(list(choices.values()))


def graph_from(actions: list[Action], **more: int) -> ModelGraph:
    return graph_of(run_program(actions, **more), 1)


def things(view: GraphView) -> list[tuple[bool, int]]:
    """What each visible node stands for: whether it is a layer, and its row."""
    return [(each.kind == LAYER, each.first) for each in view.nodes]


def closed_layer(graph: ModelGraph, layer: int, closed: set[int]) -> int | None:
    """The outermost closed layer around a layer, itself included."""
    found = None
    while layer >= 0:
        found = layer if layer in closed else found
        layer = int(graph.columns.layers.parent[layer])
    return found


def expected_edges(graph: ModelGraph, depth: int) -> Counter[tuple[tuple[bool, int], tuple[bool, int]]]:
    """How often each thing reads another one, when the layers from `depth` on and those that hold none are closed."""
    columns = graph.columns
    depths, holds_none = columns.layers.depth, ~np.isin(np.arange(len(columns.layers)), columns.layers.parent)
    closed = set(np.flatnonzero((depths >= depth) | (holds_none & (depths > 0))).tolist())
    if depth > depths.max(initial=0):
        closed = set()

    def stands_for(node: int) -> tuple[bool, int]:
        layer = closed_layer(graph, int(columns.nodes.layer[node]), closed)
        return (False, node) if layer is None else (True, layer)

    pairs = zip(columns.edges.source.tolist(), columns.edges.target.tolist(), strict=True)
    lifted = ((stands_for(source), stands_for(target)) for source, target in pairs)
    return Counter((source, target) for source, target in lifted if source != target)


@settings(max_examples=14 * FUZZ, deadline=None)
@given(programs, st.integers(0, 4))
def test_every_edge_leads_between_what_stands_for_its_ends(actions: list[Action], depth: int) -> None:
    graph = graph_from(actions)
    view = graph.collapse(depth=depth).view
    at = things(view)
    found = {(at[each.source], at[each.target]): each.reads for each in view.edges}
    assert len(found) == len(view.edges)
    assert found == dict(expected_edges(graph, depth))


def assert_lawful(graph: ModelGraph) -> None:
    """Keys are distinct, no two edges join the same two nodes, and within a phase those that are no loops lead on."""
    nodes, edges = graph.nodes, graph.edges
    assert len({each.key for each in nodes}) == len(nodes)
    assert len({each.key for each in graph.boxes}) == len(graph.boxes)
    assert len({(each.source, each.target) for each in edges}) == len(edges)
    back = [each for each in edges if each.source >= each.target and not each.is_loop]
    ends = [(nodes[each.source], nodes[each.target]) for each in back]
    assert [(one.key, other.key) for one, other in ends if one.phase == other.phase] == []


@settings(max_examples=17 * FUZZ, deadline=None)
@given(programs, chosen)
def test_nothing_is_visible_or_counted_twice_and_what_makes_something_stands_before_what_reads_it(
    actions: list[Action], choose: Choose
) -> None:
    graph = graph_from(actions)
    chosen_graph = choose(graph)
    assert_lawful(chosen_graph)
    view = chosen_graph.view
    assert len(set(things(view))) == len(view.nodes)
    assert not {each.key for each in view.nodes} & {each.key for each in view.boxes}
    assert all(each.box < at for at, each in enumerate(view.boxes))
    assert all(-1 <= each.box < len(view.boxes) for each in view.nodes)
    assert all(-1 <= each.twin < len(view.nodes) for each in view.nodes)
    assert all((each.source >= each.target) == each.is_loop for each in view.edges)
    left_out = len(graph.columns.nodes) - len(chosen_graph.columns.nodes)  # views
    total = sum(each.ops for each in graph.nodes) - left_out
    assert sum(each.ops for each in chosen_graph.nodes) == total
    own = [each for each in chosen_graph.nodes if each.kind == "op"]
    assert sum(each.flops or 0 for each in own) == sum(each.ops for each in own)


@settings(max_examples=11 * FUZZ, deadline=None)
@given(programs, st.integers(0, 5), st.integers(1, 1000), chosen)
def test_names_do_not_depend_on_ids_and_times(
    actions: list[Action], before: int, pace: int, choose: Choose
) -> None:
    one, other = choose(graph_from(actions)), choose(graph_from(actions, before=before, pace=pace))
    assert node_lines(one) == node_lines(other)
    assert edge_lines(one) == edge_lines(other)
    assert box_lines(one) == box_lines(other)


@settings(max_examples=11 * FUZZ, deadline=None)
@given(programs, st.integers(0, 4))
def test_expanding_what_was_collapsed_gives_the_same_view(actions: list[Action], depth: int) -> None:
    graph = graph_from(actions)
    assert graph.collapse(depth=depth).expand().view == graph.view
    assert graph.collapse(depth=depth + 1).collapse(depth=depth).view == graph.collapse(depth=depth).view


@settings(max_examples=14 * FUZZ, deadline=None)
@given(programs, chosen)
def test_tensors_stand_between_the_same_ends(actions: list[Action], choose: Choose) -> None:
    graph = choose(graph_from(actions))
    plain, shown = graph.view, graph.with_tensors().view
    at = things(shown)
    is_tensor = [each.kind == "tensor" for each in shown.nodes]
    maker = {each.target: each.source for each in shown.edges if is_tensor[each.target]}
    found: Counter[tuple[tuple[bool, int], tuple[bool, int]]] = Counter()
    for each in shown.edges:
        if not is_tensor[each.target]:
            found[at[maker.get(each.source, each.source)], at[each.target]] += each.reads
    names = things(plain)
    assert found == Counter({(names[each.source], names[each.target]): each.reads for each in plain.edges})
    assert set(maker) == {number for number, each in enumerate(is_tensor) if each}


def record_pair() -> RecordingBuilder:
    """A module that returns what two ops have made; another op reads both."""
    build, net, outer = begin_net()
    pair = build.module("pair", "Pair", parent=net)
    inner = build.call(pair, 10, 200, parent=outer)
    given = build.tensor([2], site=build.site(net, "input", "[0]"))
    ops = [
        build.op(inner, "aten.relu.default", 20, 30),
        build.op(inner, "aten.tanh.default", 40, 50),
        build.op(outer, "aten.add.Tensor", 300, 310),
    ]
    for op in ops[:2]:
        build.use(given, op=op, slot="self")
        build.use(build.tensor([2], producer=op), op=ops[2], slot="self" if op == ops[0] else "other")
    return build


def test_closed_module_takes_the_edges_of_what_is_inside() -> None:
    graph = graph_of(record_pair().data()).collapse("pair")
    assert edge_lines(graph) == [
        "input:[0] -> forward/Net/pair (self) ×2",
        "forward/Net/pair -> forward/Net/aten.add.Tensor (self) ×2",
    ]
    assert edge_lines(graph.collapse(depth=0)) == ["input:[0] -> forward/Net (self) ×2"]
    assert edge_lines(graph.expand("pair")) == [
        "input:[0] -> forward/Net/pair/aten.relu.default (self)",
        "input:[0] -> forward/Net/pair/aten.tanh.default (self)",
        "forward/Net/pair/aten.relu.default -> forward/Net/aten.add.Tensor (self)",
        "forward/Net/pair/aten.tanh.default -> forward/Net/aten.add.Tensor (other)",
    ]


def test_two_tensors_of_a_closed_module_have_two_names() -> None:
    graph = graph_of(record_pair().data()).collapse("pair").with_tensors()
    keys = node_lines(graph)
    assert sorted(set(keys)) == sorted(keys)


def test_tensors_that_one_op_wrote_to_are_not_one() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 1000)
    step = build.optimizer(0, 900)
    ops = [
        build.op(step, f"aten._foreach_{name}_.List", at, at + 5) for at, name in ((10, "mul"), (20, "add"))
    ]
    for at, size in enumerate((2, 3)):
        build.use(build.tensor([size]), op=ops[0], slot=f"self[{at}]")
        build.use(build.tensor([size], producer=ops[0]), op=ops[1], slot=f"self[{at}]")
    shown = graph_of(build.data()).with_tensors().nodes
    assert [each.shape for each in shown if each.kind == "tensor"] == [(2,), (3,)]


def test_fold_of_a_part_that_is_open_shows_the_way_from_one_to_the_next_as_a_loop() -> None:
    block = [("view", 0, 0), ("op", 0, 0), ("exit", 0, 0)]
    graph = graph_of(run_program([("enter", 1, 0), *block, ("enter", 2, 0), *block]), 1)
    graph = graph.filter(phase="forward").fold()
    assert box_lines(graph) == ["forward/Net", "  forward/Net/blocks", "    forward/Net/blocks.0 ×2"]
    assert edge_lines(graph) == [
        "input:[0] -> forward/Net/aten.neg.default (self)",
        "forward/Net/aten.neg.default -> forward/Net/blocks.0/aten.view.default (self)",
        "forward/Net/blocks.0/aten.view.default -> forward/Net/blocks.0/aten.add.Tensor (self) ×4",
        "forward/Net/blocks.0/aten.add.Tensor -> forward/Net/blocks.0/aten.view.default (self) loop",
        "forward/Net/blocks.0/aten.add.Tensor -> forward/output:output (output)",
    ]


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


PARTS = ({}, {"phase": "backward"}, {"op": ["*mm*", "add*"]})


@pytest.mark.parametrize("architecture", ["T5", "Mixtral"])
def test_any_choice_of_a_real_training_step_is_lawful(architecture: str) -> None:
    """Its optimizer writes to many tensors at once."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[architecture]()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        model(**inputs).loss.backward()
        optimizer.step()
    step = rec.graph()
    graphs = itertools.cycle((step, step.without_views()))  # each with each part, depth and fold
    for is_folded, part, depth in itertools.product((False, True), PARTS, (None, 1, 3)):
        assert_lawful(choose(next(graphs), part, depth, is_folded))
    for depth in (None, 1, 3):
        assert_lawful(choose(step, {}, depth, False).with_tensors())


def choose(graph: ModelGraph, part: dict[str, Any], depth: int | None, is_folded: bool) -> ModelGraph:
    graph = graph.filter(**part) if part else graph
    graph = graph if depth is None else graph.collapse(depth=depth)
    return graph.fold() if is_folded else graph


# Without views.


def record_views() -> RecordingBuilder:
    """A weight is transposed and read; what was made is viewed twice, written to through the view, and read."""
    build, net = typed_net(1000)
    call = build.call(net, 0, 900)
    weight = build.tensor([2, 3], site=build.site(net, "parameter", "weight"))
    last = build.tensor([4, 3], site=build.site(net, "input", "[0]"))
    names = ("t", "mm", "view", "select", "zero_", "sum")
    views = ("t", "view", "select")
    ops = [
        build.op(call, f"aten.{each}.default", 10 * at, 10 * at + 5, is_view=each in views)
        for at, each in enumerate(names)
    ]
    build.use(weight, op=ops[0], slot="self")
    build.use(last, op=ops[1], slot="self")
    build.use(build.tensor([3, 2], producer=ops[0]), op=ops[1], slot="mat2")
    for before, after in pairwise(ops[1:]):
        build.use(build.tensor([8], producer=before), op=after, slot="self")
    build.use(build.tensor([], producer=ops[-1]), call=call, slot="output")
    return build


def test_who_reads_a_view_reads_what_it_shows():
    graph = graph_of(record_views().data()).without_views()
    assert node_lines(graph) == [
        "parameter:weight",
        "input:[0]",
        "forward/Net/aten.mm.default",
        "forward/Net/aten.zero_.default",
        "forward/Net/aten.sum.default",
        "forward/output:output",
    ]
    assert edge_lines(graph) == [
        "input:[0] -> forward/Net/aten.mm.default (self)",
        "parameter:weight -> forward/Net/aten.mm.default (mat2)",
        "forward/Net/aten.mm.default -> forward/Net/aten.zero_.default (self)",
        "forward/Net/aten.zero_.default -> forward/Net/aten.sum.default (self)",
        "forward/Net/aten.sum.default -> forward/output:output (output)",
    ]


def test_view_of_a_leaf_is_no_tensor_that_an_op_has_made():
    graph = graph_of(record_views().data()).without_views().with_tensors()
    makers = [
        graph.nodes[each.source].key for each in graph.edges if graph.nodes[each.target].kind == "tensor"
    ]
    assert makers == [
        "forward/Net/aten.mm.default",
        "forward/Net/aten.zero_.default",
        "forward/Net/aten.sum.default",
    ]


def test_twin_that_was_a_view_is_none():
    build, net = typed_net(1000)
    call = build.call(net, 0, 500)
    view = build.op(call, "aten.view.default", 10, 20, is_view=True)
    build.use(build.tensor([2]), op=view)
    back = build.op(build.backward(call, 600, 700), "aten.mul.Tensor", 610, 620, forward=view)
    build.use(build.tensor([2], producer=view), op=back)
    graph = graph_of(build.data())
    assert [each.twin for each in graph.nodes] == [-1, -1, 1]
    assert [each.twin for each in graph.without_views().nodes] == [-1, -1]


def reads_without_views(graph: ModelGraph) -> Counter[tuple[int, int]]:
    """Who reads whom, by op_id and, for others, by their row below 0, when each view is its base."""
    nodes, edges = graph.columns.nodes, graph.columns.edges
    pairs = list(zip(edges.source.tolist(), edges.target.tolist(), strict=True))
    base = {target: source for source, target in pairs if nodes.is_view[target]}

    def find(node: int) -> int:
        while node in base:
            node = base[node]
        return node

    return Counter((find(source), target) for source, target in pairs if target not in base)


@settings(max_examples=14 * FUZZ, deadline=None)
@given(programs)
def test_every_read_that_is_not_by_a_view_is_still_there(actions: list[Action]) -> None:
    graph = graph_of(run_program(actions), 1)
    contracted = graph.without_views().columns
    views = {at for at, is_view in enumerate(graph.columns.nodes.is_view.tolist()) if is_view}
    kept = [at for at in range(len(graph.columns.nodes)) if at not in views]
    pairs = zip(contracted.edges.source.tolist(), contracted.edges.target.tolist(), strict=True)
    assert Counter((kept[source], kept[target]) for source, target in pairs) == reads_without_views(graph)
    assert not contracted.nodes.is_view.any()


def test_call_of_a_closed_layer_is_numbered_from_zero() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tanh = torch.nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tanh(self.tanh(x))

    view = modtrace.graph(Twice(), torch.ones(1)).collapse(depth=1).view
    assert [(node.name, node.call) for node in view.nodes if node.kind == LAYER] == [("tanh", 0), ("tanh", 1)]
