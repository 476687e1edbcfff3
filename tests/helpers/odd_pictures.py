"""Pictures that are hard to draw: long and foreign names, deep boxes, legends, badges, and styles of one's own."""

from typing import Any

from helpers.drawn_views import box, edge, layer, leaf, op, phase_box, view
from modtrace.analysis.graph.columns import INPUT, PARAMETER
from modtrace.analysis.graph_view.records import GraphView, ViewBox, ViewEdge, ViewNode
from modtrace.views.dot.graphviz import render_svg
from modtrace.views.dot.style import GraphStyle
from modtrace.views.dot.text import Html

LONG = "model.decoder.layers.0.self_attention.query_key_value_projection.lora_adapters.default"


class Tables(GraphStyle):
    """Labels as users write them: plain, of several lines, in a table, and in another font."""

    def node(self, node: ViewNode) -> dict[str, Any]:
        label = Html(
            f'<table border="1" cellborder="1"><tr><td align="left">{node.label}</td>'
            '<td rowspan="2"><i>slanted</i> and <b>bold <u>both</u></b></td></tr>'
            '<tr><td bgcolor="#fde68a">a<br align="left"/>longer line</td></tr></table>'
        )
        return super().node(node) | {"label": label if node.kind == "op" else f"{node.label}\nin two lines"}

    def box(self, box: ViewBox) -> dict[str, Any]:
        return super().box(box) | {"label": f"{box.name}, right", "labeljust": "r"}

    def edge(self, edge: ViewEdge, source: ViewNode, target: ViewNode) -> dict[str, Any]:
        return super().edge(edge, source, target) | {"label": f" {source.label} to {target.label}"}


def odd_names() -> GraphView:
    nodes = [
        leaf(INPUT, "x", shape=(1, 3, 1024, 1024), dtype="float32"),
        layer(LONG, "ParametrizedLinear", box=2, shape=(2, 8), repeats=128),
        layer("größe.층.层", "Слой", box=2, shape=(1, 512, 7, 7)),
        op("😀 scaled_dot_product_attention", box=2, shape=(64, 3, 7, 7)),
        op("il" * 20, box=1, shape=()),
        op("WM" * 12, box=0),
    ]
    edges = [edge(at, at + 1, shape=(64, 3, 7, 7)) for at in range(len(nodes) - 1)]
    boxes = [box("Net", "Net"), box(LONG, "ModuleList", box=0), box("i", "I", box=1)]
    return view(nodes, edges, boxes, marks=("cut off: the process was killed while it wrote this step",))


def training() -> GraphView:
    nodes = [
        leaf(PARAMETER, "weight", shape=(64, 3, 7, 7), box=2),
        layer("a", "A", box=2, duration_ns=10, ops=3),
        layer(
            "a", "A", box=3, phase="backward", twin=1, duration_ns=123456, ops=3, raised=True, nonfinite=20
        ),
    ]
    boxes = [phase_box("forward"), phase_box("backward"), box("Net", "Net", box=0), box("Net", "Net", box=1)]
    return view(nodes, [edge(0, 1), edge(1, 2)], boxes)


def deep(depth: int = 30) -> GraphView:
    boxes = [box(".".join(["child"] * (at + 1)), "Nested", box=at - 1, depth=at) for at in range(depth)]
    return view([op("relu", box=depth - 1, shape=(1,))], [], boxes)


def draw_odd_pictures() -> dict[str, str]:
    """SVG by name; it needs the program `dot`."""
    mine = view([op("relu", box=0), layer("head", "Linear", box=0)], [edge(0, 1)], [box("Net", "Net")])
    return {
        "odd-names": render_svg(odd_names()),
        "training-by-time": render_svg(training(), overlay="time"),
        "deep": render_svg(deep()),
        "tables": render_svg(mine, style=Tables()),
        "monospaced": render_svg(odd_names(), style=GraphStyle(fontname="DejaVu Sans Mono")),
        "sideways": render_svg(mine, style=Sideways(shape="ellipse", fontsize=20)),
    }


class Sideways(GraphStyle):
    def graph(self, view: GraphView) -> dict[str, Any]:
        return super().graph(view) | {"rankdir": "LR", "label": "from left\nto right", "labeljust": "c"}
