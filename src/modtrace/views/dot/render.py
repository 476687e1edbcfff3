"""Writes a graph view in the DOT language of Graphviz."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...analysis.graph_view.records import GraphView, ViewBox, ViewEdge
from .color_scale import Overlay, choose_overlay
from .fixed_labels import FixedLabels
from .labels import with_line, with_number
from .phases import DrawnEdge, Sides, choose_edges, find_columns, outermost_boxes, place_idle
from .style import GraphStyle
from .text import escape_html, render_attributes, stack, to_html

#: The depth from which lines are not indented further, as boxes may be nested 5,000 deep.
_DEEPEST = 12

#: Attributes that belong to the source or the target of an edge, which are swapped if it is written backward.
_ENDS = (("arrowhead", "arrowtail"), ("headlabel", "taillabel"), ("headport", "tailport"), ("lhead", "ltail"))
_DIRECTIONS = {"forward": "back", "back": "forward"}

NO_OPS_IN_PICTURE = "No ops were recorded: the arrows say which call began next."


#: The space that `GraphStyle` leaves beside a label, for both sides together, in points.
_MARGIN = 12

_SIDES = {"l": "left", "r": "right"}


def render_dot(
    view: GraphView,
    *,
    style: GraphStyle | None = None,
    overlay: str | None = None,
    labels: FixedLabels | None = None,
) -> str:
    """Returns the text of a picture, for `dot` or another program of Graphviz.

    Nodes are `n0`, `n1` and so on in the order of time, boxes `cluster_b0`; their tooltips begin with their keys.

    Args:
        style: the look of the picture; None for `GraphStyle()`.
        overlay: the number by which nodes are coloured: time, flops, bytes, saved, rms, nonfinite, or a field of
            `ViewNode` that is a number.
        labels: stores the labels, for which the text only reserves space; None to write labels into the text.

    Raises:
        ValueError: there is no such number.
    """
    if style is not None and not isinstance(style, GraphStyle):
        raise TypeError(f"style={style!r}: give an object of GraphStyle or of a subclass: GraphStyle()")
    chosen = style or GraphStyle()
    chosen.look_at(view)
    return "".join(_Writer(view, chosen, choose_overlay(view, overlay), labels).lines())


class _Writer:
    """Writes a view in one pass, outer boxes first, without recursion."""

    def __init__(
        self, view: GraphView, style: GraphStyle, overlay: Overlay | None, labels: FixedLabels | None
    ) -> None:
        self._view = view
        self._style = style
        self._overlay = overlay
        self._labels = labels
        self._sides = Sides(view)
        self._outermost = outermost_boxes(view)
        self._of_all = self._graph(has_rows=bool(self._sides.rows))
        self._of_nodes = style.all_nodes()
        self._of_edges = style.all_edges()

    def lines(self) -> Iterator[str]:
        yield "digraph modtrace {\n"
        yield f"  graph{self._attributes(self._of_all, {})}\n"
        yield f"  node{self._attributes(self._of_nodes, {}) or ' []'}\n"
        yield f"  edge{self._attributes(self._of_edges, {}) or ' []'}\n"
        yield from self._boxes()
        yield from _columns(find_columns(self._view, self._sides.of_node))
        for row in self._sides.rows:
            yield f"  {{ rank=same; {'; '.join(f'n{number}' for number in row)} }}\n"
        yield from map(self._edge, choose_edges(self._view, self._sides.of_node))
        yield from map(self._invisible, filter(self._sides.is_ranked, place_idle(self._view)))
        yield "}\n"

    def _attributes(
        self, found: dict[str, Any], inherited: Mapping[str, Any], *, margin: float = 0, align: str = "center"
    ) -> str:
        if self._labels is not None:
            found = found | self._labels.reserve_all({**inherited, **found}, margin=margin, align=align)
        return render_attributes(found)

    def _graph(self, *, has_rows: bool) -> dict[str, Any]:
        found = self._style.graph(self._view)
        notes = [*([] if self._view.has_ops else [NO_OPS_IN_PICTURE]), *self._view.marks]
        lines = [escape_html(note) for note in notes] + ([self._overlay.legend()] if self._overlay else [])
        if lines:
            given = [to_html(found["label"])] if found.get("label") else []
            found = found | {"label": stack([*given, *lines])}
        return {"compound": True, "newrank": True if has_rows else None, **found}

    def _boxes(self) -> Iterator[str]:
        """Yields every node in its box, and every box in its parent."""
        view = self._view
        # The last list is for nodes outside of boxes.
        nodes: list[list[int]] = [[] for _ in range(len(view.boxes) + 1)]
        inside: list[list[int]] = [[] for _ in range(len(view.boxes) + 1)]
        for at, node in enumerate(view.nodes):
            nodes[node.box].append(at)
        for at, box in enumerate(view.boxes):
            inside[box.box].append(at)
        pending: list[int | None] = [None, *reversed(inside[-1])]  # None marks the end of a box
        yield from (self._node(at, "  ") for at in nodes[-1])
        depth = 1
        while len(pending) > 1:
            top = pending.pop()
            if top is None:
                depth -= 1
                yield f"{_indent(depth)}}}\n"
                continue
            pending += [None, *reversed(inside[top])]
            yield f"{_indent(depth)}subgraph cluster_b{top} {{\n"
            depth += 1
            yield f"{_indent(depth)}graph{self._box(view.boxes[top]) or ' []'}\n"
            yield from (self._node(at, _indent(depth)) for at in nodes[top])

    def _node(self, at: int, indent: str) -> str:
        node = self._view.nodes[at]
        attributes = self._style.node(node)
        if self._overlay is not None:
            text = self._overlay.text(node)
            label = {"label": with_line(attributes.get("label", ""), text)} if text else {}
            attributes = attributes | self._overlay.node(node) | label
        return f"{indent}n{at}{self._attributes(attributes, self._of_nodes, margin=_MARGIN)}\n"

    def _box(self, box: ViewBox) -> str:
        attributes = self._style.box(box)
        text = self._overlay.text(box) if self._overlay else ""
        if text:
            attributes = attributes | {"label": with_number(attributes.get("label", ""), text)}
        side = attributes.get("labeljust", self._of_all.get("labeljust"))
        return self._attributes(
            attributes, self._of_all, margin=_MARGIN, align=_SIDES.get(str(side), "center")
        )

    def _edge(self, drawn: DrawnEdge) -> str:
        nodes, edge, sides = self._view.nodes, drawn.edge, self._sides
        attributes = self._style.edge(edge, nodes[edge.source], nodes[edge.target])
        if drawn.is_bundle:
            attributes = self._between_boxes(edge) | attributes
        if not sides.is_ranked(edge):
            attributes = {"constraint": False, **attributes}
        elif sides.rows_between(edge) > 1:
            attributes = {"minlen": sides.rows_between(edge), **attributes}
        source, target = edge.source, edge.target
        if sides.is_ranked(edge) and sides.is_upward(edge):
            source, target, attributes = target, source, _swap_ends(attributes)
        return f"  n{source} -> n{target}{self._attributes(attributes, self._of_edges, align='left')}\n"

    def _invisible(self, edge: ViewEdge) -> str:
        ends = (edge.target, edge.source) if self._sides.is_upward(edge) else (edge.source, edge.target)
        return "  n{} -> n{} [style=invis]\n".format(*ends)

    def _between_boxes(self, edge: ViewEdge) -> dict[str, Any]:
        """Returns attributes that make an edge end at the borders of the outermost boxes."""
        boxes = (self._view.nodes[end].box for end in (edge.source, edge.target))
        ends = zip(("ltail", "lhead"), boxes, strict=True)
        return {name: f"cluster_b{self._outermost[box]}" for name, box in ends if box >= 0}


def _columns(columns: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yields invisible points from left to right, each with edges to nodes of its column."""
    if not columns:
        return
    points = " -> ".join(f"o{at}" for at in range(len(columns)))
    yield f'  {{ rank=min; node [style=invis label="" width=0 height=0 margin=0]; {points} [style=invis weight=1] }}\n'
    for at, nodes in enumerate(columns):
        yield f"  o{at} -> {{ {'; '.join(f'n{node}' for node in nodes)} }} [style=invis weight=1]\n"


def _swap_ends(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of an edge that is written from target to source, so that it looks the same."""
    direction = attributes.get("dir", "forward")
    swapped = {**attributes, "dir": _DIRECTIONS.get(direction, direction)}
    for head, tail in _ENDS:
        swapped |= {head: attributes.get(tail), tail: attributes.get(head)}
    return {name: value for name, value in swapped.items() if value is not None}


def _indent(depth: int) -> str:
    return "  " * min(depth, _DEEPEST)
