"""GraphML, read back with networkx: nodes, edges and attributes are those of the view."""

import math
from pathlib import Path
from typing import Any

import networkx
import pytest

from golden import assert_golden
from helpers.recorded_views import record_architecture, record_gpt, view_of
from helpers.typed_records import typed_box, typed_edge, typed_node, typed_view
from helpers.whole_text import render_graphml
from modtrace.analysis.graph_view.records import GraphView
from modtrace.errors import ModtraceError
from modtrace.views.formats.graphml import (
    EDGE_KEYS,
    NODE_KEYS,
    iterate_graphml,
    write_graphml,
)

FORWARD = typed_box("forward", kind="phase", path=None, root=None, call=None)
BLOCK = typed_box("forward/blocks.0", label="blocks.0", box=0)
NET = typed_view(
    [FORWARD, BLOCK],
    [
        typed_node(
            "parameter:blocks.0.weight", kind="parameter", ops=0, shape=(4, 2), dtype="float32", box=1
        ),
        typed_node(
            "forward/blocks.0/aten.mm.default",
            path="blocks.0",
            root="Net",
            call=0,
            phase="forward",
            box=1,
            shape=(),
            dtype="float32",
            args='{"self":"$self","scale":2}',
            duration_ns=1500,
            flops=64,
            saved_bytes=None,
            nonfinite=2,
            rms=math.inf,
            raised=True,
        ),
        typed_node("backward/aten.mm.default", twin=1, rms=0.25),
    ],
    [typed_edge(0, 1, slot="mat2", shape=(4, 2), dtype="float32", reads=2, time_ns=7), typed_edge(1, 2)],
    marks=("incomplete from event 4",),
)


def read(view: GraphView) -> Any:
    return networkx.parse_graphml(render_graphml(view))


def test_graphml_is_as_it_was() -> None:
    assert_golden("graph.graphml", render_graphml(NET))


def test_networkx_reads_all_attributes_with_their_types() -> None:
    graph = read(NET)
    assert graph.is_directed() and not graph.is_multigraph()
    assert graph.nodes["forward/blocks.0/aten.mm.default"] == {
        "kind": "op",
        "name": "aten.mm.default",
        "label": "mm",
        "path": "blocks.0",
        "root": "Net",
        "call": 0,
        "phase": "forward",
        "box": "forward/blocks.0",
        "repeats": 1,
        "ops": 1,
        "shape": "[]",
        "dtype": "float32",
        "args": '{"self":"$self","scale":2}',
        "start_ns": 0,
        "duration_ns": 1500,
        "flops": 64,
        "bytes_read": 0,
        "bytes_written": 0,
        "nonfinite": 2,
        "rms": math.inf,
        "raised": True,
        "compiled": False,
    }
    assert graph.nodes["backward/aten.mm.default"]["twin"] == "forward/blocks.0/aten.mm.default"
    assert graph.edges["parameter:blocks.0.weight", "forward/blocks.0/aten.mm.default"] == {
        "kind": "data",
        "slot": "mat2",
        "shape": "[4, 2]",
        "dtype": "float32",
        "reads": 2,
        "time_ns": 7,
        "is_loop": False,
    }
    told = {key: value for key, value in graph.graph.items() if not key.endswith("_default")}
    assert told == {
        "command": "train.py",
        "marks": "incomplete from event 4",
        "step": 3,
        "step_kind": "train",
        "has_ops": True,
    }


def test_names_with_markup_quotes_and_line_ends_come_back_as_they_were() -> None:
    key = "forward/<a & b>\"'\t\n\r]]>/é☃"
    view = typed_view(nodes=[typed_node(key, name=key), typed_node("b")], edges=[typed_edge(0, 1, slot=key)])
    graph = read(view)
    assert graph.nodes[key]["name"] == key
    assert graph.edges[key, "b"]["slot"] == key


def test_what_xml_cannot_hold_is_written_out() -> None:
    graph = read(typed_view(nodes=[typed_node("a\x00\ud800\ufffe")]))
    assert list(graph) == ["a\\x00\\ud800\\ufffe"]


def test_graph_of_nothing_is_empty() -> None:
    graph = read(typed_view(step=None, command=()))
    assert (len(graph), graph.number_of_edges()) == (0, 0)


def expected_values(view: GraphView, item: Any, keys: dict[str, str]) -> dict[str, Any]:
    """The fields of a node or edge as they should come back, but for the box."""
    values = {key: getattr(item, key) for key in keys if key not in ("box", "twin")}
    if getattr(item, "twin", -1) >= 0:
        values["twin"] = view.nodes[item.twin].key
    if values["shape"] is not None:
        values["shape"] = str(list(values["shape"]))
    return {key: value for key, value in values.items() if value not in (None, "")}


@pytest.mark.parametrize("name", ["GPT", "GPT-2", "Whisper", "Mixtral"])
def test_graph_of_a_model_comes_back_whole(name: str) -> None:
    data = record_gpt("non-reentrant") if name == "GPT" else record_architecture(name)
    for view in (view_of(data, tensors=True), view_of(data, depth=2, folded=True)):
        graph = read(view)
        assert len(view.nodes) > 30
        assert list(graph) == [each.key for each in view.nodes]
        for node in view.nodes:
            found = dict(graph.nodes[node.key])
            assert (found.pop("box", None) is None) == (node.box < 0)
            assert found == expected_values(view, node, NODE_KEYS)
        assert graph.number_of_edges() == len(view.edges)
        for edge in view.edges:
            found = graph.edges[view.nodes[edge.source].key, view.nodes[edge.target].key]
            assert found == expected_values(view, edge, EDGE_KEYS)


def test_graph_is_written_to_a_file_a_piece_at_a_time(tmp_path: Path) -> None:
    write_graphml(NET, tmp_path / "net.graphml")
    assert (tmp_path / "net.graphml").read_text(encoding="utf-8") == render_graphml(NET)
    assert [each.name for each in tmp_path.iterdir()] == ["net.graphml"]
    assert max(len(piece) for piece in iterate_graphml(NET)) < 2000


def test_path_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModtraceError, match=r"gone/net\.graphml: cannot be written: No such file"):
        write_graphml(NET, tmp_path / "gone" / "net.graphml")
