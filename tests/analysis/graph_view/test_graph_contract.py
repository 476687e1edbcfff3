"""An execution graph without its views: who read a view reads what it shows."""

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings

from builders import RecordingBuilder
from helpers.typed_graphs import Action, edge_lines, node_lines, programs, run_program
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph


def record_views() -> RecordingBuilder:
    """A weight is transposed and read; what was made is viewed twice, written to through the view, and read."""
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.step(0, 0, 1000)
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
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.step(0, 0, 1000)
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


@settings(max_examples=150, deadline=None)
@given(programs)
def test_every_read_that_is_not_by_a_view_is_still_there(actions: list[Action]) -> None:
    graph = graph_of(run_program(actions), 1)
    contracted = graph.without_views().columns
    views = {at for at, is_view in enumerate(graph.columns.nodes.is_view.tolist()) if is_view}
    kept = [at for at in range(len(graph.columns.nodes)) if at not in views]
    pairs = zip(contracted.edges.source.tolist(), contracted.edges.target.tolist(), strict=True)
    assert Counter((kept[source], kept[target]) for source, target in pairs) == reads_without_views(graph)
    assert not contracted.nodes.is_view.any()
