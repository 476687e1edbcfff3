"""Which layers, nodes and edges the execution graph of a recording has."""

import pytest

from builders import RecordingBuilder
from helpers.typed_graphs import box_lines, edge_lines, node_lines
from helpers.typed_steps import begin_net, given_to, node, record_training, run_op
from modtrace.api.graph import graph_of

# Layers.


def test_calls_are_boxes_and_modules_that_only_hold_others_too():
    build, net, outer = begin_net()
    blocks = build.module("blocks", "ModuleList", parent=net)
    first = build.module("blocks.0", "Block", parent=blocks)
    inner = build.call(first, 10, 100, parent=outer)
    run_op(
        build,
        outer,
        "aten.neg.default",
        200,
        run_op(build, inner, "aten.relu.default", 20, given_to(build, net)),
    )
    graph = graph_of(build.data())
    assert box_lines(graph) == ["forward/Net", "  forward/Net/blocks", "    forward/Net/blocks.0"]
    assert [(each.kind, each.label, each.depth) for each in graph.boxes] == [
        ("module", "Net", 0),
        ("container", "blocks", 1),
        ("module", "0", 2),
    ]


def test_module_that_calls_itself_is_a_box_in_a_box():
    build, net, outer = begin_net()
    inner = build.call(net, 10, 500, parent=outer, nth=1)
    run_op(
        build,
        outer,
        "aten.neg.default",
        600,
        run_op(build, inner, "aten.relu.default", 20, given_to(build, net)),
    )
    graph = graph_of(build.data())
    assert box_lines(graph) == ["forward/Net", "  forward/Net@1"]
    assert node_lines(graph.collapse(depth=0)) == ["input:[0]", "forward/Net"]


def test_wrapper_and_what_it_wraps_are_one_box():
    build = RecordingBuilder()
    wrapper = build.module("", "DistributedDataParallel", name="Net")
    net = build.module("", "Net", parent=wrapper, raw_path="module")
    build.step(0, 0, 1000)
    inner = build.call(net, 10, 800, parent=build.call(wrapper, 0, 900))
    run_op(build, inner, "aten.relu.default", 20, given_to(build, net))
    graph = graph_of(build.data())
    assert [(each.key, each.type) for each in graph.boxes] == [
        ("forward/Net", "DistributedDataParallel(Net)")
    ]


def test_shared_module_stands_at_both_places_and_its_parameter_around_both():
    build, net, outer = begin_net()
    encoder, decoder = (build.module(each, each.title(), parent=net) for each in ("encoder", "decoder"))
    shared = build.module("encoder.emb", "Embedding", parent=encoder, aliases=["decoder.emb"])
    weight = build.tensor([9, 2], site=build.site(shared, "parameter", "weight"))
    given = given_to(build, net)
    for nth, part in enumerate((encoder, decoder)):
        start = 100 * nth
        around = build.call(part, start + 10, start + 90, parent=outer)
        inner = build.call(shared, start + 20, start + 80, parent=around, nth=nth)
        run_op(build, inner, "aten.embedding.default", start + 30, weight, given)
    graph = graph_of(build.data())
    assert box_lines(graph) == [
        "forward/Net",
        "  forward/Net/encoder",
        "    forward/Net/encoder.emb",
        "  forward/Net/decoder",
        "    forward/Net/decoder.emb@1",
    ]
    weight_node = node(graph, "parameter:encoder.emb.weight")
    assert graph.boxes[weight_node.box].key == "forward/Net"


def test_calls_that_run_no_op_are_boxes_where_they_ran():
    build, net, outer = begin_net()
    drop = build.module("drop", "Dropout", parent=net)
    rest = build.module("rest", "Sequential", parent=net)
    same = build.module("rest.0", "Identity", parent=rest)
    build.call(drop, 10, 19, parent=outer, nth=0)
    made = run_op(build, outer, "aten.relu.default", 20, given_to(build, net))
    build.call(drop, 30, 39, parent=outer, nth=1)
    run_op(build, outer, "aten.neg.default", 40, made)
    build.call(same, 60, 69, parent=build.call(rest, 50, 70, parent=outer))
    graph = graph_of(build.data())
    assert box_lines(graph) == [
        "forward/Net",
        "  forward/Net/drop",
        "  forward/Net/drop@1",
        "  forward/Net/rest",
        "    forward/Net/rest.0",
    ]
    assert node_lines(graph) == [
        "forward/Net/drop/call:Dropout",
        "input:[0]",
        "forward/Net/aten.relu.default",
        "forward/Net/drop@1/call:Dropout",
        "forward/Net/aten.neg.default",
        "forward/Net/rest.0/call:Identity",
    ]
    assert edge_lines(graph) == [
        "input:[0] -> forward/Net/aten.relu.default ([0])",
        "forward/Net/aten.relu.default -> forward/Net/aten.neg.default ([0])",
    ]
    assert node_lines(graph.collapse(depth=1)) == [
        "forward/Net/drop",
        "input:[0]",
        "forward/Net/aten.relu.default",
        "forward/Net/drop@1",
        "forward/Net/aten.neg.default",
        "forward/Net/rest",
    ]
    assert [each.ops for each in graph.boxes] == [2, 0, 0, 0, 0]
    assert node_lines(graph.filter(op="*neg*")) == [
        "earlier:aten.relu.default",
        "forward/Net/aten.neg.default",
    ]
    assert node_lines(graph.filter(path="drop")) == [
        "forward/Net/drop/call:Dropout",
        "forward/Net/drop@1/call:Dropout",
    ]


def test_call_that_compiled_code_ran_in_has_unknown_costs():
    build, net, outer = begin_net()
    part = build.module("part", "Linear", parent=net)
    build.call(part, 10, 19, parent=outer, compiled=True)
    build.call(build.module("drop", "Dropout", parent=net), 30, 39, parent=outer)
    run_op(build, outer, "aten.relu.default", 40, given_to(build, net))
    graph = graph_of(build.data())
    assert [(each.key, each.flops, each.bytes_read, each.saved_bytes) for each in graph.nodes[:2]] == [
        ("forward/Net/part/call:Linear", None, None, None),
        ("forward/Net/drop/call:Dropout", 0, 0, 0),
    ]


def test_costs_of_calls_without_ops_are_not_known():
    build, net, outer = begin_net()
    build.call(build.module("part", "Linear", parent=net), 10, 19, parent=outer)
    graph = graph_of(build.data())
    costs = [
        (each.key, each.flops, each.bytes_read, each.saved_bytes) for each in (*graph.nodes, *graph.boxes)
    ]
    assert [key for key, *_ in costs] == ["forward/Net/part", "forward/Net"]
    assert {tuple(cost) for _, *cost in costs} == {(None, None, None)}


def test_compiled_code_saves_as_a_whole_and_what_is_inside_is_not_known():
    build, net, outer = begin_net()
    part = build.call(
        build.module("part", "Linear", parent=net), 10, 19, parent=outer, compiled=True, saved_bytes=40
    )
    made = run_op(build, part, "aten.relu.default", 11, given_to(build, net))
    run_op(build, outer, "aten.neg.default", 40, made, saved_bytes=8)
    graph = graph_of(build.data())
    assert [(each.key, each.saved_bytes) for each in graph.boxes] == [
        ("forward/Net", 48),
        ("forward/Net/part", 40),
    ]
    saved = {each.key: each.saved_bytes for each in graph.nodes}
    assert saved["forward/Net/part/aten.relu.default"] is None
    assert saved["forward/Net/aten.neg.default"] == 8


def test_two_roots_are_two_boxes():
    build = RecordingBuilder()
    build.step(0, 0, 1000)
    made = build.tensor([2])
    for at, name in enumerate(("Net", "Net#1")):
        root = build.module("", "Net", name=name)
        call = build.call(root, 10 * at, 10 * at + 9)
        made = run_op(build, call, "aten.relu.default", 10 * at + 1, made)
        build.use(made, call=call, slot="output")
    graph = graph_of(build.data())
    assert box_lines(graph) == ["forward/Net", "forward/Net#1"]
    assert edge_lines(graph) == [
        "constant:constant -> forward/Net/aten.relu.default ([0])",
        "forward/Net/aten.relu.default -> forward/output:Net/output (output)",
        "forward/Net/aten.relu.default -> forward/Net#1/aten.relu.default ([0])",
        "forward/Net#1/aten.relu.default -> forward/output:Net#1/output (output)",
    ]


def test_call_of_a_module_that_is_not_known_is_a_box():
    build, net, outer = begin_net()
    inner = build.call(55, 10, 50, parent=build.call(None, 5, 60, parent=outer))
    run_op(build, inner, "aten.relu.default", 20, given_to(build, net))
    assert box_lines(graph_of(build.data())) == [
        "forward/Net",
        "  forward/Net/(unknown)",
        "    forward/Net/(unknown).(unknown#55)",
    ]


# Nothing, or no ops.


@pytest.mark.parametrize("with_step", [False, True])
def test_recording_of_nothing_gives_an_empty_graph(with_step: bool):
    build = RecordingBuilder()
    if with_step:
        build.step(0, 0, 10)
    graph = graph_of(build.data())
    assert (graph.nodes, graph.edges, graph.boxes) == ((), (), ())
    assert graph.collapse(depth=1).fold().without_views().with_tensors().nodes == ()


def test_step_without_ops_gives_an_empty_graph_where_others_have_ops():
    build, net, outer = begin_net()
    run_op(build, outer, "aten.relu.default", 10, given_to(build, net))
    build.step(1, 1000, 2000)
    graph = graph_of(build.data(), 1)
    assert (graph.nodes, graph.edges, graph.boxes) == ((), (), ())


def test_step_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="step 7"):
        graph_of(record_training().data(), 7)


def test_without_ops_calls_are_nodes_joined_in_the_order_in_which_they_began():
    build, net, outer = begin_net()
    parts = build.module("parts", "ModuleList", parent=net)
    calls = [
        build.call(
            build.module(f"parts.{at}", "Part", parent=parts), 10 * at + 10, 10 * at + 19, parent=outer
        )
        for at in range(3)
    ]
    around = build.backward(outer, 910, 980)
    for at, each in enumerate(reversed(calls)):
        build.backward(each, 920 + 10 * at, 925 + 10 * at, parent=around)
    build.optimizer(985, 990)
    graph = graph_of(build.data())
    assert edge_lines(graph) == [
        "forward/Net/parts.0 -> forward/Net/parts.1 ()",
        "forward/Net/parts.1 -> forward/Net/parts.2 ()",
        "backward/Net/parts.2 -> backward/Net/parts.1 ()",
        "backward/Net/parts.1 -> backward/Net/parts.0 ()",
    ]
    assert {each.kind for each in graph.edges} == {"next"}
    assert node_lines(graph)[-1] == "optimizer/step"
    assert node_lines(graph.filter(path="parts.*", phase="backward")) == [
        "backward/Net/parts.2",
        "backward/Net/parts.1",
        "backward/Net/parts.0",
    ]
