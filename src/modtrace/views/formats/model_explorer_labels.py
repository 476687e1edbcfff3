"""How the nodes of a graph look in Model Explorer."""

from ...analysis.graph.columns import BUFFER, CONSTANT, EARLIER, INPUT, OUTPUT, PARAMETER
from ...analysis.graph_view.records import LAYER, ViewNode
from ..common.box_paths import label_layer

#: Borders alone: the colours of node data fill the node.
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
    """The short name, of a layer as that of a box."""
    if node.kind == LAYER:
        return label_layer(node)
    return f"{node.label or node.kind}{f' x{node.repeats}' if node.repeats > 1 else ''}"


def color_border(node: ViewNode) -> str | None:
    """Red for what raised or is not finite, else a colour for each kind of leaf; None for Model Explorer's own."""
    return _BAD if node.raised or node.nonfinite else _BORDERS.get(node.kind)
