"""Graphs for Model Explorer: its own dataclasses take them, and what they say."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import dacite
import pytest

from golden import assert_golden
from helpers.explorer_json import EDGES, NET, NODES, PHASES, fill, find_unknown, load_graph
from helpers.programs import load_model_explorer
from helpers.typed_records import typed_edge, typed_node, typed_view
from helpers.whole_text import render_model_explorer
from modtrace.errors import ModtraceError
from modtrace.views.formats.model_explorer import (
    iterate_model_explorer,
    write_model_explorer,
    write_node_data,
)


def test_fields_that_are_unknown_or_missing_are_found() -> None:
    """The test of the tests below."""
    kind = load_model_explorer("graph_builder").GraphCollection
    good = {"label": "net", "graphs": [{"id": "net", "nodes": [{"id": "a", "label": "a"}]}]}
    fill(good, kind)
    worse = {"label": "net", "graphs": [{"id": "net", "nodes": [{"id": "a", "label": "a", "color": "red"}]}]}
    assert find_unknown(worse, kind, "net") == ["net.graphs[0].nodes[0].color"]
    deep = {"label": "", "graphs": [{"id": "", "layoutConfigs": {"sep": 1}}]}
    assert find_unknown(deep, kind, "net") == ["net.graphs[0].layoutConfigs.sep"]
    with pytest.raises(dacite.MissingValueError):
        fill({"label": "net", "graphs": [{"id": "net", "nodes": [{"id": "a"}]}]}, kind)


def test_node_tells_what_ran_where_and_what_it_cost() -> None:
    node = load_graph(NET).nodes[1]
    assert (node.id, node.label, node.namespace) == (
        "forward/Net/head/aten.mm.default",
        "mm",
        "forward/Net/head",
    )
    assert {each.key: each.value for each in node.attrs} == {
        "kind": "op",
        "name": "aten.mm.default",
        "path": "head",
        "root": "Net",
        "call": "0",
        "phase": "forward",
        "sequence": "1",
        "args": '{"self":"$self","mat2":"$mat2"}',
        "time": "1.50ms",
        "flops": "1.20k",
        "bytes read": "96B",
        "bytes written": "24B",
        "saved for backward": "64B",
        "rms": "inf",
        "non-finite": "3",
    }
    assert node.style.borderColor == "#d93025"


def test_edges_lead_from_outputs_to_inputs_that_tell_shape_dtype_and_slot() -> None:
    weight, product, largest, back = load_graph(NET).nodes
    assert [dataclasses.astuple(each) for each in product.incomingEdges] == [
        ("parameter:head.weight", "0", "0")
    ]
    assert _metadata(weight.outputsMetadata) == {"0": {"shape": "4x2", "dtype": "float32"}}
    assert _metadata(product.inputsMetadata) == {"0": {"__tensor_tag": "mat2"}}
    assert _metadata(largest.inputsMetadata) == {"0": {"__tensor_tag": "self", "reads": "2"}}
    # The edge is about the second tensor that the op returned.
    assert _metadata(largest.outputsMetadata) == {
        "0": {"shape": "3", "dtype": "float32"},
        "1": {"shape": "3", "dtype": "int64"},
    }
    assert [dataclasses.astuple(each) for each in back.incomingEdges] == [
        ("forward/Net/aten.max.dim", "1", "0")
    ]


def _metadata(items: Any) -> dict[str, dict[str, str]]:
    return {each.id: {pair.key: pair.value for pair in each.attrs} for each in items}


def test_backward_links_to_what_it_is_the_backward_of() -> None:
    attributes = {each.key: each.value for each in load_graph(NET).nodes[3].attrs}
    assert attributes["backward of"].type == "node_ids"
    assert attributes["backward of"].nodeIds == ["forward/Net/head/aten.mm.default"]


def test_boxes_are_groups_with_attributes() -> None:
    groups = load_graph(NET).groupNodeAttributes
    assert list(groups) == ["", "forward", "forward/Net", "forward/Net/head", "backward"]
    assert groups[""] == {
        "command": "train.py",
        "step": "step 3 (train), 2.00ms; 10 steps recorded, 0 to 9",
        "marks": "incomplete from event 4",
        "shown": "3 ops, 1 parameter; 3 edges",
    }
    assert groups["forward/Net/head"] == {
        "kind": "module",
        "name": "head",
        "type": "Linear",
        "path": "head",
        "root": "Net",
        "call": "0",
        "phase": "forward",
        "ops": "1",
        "time": "0us",
        "flops": "1.20k",
        "bytes written": "0B",
        "saved for backward": "0B",
        "non-finite": "3",
        "parameters read only here": "8",
    }


def test_parameters_are_not_counted_where_a_closed_layer_may_hide_some() -> None:
    closed = typed_node("forward/Net/tail", kind="layer", type="Linear", box=1)
    groups = load_graph(typed_view(PHASES, [*NODES, closed], EDGES)).groupNodeAttributes
    counted = [name for name, each in groups.items() if "parameters read only here" in each]
    assert counted == ["forward/Net/head"]


def test_folded_and_closed_layers_say_so() -> None:
    view = typed_view(
        nodes=[
            typed_node("x", kind="layer", label="blocks.0", type="Block", call=1, repeats=32, ops=640),
            typed_node("forward/aten.add.Tensor", repeats=32),
        ],
        edges=[typed_edge(1, 0, slot="self", is_loop=True)],
    )
    layer, op = load_graph(view).nodes
    assert (layer.label, op.label) == ("blocks.0@1 x32", "add x32")
    attributes = {each.key: each.value for each in layer.attrs}
    assert (attributes["stands for"], attributes["ops"], attributes["type"]) == ("32", "640", "Block")
    assert _metadata(layer.inputsMetadata) == {"0": {"from": "the folded layer before"}}


def test_graph_without_ops_says_what_its_edges_are() -> None:
    view = typed_view(nodes=[typed_node("forward/Net/head", kind="call")], has_ops=False)
    assert (
        load_graph(view)
        .groupNodeAttributes[""]["edges"]
        .startswith("no ops were recorded: the nodes are calls")
    )


def test_graph_of_nothing_is_a_graph() -> None:
    graph = load_graph(typed_view(step=None, command=()))
    assert (graph.nodes, graph.groupNodeAttributes) == ([], {"": {"step": "nothing was recorded"}})


def test_model_explorer_json_is_as_it_was() -> None:
    assert_golden("model_explorer.json", render_model_explorer(NET, "net"))


def test_node_data_lies_beside_its_graph_and_is_called_as_it(tmp_path: Path) -> None:
    path = tmp_path / "my net.json"
    write_model_explorer(NET, path)
    names = [
        f"my net.{each}.json" for each in ("time_us", "flops", "bytes", "saved_bytes", "rms", "nonfinite")
    ]
    assert [each.name for each in write_node_data(NET, path)] == names
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([path.name, *names])
    graph = json.loads(path.read_text())
    assert (graph["label"], graph["graphs"][0]["id"]) == ("my net", "my net")
    assert all(list(json.loads((tmp_path / each).read_text())) == ["my net"] for each in names)


def test_graph_is_written_a_piece_at_a_time() -> None:
    assert max(len(piece) for piece in iterate_model_explorer(NET, "net")) < 2000


def test_path_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    for write in (write_model_explorer, write_node_data):
        with pytest.raises(ModtraceError, match=r"gone/net[.a-z_]*json: cannot be written: No such file"):
            write(NET, tmp_path / "gone" / "net.json")
