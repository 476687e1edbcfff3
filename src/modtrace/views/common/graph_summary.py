"""Describes a graph in a few lines of text: its step, and its visible part."""

import json
from collections import Counter

from ...analysis.graph_view.records import LAYER, GraphView
from ...recording.suggestions import count_of
from .columns import Text, render_lines
from .headline import describe_head
from .numbers import to_json

#: The answer for users who ask for GraphML, which was a format once.
NO_GRAPHML = (
    "GraphML is no longer written. docs/export.md (networkx) makes a networkx.DiGraph of rec.graph() in five lines, "
    "and networkx.write_graphml writes that"
)

#: Readable names of kinds whose own names say too little.
_NOUNS = {"earlier": ("tensor", " from outside")}


def explain_no_ops() -> str:
    """Returns an explanation of what the graph of a step without ops shows."""
    return (
        "no ops were recorded: the nodes are calls, and the arrows say which began next. "
        "For what flows between them record with ops=True (modtrace record --ops)."
    )


def render_graph(view: GraphView, *, width: int | None = None) -> str:
    """Returns the step of the graph, and how many nodes of each kind are visible.

    Args:
        width: the width of the terminal, in characters; longer lines are broken. None: no limit.
    """
    lines = describe_head(view.command, view.step, view.marks)
    if view.step is not None and not view.has_ops:
        lines.append(Text(explain_no_ops()))
    if view.step is not None:
        lines.append(Text(describe_counts(view)))
    return render_lines(lines, color=False, width=width)


def describe_counts(view: GraphView) -> str:
    """Returns the size of the visible part as text: `12 layers, 30 ops, 8 parameters; 61 edges`."""
    if not view.nodes:
        return "nothing ran in this part of the step" if view.step else "nothing was recorded"
    counts = Counter(node.kind for node in view.nodes)
    order = sorted(counts, key=lambda kind: (kind != LAYER, kind != "op", kind))
    parts = [_count(kind, counts[kind]) for kind in order]
    return f"{', '.join(parts)}; {count_of(len(view.edges), 'edge')}"


def _count(kind: str, count: int) -> str:
    noun, rest = _NOUNS.get(kind, (kind, ""))
    return count_of(count, noun) + rest


def render_graph_json(view: GraphView) -> str:
    """Returns the visible nodes, edges and boxes with their fields as JSON. They refer to each other by number."""
    head = {
        "step": None if view.step is None else view.step.step,
        "has_ops": view.has_ops,
        "marks": view.marks,
    }
    rows = {
        name: [to_json(record._asdict()) for record in records]
        for name, records in (("nodes", view.nodes), ("edges", view.edges), ("boxes", view.boxes))
    }
    return json.dumps(head | rows) + "\n"
