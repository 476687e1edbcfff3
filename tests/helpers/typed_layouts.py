"""Views of graphs, typed by hand."""

from collections.abc import Sequence

from helpers.typed_records import typed_box, typed_edge, typed_node, typed_view
from modtrace.analysis.graph.columns import MODULE, OP
from modtrace.analysis.graph_view.records import GraphView, ViewBox, ViewEdge, ViewNode

_UNKNOWN = {"flops": None, "bytes_read": None, "bytes_written": None, "saved_bytes": None}


def node(
    name: str, *, box: int = -1, kind: str = OP, phase: str | None = "forward", twin: int = -1
) -> ViewNode:
    """A node with nothing known of it."""
    return typed_node(name, name=name, label=name, box=box, kind=kind, phase=phase, twin=twin, **_UNKNOWN)


def box(name: str, *, box: int = -1, kind: str = MODULE, phase: str = "forward") -> ViewBox:
    """A box with nothing known of it; boxes of one name are calls of one module."""
    return typed_box(
        name, name=name, label=name, path=name, root="", box=box, kind=kind, phase=phase, **_UNKNOWN
    )


def edge(source: int, target: int, *, is_loop: bool = False) -> ViewEdge:
    """An edge with nothing known of it."""
    return typed_edge(source, target, is_loop=is_loop)


def view(
    nodes: Sequence[ViewNode], edges: Sequence[ViewEdge] = (), boxes: Sequence[ViewBox] = ()
) -> GraphView:
    """A view of them."""
    return typed_view(boxes, nodes, edges, command=(), step=None)
