"""Draws a layout as SVG, to look at while working on it; the pictures for users are made elsewhere."""

from collections.abc import Iterator
from html import escape

from modtrace.analysis.graph.columns import LEAF_KINDS
from modtrace.analysis.graph_view.records import LAYER, GraphView
from modtrace.analysis.layout.layout import Layout

_MARGIN = 20


def render_layout(view: GraphView, layout: Layout) -> str:
    """The boxes, lines and nodes of a view."""
    left, top = layout.left - _MARGIN, layout.top - _MARGIN
    width, height = layout.width + 2 * _MARGIN, layout.height + 2 * _MARGIN
    parts = [*_boxes(view, layout), *_lines(view, layout), *_nodes(view, layout)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{left} {top} {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="white"/>{"".join(parts)}</svg>'
    )


def _boxes(view: GraphView, layout: Layout) -> Iterator[str]:
    at = layout.boxes
    for box, x, y, width, height in zip(view.boxes, at.x, at.y, at.width, at.height, strict=True):
        yield (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="#000" fill-opacity="0.04" '
            f'stroke="#999"/><text x="{x + 6}" y="{y + 14}" fill="#555">{escape(box.label or box.name)}</text>'
        )


def _lines(view: GraphView, layout: Layout) -> Iterator[str]:
    for number, edge in enumerate(view.edges):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in layout.line(number))
        color = "#d33" if edge.is_loop else "#777"
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1"/>'


def _nodes(view: GraphView, layout: Layout) -> Iterator[str]:
    at = layout.nodes
    for node, x, y, width, height in zip(view.nodes, at.x, at.y, at.width, at.height, strict=True):
        color = "#cfe8cf" if node.kind in LEAF_KINDS else "#cfdcf5" if node.kind == LAYER else "#fff"
        times = f" x{node.repeats}" if node.repeats > 1 else ""
        yield (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{color}" stroke="#555"/>'
            f'<text x="{x + width / 2}" y="{y + height / 2 + 4}" text-anchor="middle">'
            f"{escape(node.label + times)}</text>"
        )
