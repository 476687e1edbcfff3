"""Writes a graph as JSON for Google's Model Explorer, in which layers are groups that open and close.

All phases are in one graph, as its outermost groups, so that forward and backward are seen side by side. Model Explorer
lays a group out when it is opened, so this is not slower. The format is the class `GraphCollection` of the package
`ai-edge-model-explorer`, in its file `graph_builder.py`.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...analysis.graph.columns import TENSOR
from ...analysis.graph_view.records import LAYER, GraphView, ViewEdge
from ...analysis.tables.tensors import shape_text
from ..common.box_paths import name_boxes
from ..common.numbers import render_compact
from ..common.whole_file import write_pieces
from .model_explorer_attributes import color_border, describe_box, describe_node, describe_view, label_node
from .model_explorer_data import NODE_DATA, iterate_node_data

_Shape = tuple[int, ...] | None

# Model Explorer shows the value of this key as the name of an input or output.
_TAG = "__tensor_tag"


class Input(NamedTuple):
    """An edge into a node."""

    source: int
    output: int  # the number of the source's output, from 0
    described: dict[str, str]


#: By node, its inputs in the order of time, and a number for each shape and dtype that it returns.
Wires = tuple[list[list[Input]], list[dict[tuple[_Shape, str | None], int]]]


def connect(view: GraphView) -> Wires:
    """Returns the edges of a view.

    A view does not tell which output of a node an edge comes from, so tensors with the same shape and dtype count as
    one output.
    """
    outputs: list[dict[tuple[_Shape, str | None], int]] = [
        {} if node.shape is None else {(node.shape, node.dtype): 0} for node in view.nodes
    ]
    incoming: list[list[Input]] = [[] for _ in view.nodes]
    for edge in view.edges:
        own = outputs[edge.source]
        output = own.setdefault((edge.shape, edge.dtype), len(own))
        incoming[edge.target].append(Input(edge.source, output, _describe_edge(view, edge)))
    return incoming, outputs


def _describe_edge(view: GraphView, edge: ViewEdge) -> dict[str, str]:
    """Returns a description of an edge: argument, number of reads, and whether it leads to another folded layer."""
    described = {}
    if edge.slot and view.nodes[edge.target].kind not in (LAYER, TENSOR):
        described[_TAG] = edge.slot
    if edge.reads > 1:
        described["reads"] = str(edge.reads)
    if edge.is_loop:
        described["from"] = "the folded layer before"
    return described


def _describe_tensor(shape: _Shape, dtype: str | None) -> dict[str, str]:
    described = {}
    if shape is not None:
        described["shape"] = shape_text(shape)
    if dtype is not None:
        described["dtype"] = dtype
    return described


_SEPARATOR = ",\n"


def write_model_explorer(view: GraphView, path: str | os.PathLike[str]) -> None:
    """Writes the graph to a file, one node at a time. If writing fails, an existing file is unchanged.

    The name of the graph is that of the file without its suffix.

    Raises:
        ModtraceError: the file cannot be written.
    """
    write_pieces(iterate_model_explorer(view, Path(path).stem), path)


def write_node_data(view: GraphView, path: str | os.PathLike[str]) -> list[Path]:
    """Writes the costs and contents of the nodes beside the graph, one file for each number: `gpt.time_us.json`.

    Args:
        view: the visible part of a graph.
        path: the file of the graph. Model Explorer matches the numbers with it by its name.

    Returns:
        the files, in the order of `NODE_DATA`.

    Raises:
        ModtraceError: one of them cannot be written.
    """
    graph = Path(path)
    files = {number: graph.with_name(f"{graph.stem}.{number}.json") for number in NODE_DATA}
    for name, file in files.items():
        write_pieces(iterate_node_data(view, graph.stem, name), file)
    return list(files.values())


def iterate_model_explorer(view: GraphView, name: str) -> Iterator[str]:
    """Yields the text of a graph with this name in pieces."""
    boxes = name_boxes(view.boxes)
    yield f'{{"label":{render_compact(name)},"graphs":[{{"id":{render_compact(name)},"nodes":['
    separator = "\n"
    for node in _nodes(view, boxes):
        yield separator + render_compact(node)
        separator = _SEPARATOR
    yield '\n],"groupNodeAttributes":{\n'
    yield f'"":{render_compact(describe_view(view))}'
    for box, described in zip(boxes, describe_box(view), strict=True):
        yield f"{_SEPARATOR}{render_compact(box)}:{render_compact(described)}"
    yield '\n},"layoutConfigs":{"keepLayersWithASingleChild":true}}]}\n'


def _nodes(view: GraphView, boxes: list[str]) -> Iterator[dict[str, Any]]:
    incoming, outputs = connect(view)
    for number, node in enumerate(view.nodes):
        border = color_border(node)
        yield {
            "id": node.key,
            "label": label_node(node),
            "namespace": boxes[node.box] if node.box >= 0 else "",
            "attrs": _to_pairs(describe_node(view, number)),
            **_to_ends(view, incoming[number], outputs[number]),
            **({"style": {"borderColor": border}} if border else {}),
        }


def _to_ends(
    view: GraphView, incoming: Sequence[Input], outputs: Iterable[tuple[_Shape, str | None]]
) -> dict[str, Any]:
    """Returns the edges into a node, and the metadata of its inputs and outputs."""
    return {
        "incomingEdges": [
            {
                "sourceNodeId": view.nodes[edge.source].key,
                "sourceNodeOutputId": str(edge.output),
                "targetNodeInputId": str(slot),
            }
            for slot, edge in enumerate(incoming)
        ],
        "inputsMetadata": [
            {"id": str(slot), "attrs": _to_pairs(edge.described)} for slot, edge in enumerate(incoming)
        ],
        "outputsMetadata": [
            {"id": str(slot), "attrs": _to_pairs(_describe_tensor(*tensor))}
            for slot, tensor in enumerate(outputs)
        ],
    }


def _to_pairs(described: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in described.items()]
