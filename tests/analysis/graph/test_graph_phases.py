"""The phases of an execution graph: what goes back to what, and graphs of a part of a step."""

import pytest

from helpers.typed_graphs import box_lines, edge_lines, node_lines
from helpers.typed_steps import begin_net, given_to, record_training, run_op
from modtrace.api.graph import graph_of


def test_step_of_training_has_a_box_for_each_phase():
    graph = graph_of(record_training().data())
    assert node_lines(graph) == [
        "input:[0]",
        "parameter:head.weight",
        "forward/Net/head/aten.mul.Tensor",
        "forward/output:output",
        "outside/aten.sum.default",
        "backward/aten.expand.default",
        "backward/Net/head/aten.mul.Tensor",
        "optimizer/step/aten.add_.Tensor",
    ]
    assert edge_lines(graph) == [
        "input:[0] -> forward/Net/head/aten.mul.Tensor ([0])",
        "parameter:head.weight -> forward/Net/head/aten.mul.Tensor ([1])",
        "forward/Net/head/aten.mul.Tensor -> forward/output:output (output)",
        "forward/Net/head/aten.mul.Tensor -> outside/aten.sum.default ([0])",
        "outside/aten.sum.default -> backward/aten.expand.default ([0])",
        "backward/aten.expand.default -> backward/Net/head/aten.mul.Tensor ([0])",
        "parameter:head.weight -> backward/Net/head/aten.mul.Tensor ([1])",
        "parameter:head.weight -> optimizer/step/aten.add_.Tensor ([0])",
        "backward/Net/head/aten.mul.Tensor -> optimizer/step/aten.add_.Tensor ([1])",
    ]
    assert [each.strip() for each in box_lines(graph) if "/" not in each] == [
        "forward",
        "backward",
        "optimizer",
    ]


def test_backward_knows_what_it_goes_back_to():
    graph = graph_of(record_training().data())
    nodes = graph.nodes
    twins = {each.key: nodes[each.twin].key for each in nodes if each.twin >= 0}
    assert twins == {
        "backward/aten.expand.default": "outside/aten.sum.default",
        "backward/Net/head/aten.mul.Tensor": "forward/Net/head/aten.mul.Tensor",
    }
    closed = graph.collapse(depth=1).nodes
    assert {each.key: closed[each.twin].key for each in closed if each.twin >= 0} == {
        "backward/aten.expand.default": "outside/aten.sum.default",
        "backward/Net/head": "forward/Net/head",
    }


def test_recomputed_op_knows_what_it_repeats():
    build, net, outer = begin_net()
    given = given_to(build, net)
    run_op(build, outer, "aten.relu.default", 10, run_op(build, outer, "aten.relu.default", 20, given))
    again = build.recompute(outer, 910, 950)
    run_op(build, again, "aten.relu.default", 920, run_op(build, again, "aten.relu.default", 915, given))
    nodes = graph_of(build.data()).nodes
    assert {each.key: nodes[each.twin].key for each in nodes if each.twin >= 0} == {
        "recompute/Net/aten.relu.default": "forward/Net/aten.relu.default",
        "recompute/Net/aten.relu.default#1": "forward/Net/aten.relu.default#1",
    }


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (
            "forward",
            [
                "input:[0]",
                "parameter:head.weight",
                "forward/Net/head/aten.mul.Tensor",
                "forward/output:output",
            ],
        ),
        (
            "backward",
            [
                "earlier:aten.sum.default",
                "backward/aten.expand.default",
                "parameter:head.weight",
                "backward/Net/head/aten.mul.Tensor",
            ],
        ),
        (
            "optimizer",
            ["parameter:head.weight", "earlier:aten.mul.Tensor", "optimizer/step/aten.add_.Tensor"],
        ),
        ("recompute", []),
    ],
)
def test_one_phase_has_what_it_reads_of_the_others_as_leaves(phase: str, expected: list[str]):
    assert node_lines(graph_of(record_training().data()).filter(phase=phase)) == expected


def test_part_of_a_graph_is_chosen_by_path_and_by_op():
    graph = graph_of(record_training().data())
    assert node_lines(graph.filter(path="head")) == [
        "input:[0]",
        "parameter:head.weight",
        "forward/Net/head/aten.mul.Tensor",
        "forward/output:output",
        "earlier:aten.expand.default",
        "backward/Net/head/aten.mul.Tensor",
    ]
    assert node_lines(graph.filter(op="sum")) == ["earlier:aten.mul.Tensor", "outside/aten.sum.default"]
    assert node_lines(graph.filter(phase="backward").filter(op=["*mul", "nothing"])) == [
        "parameter:head.weight",
        "earlier:aten.expand.default",
        "backward/Net/head/aten.mul.Tensor",
    ]


def test_phase_that_is_none_is_an_error():
    graph = graph_of(record_training().data())
    with pytest.raises(
        ValueError, match="no phase 'backwards'; there are: forward, backward, recompute, optimizer"
    ):
        graph.filter(phase="backwards")


def test_phase_without_calls_begins_with_its_first_op():
    build, net, outer = begin_net()
    made = run_op(build, outer, "aten.relu.default", 10, given_to(build, net))
    gradient = run_op(build, None, "aten.mul.Tensor", 910, made, phase="backward")
    run_op(build, build.optimizer(950, 990), "aten.add_.Tensor", 960, gradient)
    graph = graph_of(build.data())
    assert [(each.key, each.start_ns) for each in graph.boxes if each.kind == "phase"] == [
        ("forward", 0),
        ("backward", 910),
        ("optimizer", 950),
    ]
    assert graph.columns.layers.start_ns.tolist() == [0, 0, 910, 950, 950]
