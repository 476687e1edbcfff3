"""What the nodes and layers of an execution graph cost and hold."""

from builders import RecordingBuilder
from helpers.typed_steps import begin_net, given_to, run_op
from modtrace.api.graph import graph_of


def test_layers_sum_what_is_inside_of_them_and_do_not_know_what_one_op_does_not():
    build, net, outer = begin_net()
    parts = [build.module(each, "Part", parent=net) for each in ("a", "b")]
    given = given_to(build, net)
    for at, (part, flops) in enumerate(zip(parts, (7, None), strict=True)):
        call = build.call(part, 100 * at + 10, 100 * at + 90, parent=outer)
        run_op(build, call, "aten.mm.default", 100 * at + 20, given, flops=flops, bytes_read=4, saved_bytes=2)
        run_op(build, call, "aten.mm.default", 100 * at + 30, given, flops=3, bytes_read=5, saved_bytes=2)
    graph = graph_of(build.data()).collapse(depth=1)
    assert [
        (each.key, each.flops, each.bytes_read, each.saved_bytes, each.ops) for each in graph.nodes[1:]
    ] == [
        ("forward/Net/a", 10, 9, 4, 2),
        ("forward/Net/b", None, 9, 4, 2),
    ]
    assert [(each.key, each.flops, each.bytes_read) for each in graph.boxes] == [("forward/Net", None, 18)]


def test_small_layer_behind_a_large_one_has_its_own_flops():
    build, net, outer = begin_net()
    given = given_to(build, net)
    for at, flops in enumerate((10**18, 7)):
        call = build.call(
            build.module("ab"[at], "Part", parent=net), 100 * at + 10, 100 * at + 90, parent=outer
        )
        run_op(build, call, "aten.mm.default", 100 * at + 20, given, flops=flops)
    graph = graph_of(build.data()).collapse(depth=1)
    assert [each.flops for each in graph.nodes[1:]] == [10**18, 7]


def test_nan_in_what_a_wrapper_returns_is_counted_once():
    build = RecordingBuilder()
    wrapper = build.module("", "DistributedDataParallel", name="Net")
    net = build.module("", "Net", parent=wrapper, raw_path="module")
    build.step(0, 0, 1000)
    outer = build.call(wrapper, 0, 900)
    inner = build.call(net, 10, 800, parent=outer)
    run_op(build, inner, "aten.relu.default", 20, given_to(build, net))
    build.output(inner, [float("nan"), 1.0], order=0)
    build.output(outer, [float("nan"), 1.0], order=0)
    assert graph_of(build.data()).boxes[0].nonfinite == 1


def test_nan_in_a_parameter_is_counted_once():
    build, net, outer = begin_net()
    site = build.site(net, "parameter", "weight")
    run_op(build, outer, "aten.relu.default", 10, build.tensor([2], site=site))
    build.value(site, [float("nan"), 1.0], op_id=0)
    build.parameter(net, "weight", [float("nan"), 1.0])
    assert graph_of(build.data()).nodes[0].nonfinite == 1
