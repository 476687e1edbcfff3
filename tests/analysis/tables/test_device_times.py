"""Times of devices, where a recording has them, are those that tables, graphs, timelines and reports show."""

import pytest

from helpers.typed_device_times import US, device_bound
from modtrace.analysis.graph.build import build_graph
from modtrace.analysis.modules.module_tree import build_module_tree, iterate_nodes
from modtrace.analysis.ops.op_table import build_op_table
from modtrace.analysis.report.limits import Limits
from modtrace.analysis.report.report import build_report
from modtrace.analysis.timeline.timeline import build_timeline


def test_tree_has_the_times_of_the_device_as_parts_of_its_step():
    tree = build_module_tree(device_bound())
    nodes = {node.path: node for _, node in iterate_nodes(tree.roots)}
    assert tree.device_times and not tree.lacks_device_times
    assert (tree.device_step_ns, tree.step.duration_ns) == (9_000 * US, 600 * US)
    assert nodes[""].forward.total_ns == 3_000 * US
    assert nodes[""].forward.self_ns == (3_000 - 2_000 - 980) * US
    assert nodes[""].forward.share == pytest.approx(3_000 / 9_000)
    assert nodes["up"].backward.total_ns == 4_000 * US
    assert tree.optimizer.total_ns == 1_000 * US
    assert tree.outside_ns == 0


def test_without_times_of_a_device_those_of_the_host_are_shown_and_that_is_said():
    tree = build_module_tree(device_bound(with_times=False))
    assert (tree.device_times, tree.lacks_device_times, tree.device_step_ns) == (False, True, None)
    assert tree.forward.total_ns == 190 * US
    timeline = build_timeline(device_bound(with_times=False))
    assert timeline.lacks_device_times and "device" not in {lane.kind for lane in timeline.lanes}


def test_a_call_without_times_of_the_device_has_none_in_their_place():
    data = device_bound()
    calls = data._rows["calls"]
    calls[2] |= {"device_start_ns": None, "device_end_ns": None}
    nodes = {node.path: node for _, node in iterate_nodes(build_module_tree(data).roots)}
    assert (nodes["act"].forward.total_ns, nodes["act"].forward.unfinished) == (0, 1)


def test_op_table_has_the_times_of_the_device():
    table = build_op_table(device_bound(), by="op")
    assert table.device_times and table.device_step_ns == 9_000 * US
    times = {row.name: row.sums.together.time_ns // US for row in table.rows}
    assert times == {
        "aten.mm.default": 3_900,
        "aten.addmm.default": 1_980,
        "aten.gelu.default": 960,
        "aten.arange.default": 0,
    }
    [untimed] = [row for row in table.rows if row.sums.together.unfinished]
    assert untimed.name == "aten.arange.default"


@pytest.mark.parametrize("ops", [False, True])
def test_graph_has_the_times_of_the_device(ops):
    graph = build_graph(device_bound(ops=ops))
    of_call = dict(zip(graph.layers.call_id.tolist(), graph.layers.numbers.duration_ns.tolist(), strict=True))
    assert graph.device_times
    assert of_call[0] == 3_000 * US  # of the calls inside without ops there are no layers


def test_timeline_has_a_lane_for_devices_in_which_calls_and_ops_nest():
    timeline = build_timeline(device_bound())
    lanes = [(lane.kind, lane.thread) for lane in timeline.lanes]
    assert lanes == [
        ("steps", None),
        ("device", None),
        ("forward", 0),
        ("backward", 0),
        ("optimizer", 0),
    ]
    spans = timeline.spans
    rows = zip(
        spans.lane, spans.name, spans.depth, spans.start_ns // US, spans.duration_ns // US, strict=True
    )
    assert [
        (spans.names[name], depth, start, took) for lane, name, depth, start, took in rows if lane == 1
    ] == [
        ("Net", 0, 50, 3_000),
        ("up", 1, 60, 2_000),
        ("aten.addmm.default", 2, 70, 1_980),
        ("act", 1, 2_060, 980),
        ("aten.gelu.default", 2, 2_070, 960),
        ("Net", 0, 3_050, 5_000),
        ("up", 1, 4_050, 4_000),
        ("aten.mm.default", 2, 4_100, 3_900),
        ("optimizer", 0, 8_050, 1_000),
    ]


def test_report_says_that_its_times_are_those_of_the_device():
    report = build_report(device_bound(), Limits.of(1e6))
    labels = {
        table: [column.label for column in report.tables[table].columns] for table in ("modules", "nodes")
    }
    assert "device time forward" in labels["modules"] and "device self time" in labels["modules"]
    assert "device time" in labels["nodes"]
    assert [lane.label for lane in report.lanes][:2] == ["steps", "device"]
