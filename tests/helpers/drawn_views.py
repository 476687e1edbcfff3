"""Types views to be drawn: nodes, boxes and edges with what a test is about, and nothing for the rest."""

from collections.abc import Sequence
from typing import Any

from modtrace.analysis.graph import DATA, MODULE, OP
from modtrace.analysis.graph_view import LAYER, GraphView, ViewBox, ViewEdge, ViewNode

_NODE = ViewNode(
    key="",
    kind=OP,
    name="",
    label="",
    type="",
    path=None,
    root="Net",
    call=0,
    phase="forward",
    box=-1,
    repeats=1,
    ops=1,
    shape=None,
    dtype=None,
    args="",
    start_ns=0,
    duration_ns=0,
    flops=None,
    bytes_read=None,
    bytes_written=None,
    saved_bytes=None,
    nonfinite=None,
    rms=None,
    raised=False,
    twin=-1,
    first=0,
)
_BOX = ViewBox(
    key="",
    kind=MODULE,
    name="",
    label="",
    type="",
    path=None,
    root="Net",
    call=0,
    phase="forward",
    box=-1,
    depth=0,
    repeats=1,
    ops=0,
    start_ns=0,
    duration_ns=0,
    flops=None,
    bytes_read=None,
    bytes_written=None,
    saved_bytes=None,
    nonfinite=None,
    rms=None,
    raised=False,
    first=0,
)


def op(name: str, **fields: Any) -> ViewNode:
    return _NODE._replace(**{"key": name, "name": f"aten.{name}.default", "label": name, **fields})


def layer(path: str, type: str, **fields: Any) -> ViewNode:
    label = path.rsplit(".", 1)[-1]
    return _NODE._replace(
        **{"kind": LAYER, "key": path, "name": path, "label": label, "type": type, "path": path, **fields}
    )


def leaf(kind: str, name: str, **fields: Any) -> ViewNode:
    return _NODE._replace(
        **{
            "kind": kind,
            "key": f"{kind}:{name}",
            "name": name,
            "label": name,
            "phase": None,
            "ops": 0,
            **fields,
        }
    )


def box(path: str, type: str, **fields: Any) -> ViewBox:
    return _BOX._replace(**{"key": path, "name": path, "label": path, "type": type, "path": path, **fields})


def phase_box(phase: str) -> ViewBox:
    return _BOX._replace(
        kind="phase", key=phase, name=phase, label=phase, phase=phase, root=None, call=None, depth=-1
    )


def edge(source: int, target: int, **fields: Any) -> ViewEdge:
    return ViewEdge(source, target, DATA, "", None, None, 1, 0, False)._replace(**fields)


def view(
    nodes: Sequence[ViewNode], edges: Sequence[ViewEdge] = (), boxes: Sequence[ViewBox] = (), **fields: Any
) -> GraphView:
    known: dict[str, Any] = {"command": (), "marks": (), "step": None, "has_ops": True, **fields}
    return GraphView(boxes=tuple(boxes), nodes=tuple(nodes), edges=tuple(edges), **known)
