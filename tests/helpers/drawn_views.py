"""Types views to be drawn: nodes, boxes and edges with what a test is about, and nothing for the rest."""

from collections.abc import Sequence
from typing import Any

from helpers.typed_records import typed_box, typed_edge, typed_node, typed_view
from modtrace.analysis.graph_view.records import LAYER, GraphView, ViewBox, ViewEdge, ViewNode

_UNKNOWN = {"flops": None, "bytes_read": None, "bytes_written": None, "saved_bytes": None}
_NODE = typed_node("", root="Net", call=0, phase="forward", **_UNKNOWN)
_BOX = typed_box("", path=None, ops=0, **_UNKNOWN)


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
    return typed_edge(source, target, **fields)


def view(
    nodes: Sequence[ViewNode], edges: Sequence[ViewEdge] = (), boxes: Sequence[ViewBox] = (), **fields: Any
) -> GraphView:
    return typed_view(boxes, nodes, edges, **({"command": (), "step": None} | fields))
