"""What is seen of an execution graph: laws that hold for every recording, and small ones spelled out."""

from collections import Counter
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import RecordingBuilder
from helpers.typed_graphs import Action, box_lines, edge_lines, node_lines, programs, run_program
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


@settings(max_examples=150, deadline=None)
@given(programs, st.integers(0, 4))
def test_every_edge_leads_between_what_stands_for_its_ends(actions: list[Action], depth: int) -> None:
    graph = graph_from(actions)
    view = graph.collapse(depth=depth).view
    at = things(view)
    found = {(at[each.source], at[each.target]): each.reads for each in view.edges}
    assert len(found) == len(view.edges)
    assert found == dict(expected_edges(graph, depth))


@settings(max_examples=150, deadline=None)
@given(programs, chosen)
def test_nothing_is_visible_twice_and_boxes_hold_what_they_stand_before(
    actions: list[Action], choose: Choose
) -> None:
    view = choose(graph_from(actions)).view
    assert len(set(things(view))) == len(view.nodes)
    assert all(each.box < at for at, each in enumerate(view.boxes))
    assert all(-1 <= each.box < len(view.boxes) for each in view.nodes)
    assert all(-1 <= each.twin < len(view.nodes) for each in view.nodes)
    keys = [each.key for each in view.nodes] + [each.key for each in view.boxes]
    assert len(set(keys)) == len(keys)


@settings(max_examples=150, deadline=None)
@given(programs, chosen)
def test_what_makes_something_stands_before_what_reads_it_but_for_loops(
    actions: list[Action], choose: Choose
) -> None:
    view = choose(graph_from(actions)).view
    for each in view.edges:
        assert (each.source >= each.target) == each.is_loop


@settings(max_examples=100, deadline=None)
@given(programs, st.integers(0, 5), st.integers(1, 1000), chosen)
def test_names_do_not_depend_on_ids_and_times(
    actions: list[Action], before: int, pace: int, choose: Choose
) -> None:
    one, other = choose(graph_from(actions)), choose(graph_from(actions, before=before, pace=pace))
    assert node_lines(one) == node_lines(other)
    assert edge_lines(one) == edge_lines(other)
    assert box_lines(one) == box_lines(other)


@settings(max_examples=100, deadline=None)
@given(programs, st.integers(0, 4))
def test_expanding_what_was_collapsed_gives_the_same_view(actions: list[Action], depth: int) -> None:
    graph = graph_from(actions)
    assert graph.collapse(depth=depth).expand().view == graph.view
    assert graph.collapse(depth=depth + 1).collapse(depth=depth).view == graph.collapse(depth=depth).view


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=150, deadline=None)
@given(programs, chosen)
def test_every_op_is_counted_once(actions: list[Action], choose: Choose) -> None:
    graph = graph_from(actions)
    chosen_graph = choose(graph)
    left_out = len(graph.columns.nodes) - len(chosen_graph.columns.nodes)  # views
    total = sum(each.ops for each in graph.nodes) - left_out
    assert sum(each.ops for each in chosen_graph.nodes) == total
    own = [each for each in chosen_graph.nodes if each.kind == "op"]
    assert sum(each.flops or 0 for each in own) == sum(each.ops for each in own)


def record_pair() -> RecordingBuilder:
    """A module that returns what two ops have made; another op reads both."""
    build = RecordingBuilder()
    net = build.module("", "Net")
    pair = build.module("pair", "Pair", parent=net)
    build.step(0, 0, 1000)
    outer = build.call(net, 0, 900)
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
