"""Describes nodes, boxes and the graph for Model Explorer: labels, borders, and attributes of the side panel."""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...analysis.graph.columns import BUFFER, CALL, CONSTANT, EARLIER, INPUT, OP, OUTPUT, PARAMETER
from ...analysis.graph_view.records import LAYER, GraphView, ViewBox, ViewNode
from ...recording.phase import BACKWARD, RECOMPUTE
from ..common.box_paths import label_layer
from ..common.graph_summary import describe_counts, explain_no_ops
from ..common.headline import describe_head
from ..common.numbers import format_bytes, format_flops, format_number, format_time, sum_known

#: Kinds of nodes that take time; leaves, tensors and outputs only hold something.
WORKING = (OP, CALL, LAYER)

_TWINS = {BACKWARD: "backward of", RECOMPUTE: "recompute of"}


def describe_view(view: GraphView) -> dict[str, str]:
    """Returns the attributes that the side panel shows while no node is selected."""
    step = describe_head((), view.step, ())[0].render(color=False)
    described = {"command": shlex.join(view.command), "step": step, "marks": "; ".join(view.marks)}
    if view.step is not None and not view.has_ops:
        described["edges"] = explain_no_ops()
    if view.nodes:
        described["shown"] = describe_counts(view)
    return _without_empty(described)


def describe_node(view: GraphView, number: int) -> dict[str, Any]:
    """Returns the attributes of a node, with a link to the node that it goes back to or repeats."""
    node = view.nodes[number]
    described: dict[str, Any] = {"kind": node.kind, "name": node.name, **_describe_place(node)}
    described["sequence"] = str(number)
    if node.args:
        described["args"] = node.args
    described.update(_describe_numbers(node) if node.kind in WORKING else _describe_values(node))
    if node.twin >= 0:
        name = _TWINS.get(node.phase or "", "goes back to")
        described[name] = {"type": "node_ids", "nodeIds": [view.nodes[node.twin].key]}
    return described


def describe_box(view: GraphView) -> Iterator[dict[str, str]]:
    """Yields the attributes of each box."""
    for box, parameters in zip(view.boxes, _count_parameters(view), strict=True):
        described = {"kind": box.kind, "name": box.name, **_describe_place(box), **_describe_numbers(box)}
        if parameters:
            described["parameters read only here"] = f"{parameters:,}"
        yield described


def _describe_place(item: ViewNode | ViewBox) -> dict[str, str]:
    return _without_empty(
        {
            "type": item.type,
            "path": item.path,
            "root": item.root,
            "call": None if item.call is None else str(item.call),
            "phase": item.phase,
            "stands for": str(item.repeats) if item.repeats > 1 else None,
        }
    )


def _describe_numbers(item: ViewNode | ViewBox) -> dict[str, str]:
    described = {
        "ops": None if item.kind == OP else f"{item.ops:,}",
        "time": format_time(item.duration_ns),
        "flops": _format_known(item.flops, format_flops),
        "bytes read": _format_known(item.bytes_read, format_bytes),
        "bytes written": _format_known(item.bytes_written, format_bytes),
        "saved for backward": _format_known(item.saved_bytes, format_bytes),
    }
    return _without_empty(described) | _describe_values(item)


def _describe_values(item: ViewNode | ViewBox) -> dict[str, str]:
    return _without_empty(
        {
            "rms": _format_known(item.rms, format_number),
            "non-finite": _format_known(item.nonfinite, "{:,}".format),
            "raised": "yes" if item.raised else None,
            "compiled": "yes" if item.compiled else None,
        }
    )


def _format_known(value: Any, form: Callable[[Any], str]) -> str | None:
    return None if value is None else form(value)


def _without_empty(described: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in described.items() if value}


def _count_parameters(view: GraphView) -> list[int | None]:
    """Returns the elements of the parameters in each box; None if closed layers may contain more."""
    counts: list[int | None] = [0] * len(view.boxes)
    for node in view.nodes:
        if node.box < 0:
            continue
        if node.kind == LAYER or (node.kind == PARAMETER and node.shape is None):
            counts[node.box] = None
        elif node.kind == PARAMETER and node.shape is not None:
            counts[node.box] = sum_known(counts[node.box], math.prod(node.shape) * node.repeats)
    for number in range(len(counts) - 1, -1, -1):  # inner boxes first, as they follow outer ones
        around = view.boxes[number].box
        if around >= 0:
            counts[around] = sum_known(counts[around], counts[number])
    return counts


#: Only the borders are coloured, because node data fill the nodes.
_BORDERS = {
    INPUT: "#1a73e8",
    OUTPUT: "#1a73e8",
    PARAMETER: "#188038",
    BUFFER: "#9334e6",
    CONSTANT: "#80868b",
    EARLIER: "#80868b",
}
_BAD = "#d93025"


def label_node(node: ViewNode) -> str:
    """Returns the short name of a node; for a layer, its label as a box."""
    if node.kind == LAYER:
        return label_layer(node)
    return f"{node.label or node.kind}{f' x{node.repeats}' if node.repeats > 1 else ''}"


def color_border(node: ViewNode) -> str | None:
    """Returns red for a node that raised or is not finite, else the colour of its kind for a leaf, else None."""
    return _BAD if node.raised or node.nonfinite else _BORDERS.get(node.kind)
