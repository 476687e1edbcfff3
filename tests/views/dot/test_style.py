"""How pictures look: labels of the style that comes with modtrace, and styles of one's own."""

from typing import Any

from helpers.drawn_views import box, edge, layer, op, view
from modtrace.analysis.graph_view.records import GraphView, ViewEdge, ViewNode
from modtrace.views.dot.render import render_dot
from modtrace.views.dot.style import GraphStyle
from modtrace.views.dot.text import Html


def test_names_in_labels_of_the_style_are_escaped() -> None:
    text = render_dot(view([layer("<a>&'\x07", 'B"')]))
    assert "label=<<b>&lt;a&gt;&amp;&#x27;\\x07 </b>(B&quot;)>" in text


def test_shape_of_a_scalar_is_told_and_an_unknown_one_is_not() -> None:
    text = render_dot(view([op("sum", shape=()), op("print")]))
    assert 'label=<sum<br/><font point-size="9">scalar</font>>' in text
    assert "label=<print>" in text


def test_what_raised_is_marked_and_so_is_what_is_not_finite() -> None:
    text = render_dot(view([op("a", raised=True), op("b", nonfinite=7)]))
    assert "<b> raised </b>" in text
    assert "<b> 7 not finite </b>" in text
    assert text.count('color="#b91c1c"') == 4  # two nodes, and the ground of two badges


def test_outermost_layers_of_compiled_code_are_marked() -> None:
    boxes = [box("a", "A", compiled=True), box("a.b", "B", box=0, depth=1, compiled=True)]
    text = render_dot(
        view([layer("a.b.c", "C", box=1, compiled=True), layer("d", "D", compiled=True)], boxes=boxes)
    )
    assert "(A) compiled" in text
    assert "(D) compiled" in text
    assert "(B) compiled" not in text
    assert "(C) compiled" not in text


def test_style_decides_over_nodes_boxes_edges_and_the_picture() -> None:
    class Mine(GraphStyle):
        def graph(self, view: GraphView) -> dict[str, Any]:
            return {"rankdir": "LR", "label": "Mine"}

        def node(self, node: ViewNode) -> dict[str, Any]:
            return {"label": Html("<i>it</i>"), "shape": "hexagon", "penwidth": 2, "URL": None, "x-y": True}

        def box(self, box: Any) -> dict[str, Any]:
            return {"label": "b"}

        def edge(self, edge: ViewEdge, source: ViewNode, target: ViewNode) -> dict[str, Any]:
            return {"label": f"{source.label} to {target.label}", "constraint": True}

    text = render_dot(
        view([op("a", box=0), op("b")], [edge(1, 0, is_loop=True)], [box("x", "X")]), style=Mine()
    )
    assert 'graph [compound="true" rankdir="LR" label="Mine"]' in text
    assert 'n0 [label=<<i>it</i>> shape="hexagon" penwidth="2" "x-y"="true"]' in text
    assert 'n1 -> n0 [constraint="true" label="b to a"]' in text


def test_attributes_given_to_the_style_hold_for_all_nodes() -> None:
    text = render_dot(view([op("a")]), style=GraphStyle(fontname="Fira Sans", fillcolor="white"))
    assert text.count('fontname="Fira Sans"') == 4
    assert text.count('fillcolor="white"') == 2
    assert "#f8fbff" not in text


def test_boxes_in_many_others_are_not_shaded() -> None:
    boxes = [box(f"b{at}", "B", box=at - 1, depth=at) for at in range(10)]
    text = render_dot(view([op("a", box=9)], [], boxes))
    assert [text.count(f'fillcolor="#5b84c4{each}"') for each in ("0f", "00")] == [8, 2]
