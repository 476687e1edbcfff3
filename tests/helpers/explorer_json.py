"""Fills the dataclasses of Model Explorer with our JSON, strictly: no field unknown, missing or of another type."""

import dataclasses
import json
import math
import types
import typing
from typing import Any

import dacite

from helpers.programs import load_model_explorer
from helpers.typed_records import typed_box, typed_edge, typed_node, typed_view
from helpers.whole_text import render_model_explorer
from modtrace.analysis.graph_view.records import GraphView
from modtrace.views.formats.model_explorer_data import iterate_node_data

#: A parameter and three ops: one with values that are not finite, one that returns two tensors, a backward.
PHASES = [
    typed_box("forward", kind="phase", path=None, root=None, call=None),
    typed_box("forward/Net", box=0, name="Net", path="", type="Net", ops=2, duration_ns=2_500_000, rms=0.5),
    typed_box("forward/Net/head", box=1, type="Linear", ops=1, flops=1_200, bytes_read=None, nonfinite=3),
    typed_box("backward", kind="phase", path=None, root=None, call=None, phase="backward"),
]
NODES = [
    typed_node(
        "parameter:head.weight", kind="parameter", label="weight", ops=0, shape=(4, 2), dtype="float32", box=2
    ),
    typed_node(
        "forward/Net/head/aten.mm.default",
        path="head",
        root="Net",
        call=0,
        phase="forward",
        box=2,
        shape=(3, 2),
        dtype="float32",
        args='{"self":"$self","mat2":"$mat2"}',
        duration_ns=1_500_000,
        flops=1_200,
        bytes_read=96,
        bytes_written=24,
        saved_bytes=64,
        nonfinite=3,
        rms=math.inf,
    ),
    typed_node("forward/Net/aten.max.dim", phase="forward", box=1, shape=(3,), dtype="float32", rms=0.5),
    typed_node("backward/aten.mm.default", phase="backward", box=3, flops=None, saved_bytes=None, twin=1),
]
EDGES = [
    typed_edge(0, 1, slot="mat2", shape=(4, 2), dtype="float32"),
    typed_edge(1, 2, slot="self", shape=(3, 2), dtype="float32", reads=2),
    typed_edge(2, 3, slot="self", shape=(3,), dtype="int64"),
]
NET = typed_view(PHASES, NODES, EDGES, marks=("incomplete from event 4",))


def find_unknown(data: Any, kind: Any, where: str) -> list[str]:
    """The fields of JSON that the dataclass, or one inside it, does not have."""
    if isinstance(data, list):
        inner = typing.get_args(kind)[0]
        return [
            each
            for number, item in enumerate(data)
            for each in find_unknown(item, inner, f"{where}[{number}]")
        ]
    if not isinstance(data, dict):
        return []
    if typing.get_origin(kind) is dict:
        inner = typing.get_args(kind)[1]
        return [each for key, item in data.items() for each in find_unknown(item, inner, f"{where}[{key!r}]")]
    known = typing.get_type_hints(_dataclass_in(kind))
    unknown = [f"{where}.{key}" for key in data if key not in known]
    inside = (
        find_unknown(item, _plain(known[key]), f"{where}.{key}") for key, item in data.items() if key in known
    )
    return [*unknown, *(each for found in inside for each in found)]


def _plain(kind: Any) -> Any:
    """The list or dict of a kind that may be None too."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next((each for each in typing.get_args(kind) if typing.get_origin(each) in (list, dict)), kind)
    return kind


def _dataclass_in(kind: Any) -> Any:
    return next(each for each in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(each))


def fill(data: Any, kind: Any) -> Any:
    """The dataclass that the JSON fills; fails where a field is not known, missing or of another type."""
    assert find_unknown(data, kind, kind.__name__) == []
    return dacite.from_dict(kind, data, dacite.Config(strict=True))


def load_graph(view: GraphView, name: str = "net") -> Any:
    collection = fill(
        json.loads(render_model_explorer(view, name)), load_model_explorer("graph_builder").GraphCollection
    )
    (graph,) = collection.graphs
    assert collection.label == graph.id == name
    return graph


def load_node_data(view: GraphView, name: str, graph: str = "net") -> Any:
    builder = load_model_explorer("node_data_builder")
    data = json.loads("".join(iterate_node_data(view, graph, name)))
    return fill({"graphsData": data}, builder.ModelNodeData).graphsData[graph]
