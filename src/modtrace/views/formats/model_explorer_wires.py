"""The edges of a graph as Model Explorer has them: each leads from an output of one node to an input of another."""

from dataclasses import dataclass
from typing import NamedTuple

from ...analysis.graph.columns import TENSOR
from ...analysis.graph_view.records import LAYER, GraphView, ViewEdge

_Shape = tuple[int, ...] | None

# Model Explorer shows what stands under this key as the name of an input or output.
_TAG = "__tensor_tag"


class Input(NamedTuple):
    """An edge into a node."""

    source: int
    output: int  # of the source, from 0
    described: dict[str, str]


@dataclass(frozen=True)
class Wires:
    """The edges, by node."""

    incoming: list[list[Input]]  # of each node, in the order of time
    outputs: list[dict[tuple[_Shape, str | None], int]]  # of each node: the number of each shape and dtype

    def describe_outputs(self, number: int) -> list[dict[str, str]]:
        """Shape and dtype of each output of a node; nothing where they are not known."""
        return [_describe_tensor(*each) for each in self.outputs[number]]


def connect(view: GraphView) -> Wires:
    """The edges of a view.

    Which output of a node an edge comes from is not in a view: what has the same shape and dtype is one output.
    """
    outputs: list[dict[tuple[_Shape, str | None], int]] = [
        {} if each.shape is None else {(each.shape, each.dtype): 0} for each in view.nodes
    ]
    incoming: list[list[Input]] = [[] for _ in view.nodes]
    for edge in view.edges:
        own = outputs[edge.source]
        output = own.setdefault((edge.shape, edge.dtype), len(own))
        incoming[edge.target].append(Input(edge.source, output, _describe_edge(view, edge)))
    return Wires(incoming, outputs)


def _describe_edge(view: GraphView, edge: ViewEdge) -> dict[str, str]:
    """The argument that reads, where the target is what reads; how often; whether it is of another folded layer."""
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
        described["shape"] = "x".join(map(str, shape)) or "scalar"
    if dtype is not None:
        described["dtype"] = dtype
    return described
