"""Writes numbers that colour the nodes of a graph in Model Explorer, which calls them node data.

The format is the class `ModelNodeData` of the package `ai-edge-model-explorer`, in its file `node_data_builder.py`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...analysis.graph_view.records import GraphView, ViewNode
from ..common.numbers import render_compact, sum_known
from .model_explorer_attributes import WORKING

_WHITE, _RED = "#ffffff", "#d93025"


class NodeData(NamedTuple):
    """A quantity of nodes, and the colours for its values."""

    title: str
    value: Callable[[ViewNode], float | None]  # None if unknown, or if the node has no such number
    color: str  # the colour of the largest value; the smallest is white


def _of_work(value: Callable[[ViewNode], float | None]) -> Callable[[ViewNode], float | None]:
    return lambda node: value(node) if node.kind in WORKING else None


def _finite_rms(node: ViewNode) -> float | None:
    # JSON cannot hold other numbers, and one of them would leave no colours for the rest.
    return node.rms if node.rms is not None and math.isfinite(node.rms) else None


#: The kinds of node data, by the word in the file's name.
NODE_DATA = {
    "time_us": NodeData("time (us)", _of_work(lambda node: node.duration_ns / 1000), "#f9ab00"),
    "flops": NodeData("flops", _of_work(lambda node: node.flops), "#1a73e8"),
    "bytes": NodeData(
        "bytes read and written",
        _of_work(lambda node: sum_known(node.bytes_read, node.bytes_written)),
        "#12b5cb",
    ),
    "saved_bytes": NodeData("bytes saved for backward", _of_work(lambda node: node.saved_bytes), "#9334e6"),
    "rms": NodeData("root mean square", _finite_rms, "#188038"),
    "nonfinite": NodeData("NaN and infinite elements", lambda node: node.nonfinite, _RED),
}


def iterate_node_data(view: GraphView, graph: str, name: str) -> Iterator[str]:
    """Yields the text for one kind of node data in pieces.

    Args:
        view: the visible part of a graph.
        graph: the name with which the graph was written.
        name: a key of `NODE_DATA`.
    """
    data = NODE_DATA[name]
    colors: dict[str, Any] = {
        "gradient": [{"stop": 0, "bgColor": _WHITE}, {"stop": 1, "bgColor": data.color}]
    }
    if name == "nonfinite":  # a node is full red even if only one element is not finite
        colors = {"thresholds": [{"value": 0, "bgColor": _WHITE}, {"value": 2**63, "bgColor": _RED}]}
    hidden = {"hideAggregatedStats": ["sum"]} if name == "rms" else {}  # a sum of these means nothing
    head = render_compact({"name": data.title, **colors, **hidden})
    yield f'{{{render_compact(graph)}:{head[:-1]},"results":{{'
    separator = "\n"
    for node in view.nodes:
        value = data.value(node)
        if value is not None:
            yield f'{separator}{render_compact(node.key)}:{{"value":{render_compact(value)}}}'
            separator = ",\n"
    yield "\n}}}\n"
