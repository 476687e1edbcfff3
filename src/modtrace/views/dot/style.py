"""Defines the look of a picture's nodes, boxes and edges, which subclasses can change."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...analysis.graph.columns import (
    BUFFER,
    CALL,
    CONSTANT,
    EARLIER,
    INPUT,
    LEAF_KINDS,
    NEXT,
    OUTPUT,
    PARAMETER,
    PHASE,
    TENSOR,
)
from ...analysis.graph_view.records import LAYER, GraphView, ViewBox, ViewEdge, ViewNode
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from .labels import (
    RED,
    describe_box,
    describe_edge,
    describe_node,
    format_shape,
    render_box_label,
    render_label,
)

Attributes = dict[str, Any]

_FONT = "Helvetica,Arial,sans-serif"  # fonts of equal widths, of which most machines have one


#: Larger pictures are for programs, so tooltips are only keys, and edges have none.
_MANY = 10_000


#: The depth from which boxes are not shaded, because their names would be hard to read.
_SHADED = 8


class _Hue(NamedTuple):
    """The colours of one phase: of closed layers, of ops, and of lines."""

    layer: str
    op: str
    line: str


_HUES = {
    None: _Hue("#e2e8f0", "#ffffff", "#64748b"),
    "forward": _Hue("#dbeafe", "#f8fbff", "#5b84c4"),
    BACKWARD: _Hue("#ffe4c7", "#fffaf4", "#c9813a"),
    RECOMPUTE: _Hue("#f8fafc", "#ffffff", "#94a3b8"),
    OPTIMIZER: _Hue("#ede4fb", "#fcfaff", "#9270c4"),
}
_LEAVES: dict[str, Attributes] = {
    PARAMETER: {"fillcolor": "#e1f1e4", "color": "#6ba578"},
    BUFFER: {"fillcolor": "#eef5da", "color": "#94a65a"},
    CONSTANT: {"fillcolor": "#f1f5f9", "color": "#94a3b8"},
    EARLIER: {"fillcolor": "#f1f5f9", "color": "#94a3b8", "style": "filled,dashed"},
    TENSOR: {"fillcolor": "#fdfdf5", "color": "#a8a58a"},
    INPUT: {"fillcolor": "#334155", "color": "#334155", "fontcolor": "white"},
    OUTPUT: {"fillcolor": "#334155", "color": "#334155", "fontcolor": "white"},
}


class GraphStyle:
    """The look of a picture. Subclass it, and override the methods for what is to look different.

        class Mine(modtrace.GraphStyle):
            def node(self, node):
                return super().node(node) | ({"penwidth": 3} if node.type == "Conv2d" else {})

        graph.write_svg("model.svg", style=Mine(fontname="Fira Sans"))

    Each method returns attributes of Graphviz, by name. Values are plain text, which may contain line breaks; use
    `modtrace.views.dot.text.Html` for bold words and the like. An attribute that is None is left out.
    """

    def __init__(self, **attributes: Any) -> None:
        """Sets attributes of all nodes, which override those of `node`; `fontname` applies to boxes and edges, too."""
        self.attributes = attributes
        self._has_phases = False
        self._tells_all = True
        self._boxes: Sequence[ViewBox] = ()

    def look_at(self, view: GraphView) -> None:
        """Receives the view that is about to be drawn, before all other methods are called."""
        self._has_phases = len(view.phases) > 1
        self._tells_all = len(view.nodes) <= _MANY
        self._boxes = view.boxes

    def graph(self, view: GraphView) -> Attributes:
        """Returns the attributes of the whole picture."""
        return {
            "fontname": self._font,
            "fontsize": 10,
            "fontcolor": "#475569",
            "bgcolor": "white",
            "pad": 0.25,
            "nodesep": 0.18,
            "ranksep": 0.3,
            "labeljust": "l",
            "labelloc": "t",
            # With 4,000 nodes this takes 1.5 s instead of 10 s, and is somewhat wider.
            "nslimit": 1 if len(view.nodes) > 500 else None,
        }

    def all_nodes(self) -> Attributes:
        """Returns the attributes of nodes, which `node` can override."""
        return {
            "shape": "box",
            "style": "rounded,filled",
            "fontname": self._font,
            "fontsize": 10,
            "fontcolor": "#1e293b",
            "height": 0.28,
            "width": 0.4,
            "margin": "0.1,0.045",
            **self.attributes,
        }

    def all_edges(self) -> Attributes:
        """Returns the attributes of edges, which `edge` can override."""
        return {
            "fontname": self._font,
            "fontsize": 8,
            "fontcolor": "#64748b",
            "arrowsize": 0.55,
            "color": _HUES[None].line,
            "weight": 50,  # straight, even if boxes get wider; edges from leaves bend instead
        }

    def node(self, node: ViewNode) -> Attributes:
        """Returns the attributes of one node: an op, a leaf, an output, or a closed layer."""
        found = {"label": render_label(node, self._mark(node)), "tooltip": self.tooltip(node), **_look(node)}
        return found | self.attributes if self.attributes else found

    def box(self, box: ViewBox) -> Attributes:
        """Returns the attributes of the box of an open layer, or of a phase."""
        hue = _HUES[box.phase]
        is_phase = box.kind == PHASE
        return {
            "label": render_box_label(box, self._mark(box)),
            "tooltip": self.tooltip(box),
            "style": "rounded,filled,dashed" if box.phase == RECOMPUTE else "rounded,filled",
            "color": RED if box.raised else hue.line if is_phase else f"{hue.line}90",
            "fillcolor": f"{hue.line}{'08' if is_phase else '0f' if box.depth < _SHADED else '00'}",
            "fontcolor": hue.line if is_phase else "#475569",
            "fontsize": 13 if is_phase else 10,
            "margin": 10 if is_phase else 7,
        }

    def edge(self, edge: ViewEdge, source: ViewNode, target: ViewNode) -> Attributes:
        """Returns the attributes of one edge. Only an edge from a closed layer has a label, which is the tensor's
        shape.

        Other nodes show their shapes themselves. Edges between phases have no labels, which would push aside aligned
        nodes.
        """
        is_across = self._has_phases and _is_across(source, target)
        found = dict(_line(edge, source, target, is_across))
        if self._tells_all:
            found["tooltip"] = describe_edge(edge)
        if source.kind == LAYER and edge.shape is not None and not (edge.is_loop or self._has_phases):
            found["label"] = f" {format_shape(edge.shape)}"
        return found

    def tooltip(self, item: ViewNode | ViewBox) -> str:
        """Returns the tooltip of a node or box: its key, shapes, arguments and costs."""
        if not self._tells_all:
            return item.key
        return describe_node(item) if isinstance(item, ViewNode) else describe_box(item)

    def _mark(self, item: ViewNode | ViewBox) -> str:
        """Returns the word that marks the outermost layers of compiled code."""
        is_inside = 0 <= item.box < len(self._boxes) and self._boxes[item.box].compiled
        return "compiled" if item.compiled and not is_inside else ""

    @property
    def _font(self) -> str:
        return str(self.attributes.get("fontname", _FONT))


def _look(node: ViewNode) -> Mapping[str, Any]:
    look = _LEAVES.get(node.kind)
    if look is None:
        look = _look_of_ran(node)
    return {**look, "color": RED, "penwidth": 2} if node.raised or node.nonfinite else look


def _look_of_ran(node: ViewNode) -> Attributes:
    hue = _HUES[node.phase]
    is_layer = node.kind in (LAYER, CALL)
    found: Attributes = {"fillcolor": hue.layer if is_layer else hue.op, "color": hue.line}
    if node.phase == RECOMPUTE:
        found |= {"style": "rounded,filled,dashed", "fontcolor": "#64748b"}
    return found


def _line(edge: ViewEdge, source: ViewNode, target: ViewNode, is_across: bool) -> Attributes:
    if edge.is_loop and source.phase == target.phase:
        return {"style": "dashed", "color": "#94a3b8", "weight": 1}
    if is_across:
        return {"color": "#94a3b870", "arrowsize": 0.4, "weight": 1}
    if source.kind in (PARAMETER, BUFFER):
        return {"color": "#a7c4ae", "arrowsize": 0.4, "weight": 1}
    if edge.kind == NEXT:
        return {"style": "dashed"}
    return {} if source.kind in LEAF_KINDS else {"color": _HUES[target.phase].line}


def _is_across(source: ViewNode, target: ViewNode) -> bool:
    """Returns whether an edge crosses phases. Leaves count as forward, and the optimizer as the end of backward."""
    if source.kind in LEAF_KINDS:
        return target.phase not in (None, FORWARD)
    has_left = source.phase is not None and target.phase is not None and source.phase != target.phase
    return has_left and (source.phase, target.phase) != (BACKWARD, OPTIMIZER)
