"""The leaves and outputs of an execution graph: what they are called, and where they stand."""

from builders import RecordingBuilder
from helpers.typed_graphs import edge_lines, node_lines
from helpers.typed_steps import begin_net, given_to, run_op
from modtrace.analysis.graph.columns import CONSTANT, EARLIER, INPUT
from modtrace.api.graph import graph_of


def test_leaves_are_named_by_what_they_are():
    build, net, outer = begin_net()
    head = build.module("head", "BatchNorm1d", parent=net)
    call = build.call(head, 10, 100, parent=outer)
    run_op(
        build,
        call,
        "aten.native_batch_norm.default",
        20,
        given_to(build, net, "[0]['x']"),
        build.tensor([2], site=build.site(head, "parameter", "weight")),
        build.tensor([2], site=build.site(head, "buffer", "running_mean")),
        build.tensor([2], site=build.site(None, "leaf")),
        build.tensor([2]),
        build.tensor([2], producer=77),
    )
    graph = graph_of(build.data())
    boxes = [*(each.key for each in graph.boxes), None]
    assert [(each.kind, each.name, each.label, boxes[each.box]) for each in graph.nodes[:-1]] == [
        (INPUT, "[0]['x']", "input[0]['x']", None),
        ("parameter", "head.weight", "weight", "forward/Net/head"),
        ("buffer", "head.running_mean", "running_mean", "forward/Net/head"),
        (CONSTANT, "constant", "constant", "forward/Net/head"),
        (CONSTANT, "constant", "constant", "forward/Net/head"),
        (EARLIER, "earlier", "earlier", "forward/Net/head"),
    ]


def test_what_was_made_in_an_earlier_step_is_named_after_its_op():
    build, net, outer = begin_net()
    made = run_op(build, outer, "aten.relu.default", 10, given_to(build, net))
    build.step(1, 1000, 2000)
    run_op(build, build.call(net, 1000, 1900), "aten.neg.default", 1010, made)
    assert edge_lines(graph_of(build.data(), 1)) == [
        "earlier:aten.relu.default -> forward/Net/aten.neg.default ([0])"
    ]


def test_input_that_is_returned_as_it_is_leads_to_the_output():
    build, net, outer = begin_net()
    made = run_op(build, outer, "aten.relu.default", 10, given_to(build, net))
    build.use(made, call=outer, slot="output[0]")
    build.use(given_to(build, net, "mask"), call=outer, slot="output[1]")
    assert edge_lines(graph_of(build.data()))[-1] == "input:mask -> forward/output:output[1] (output[1])"


def test_part_of_a_graph_has_no_output_that_nothing_leads_to():
    build, net, outer = begin_net()
    made = run_op(build, outer, "aten.relu.default", 10, given_to(build, net))
    build.use(run_op(build, outer, "aten.neg.default", 20, made), call=outer, slot="output")
    assert node_lines(graph_of(build.data()).filter(op="relu")) == [
        "input:[0]",
        "forward/Net/aten.relu.default",
    ]


def test_output_is_labelled_by_its_whole_name():
    build, net, outer = begin_net()
    made = run_op(build, outer, "aten.relu.default", 10, given_to(build, net))
    build.use(made, call=outer, slot="output.encoder.hidden")
    assert graph_of(build.data()).nodes[-1].label == "output.encoder.hidden"


def test_op_that_raised_is_there_with_what_it_read():
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.step(0, 0, 1000)
    call = build.call(net, 0, None, raised=True)
    op = build.op(call, "aten.mm.default", 10, None, raised=True, flops=None)
    build.use(given_to(build, net), op=op, slot="self")
    graph = graph_of(build.data())
    assert edge_lines(graph) == ["input:[0] -> forward/Net/aten.mm.default (self)"]
    assert [each.raised for each in (*graph.nodes, *graph.boxes)] == [False, True, True]
    assert (graph.nodes[1].shape, graph.nodes[1].flops, graph.boxes[0].flops) == (None, None, None)


def test_what_a_root_was_given_is_its_input_although_an_op_of_an_earlier_step_has_made_it():
    build, net, _outer = begin_net()
    batch = build.tensor([2], producer=build.op(None, "aten.stack.default", 910, 920))
    build.step(1, 1000, 2000)
    call = build.call(net, 1000, 1900)
    build.use(batch, call=call, slot="input['ids']")
    run_op(build, call, "aten.neg.default", 1010, batch)
    assert edge_lines(graph_of(build.data(), 1)) == ["input:['ids'] -> forward/Net/aten.neg.default ([0])"]
