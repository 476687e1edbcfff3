"""Graphs of 40,000 ops, 1,200 modules deep, and of 5,000 calls are built and shown like small ones."""

import sys
from collections.abc import Iterator

import pytest

from helpers.large_graphs import record_blocks, record_calls, record_nested
from helpers.typed_graphs import box_lines
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph

#: Frames: far less than anything here is long or deep.
_SHALLOW = 300


@pytest.fixture(autouse=True)
def no_recursion() -> Iterator[None]:
    """Whatever calls itself for each of many fails."""
    before = sys.getrecursionlimit()
    frames, frame = 0, sys._getframe()
    while frame is not None:
        frames, frame = frames + 1, frame.f_back
    sys.setrecursionlimit(frames + _SHALLOW)
    yield
    sys.setrecursionlimit(before)


def test_modules_1200_deep():
    graph = graph_of(record_nested(1_200))
    assert repr(graph) == "<ModelGraph: 1202 nodes, 1201 edges>"
    assert [each.box for each in graph.boxes] == list(range(-1, 1_199))
    assert [each.depth for each in graph.boxes] == list(range(1_200))
    assert_drawn(graph)
    assert repr(graph.fold()) == repr(graph)  # none of them has a sibling
    assert len(graph.collapse(depth=800).boxes) == 800
    assert repr(graph.collapse(depth=0).expand("m.m")) == "<ModelGraph: 6 nodes, 5 edges>"


def test_5000_calls_of_one_module():
    graph = graph_of(record_calls(5_000))
    assert repr(graph) == "<ModelGraph: 5002 nodes, 5001 edges>"
    assert [each.key for each in graph.boxes[-2:]] == ["forward/Net/layer@4998", "forward/Net/layer@4999"]
    assert_drawn(graph)
    assert repr(graph.collapse("layer")) == "<ModelGraph: 5002 nodes, 5001 edges>"
    assert repr(graph.fold()) == repr(graph)  # a call of a module is not numbered


def test_40000_ops_are_drawn_and_seen_at_any_depth():
    graph = graph_of(record_blocks(400, 100))
    skips = 399 * 25
    both = 399  # the first op of a block reads the end of the one before twice
    assert len(graph.columns.edges) == 40_001 + skips
    assert repr(graph) == f"<ModelGraph: 40002 nodes, {40_001 + skips - both} edges>"
    assert len(graph.boxes) == 2 + 400 * 6
    assert sum(each.flops or 0 for each in graph.nodes) == 512 * 40_000
    assert graph.render_dot().count("\n") > 80_000
    root = graph.collapse(depth=0)
    assert repr(root) == "<ModelGraph: 3 nodes, 2 edges>"
    assert root.nodes[1].flops == 512 * 40_000
    blocks = graph.collapse("blocks.*")
    assert repr(blocks) == "<ModelGraph: 402 nodes, 401 edges>"
    assert {(each.ops, each.flops) for each in blocks.nodes[1:-1]} == {(100, 51_200)}
    assert_drawn(blocks)
    folded = graph.fold()
    assert box_lines(folded) == [
        "forward/Net",
        "  forward/Net/blocks",
        "    forward/Net/blocks.0 ×400",
        "      forward/Net/blocks.0.0 ×2000",
    ]
    assert len(folded.nodes) == 22
    assert_drawn(folded)
    assert len(graph.filter(path="blocks.7.**").nodes) == 1 + 100  # the first of them is what they read


def assert_drawn(graph: ModelGraph) -> None:
    """The first node, the middle one and the last are in the picture, and edges lead on unless they are loops."""
    text = graph.render_dot()
    assert all(f"n{number} " in text for number in (0, len(graph.nodes) // 2, len(graph.nodes) - 1))
    assert all(edge.source < edge.target for edge in graph.edges if not edge.is_loop)
