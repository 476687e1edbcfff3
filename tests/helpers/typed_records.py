"""Records of graph views, typed by hand: what is not said is nothing in particular."""

from collections.abc import Sequence
from typing import Any

from modtrace.analysis.graph.columns import DATA, MODULE, OP
from modtrace.analysis.graph_view.records import GraphView, ViewBox, ViewEdge, ViewNode
from modtrace.analysis.tables.chosen_step import ShownStep

STEP = ShownStep(step=3, kind="train", start_ns=0, end_ns=2_000_000, first=0, last=9, count=10)

_COSTS = {
    "start_ns": 0,
    "duration_ns": 0,
    "flops": 0,
    "bytes_read": 0,
    "bytes_written": 0,
    "saved_bytes": 0,
    "nonfinite": None,
    "rms": None,
    "raised": False,
    "compiled": False,
    "first": 0,
}


def typed_node(key: str, **fields: Any) -> ViewNode:
    """A node of that key, an op outside of modules; its name is what stands behind the last slash."""
    name = key.rpartition("/")[2]
    parts = name.split(".")
    known = {
        "key": key,
        "kind": OP,
        "name": name,
        "label": parts[1] if len(parts) == 3 else parts[-1],
        "type": "",
        "path": None,
        "root": None,
        "call": None,
        "phase": None,
        "box": -1,
        "repeats": 1,
        "ops": 1,
        "shape": None,
        "dtype": None,
        "args": "",
        "twin": -1,
    }
    return ViewNode(**(known | _COSTS | fields))


def typed_box(key: str, **fields: Any) -> ViewBox:
    """A box of that key, the first forward call of a module of Net."""
    name = key.rpartition("/")[2]
    known = {
        "key": key,
        "kind": MODULE,
        "name": name,
        "label": name,
        "type": "",
        "path": name,
        "root": "Net",
        "call": 0,
        "phase": "forward",
        "box": -1,
        "depth": 0,
        "repeats": 1,
        "ops": 1,
    }
    return ViewBox(**(known | _COSTS | fields))


def typed_edge(source: int, target: int, **fields: Any) -> ViewEdge:
    """An edge between two nodes, by their numbers."""
    known = {
        "kind": DATA,
        "slot": "",
        "shape": None,
        "dtype": None,
        "reads": 1,
        "time_ns": 0,
        "is_loop": False,
    }
    return ViewEdge(source=source, target=target, **(known | fields))


def typed_view(
    boxes: Sequence[ViewBox] = (),
    nodes: Sequence[ViewNode] = (),
    edges: Sequence[ViewEdge] = (),
    **fields: Any,
) -> GraphView:
    """A view of them, of step 3 of train.py."""
    known = {"command": ("train.py",), "marks": (), "step": STEP, "has_ops": True}
    return GraphView(boxes=tuple(boxes), nodes=tuple(nodes), edges=tuple(edges), **(known | fields))
