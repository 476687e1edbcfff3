"""Views of graphs, typed by hand."""

from collections.abc import Sequence

from modtrace.analysis.graph import DATA, MODULE, OP
from modtrace.analysis.graph_view import GraphView, ViewBox, ViewEdge, ViewNode


def node(
    name: str, *, box: int = -1, kind: str = OP, phase: str | None = "forward", twin: int = -1
) -> ViewNode:
    """A node with nothing known of it."""
    return ViewNode(
        key=name, kind=kind, name=name, label=name, type="", path=None, root=None, call=None, phase=phase, box=box,
        repeats=1, ops=1, shape=None, dtype=None, args="", start_ns=0, duration_ns=0, flops=None, bytes_read=None,
        bytes_written=None, saved_bytes=None, nonfinite=None, rms=None, raised=False, twin=twin, first=0,
    )  # fmt: skip


def box(name: str, *, box: int = -1, kind: str = MODULE, phase: str = "forward") -> ViewBox:
    """A box with nothing known of it; boxes of one name are calls of one module."""
    return ViewBox(
        key=name, kind=kind, name=name, label=name, type="", path=name, root="", call=0, phase=phase, box=box,
        depth=0, repeats=1, ops=1, start_ns=0, duration_ns=0, flops=None, bytes_read=None, bytes_written=None,
        saved_bytes=None, nonfinite=None, rms=None, raised=False, first=0,
    )  # fmt: skip


def edge(source: int, target: int, *, is_loop: bool = False) -> ViewEdge:
    """An edge with nothing known of it."""
    return ViewEdge(source, target, DATA, "", None, None, 1, 0, is_loop)


def view(
    nodes: Sequence[ViewNode], edges: Sequence[ViewEdge] = (), boxes: Sequence[ViewBox] = ()
) -> GraphView:
    """A view of them."""
    return GraphView(
        command=(),
        marks=(),
        step=None,
        has_ops=True,
        boxes=tuple(boxes),
        nodes=tuple(nodes),
        edges=tuple(edges),
    )
