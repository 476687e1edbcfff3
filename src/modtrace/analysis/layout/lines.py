"""Computes the lines of a layout's edges."""

import numpy as np

from ..tables.columns import Column, Rows
from .sizes import Floats
from .tree import DOWN, LOOP, ItemTree
from .work import Bends, Work

# The largest gap between the ends of two edges at one node, and the least gap to the node's corner.
_PORT_GAP, _CORNER = 10.0, 5.0


def draw_lines(
    tree: ItemTree, work: Work, origins: Floats, is_mirrored: list[bool], rects: Floats
) -> tuple[Floats, Rows]:
    """Returns the points of all edges, from source to target, and the index of each edge's first point.

    The indices end with one more, the number of points.

    Args:
        tree: the levels of the view.
        work: the state of placing.
        origins: x and y of the origin of each level.
        is_mirrored: for each level, whether time goes up in it.
        rects: x, y, width, height of each node as rows: (4, nodes).
    """
    edges = tree.edges
    kind = edges.kind.copy()
    kind[np.array(work.lanes.edge, np.int64)] = LOOP
    level = tree.level_of[edges.from_item] if len(kind) else np.zeros(0, np.int64)
    is_up = np.array(is_mirrored, bool)[level] & (kind == DOWN)
    spines = np.array(work.left, np.float64)[: tree.nodes]
    begin, end = _ends(edges.source, edges.target, kind, is_up, rects, spines)
    edge, x, y = _bends(work.bends, origins, kind)
    lane_edge, lane_x, lane_y = _lanes(work.lanes, origins, begin, end)
    every = np.arange(len(kind))
    edge = np.concatenate([every, edge, lane_edge, every])
    x = np.concatenate([begin[0], x, lane_x, end[0]])
    y = np.concatenate([begin[1], y, lane_y, end[1]])
    order = _order(edge, y, kind, is_up, len(every))
    edge, x, y = edge[order], x[order], y[order]
    first = np.searchsorted(edge, np.arange(len(kind) + 1))
    _fan_out(edges.source, x, first[:-1], 1, kind, rects[2], spines)
    _fan_out(edges.target, x, first[1:] - 1, -1, kind, rects[2], spines)
    kept = _turns(edge, x)
    first = np.concatenate([[0], np.cumsum(kept)])[first]
    return np.stack([x[kept], y[kept]], axis=1), first.astype(np.int64)


def _ends(
    source: Rows, target: Rows, kind: Column, is_up: Column, rects: Floats, spines: Floats
) -> tuple[Floats, Floats]:
    """Returns the ends of edges, (2, edges) each: below and above their nodes, or at the nodes' sides."""
    x, y, width, height = rects
    begin = np.stack([x[source] + spines[source], np.where(is_up, y[source], y[source] + height[source])])
    end = np.stack([x[target] + spines[target], np.where(is_up, y[target] + height[target], y[target])])
    aside = kind != DOWN
    to_right = (kind == LOOP) | (x[source] < x[target])
    for found, node, at_right in ((begin, source, to_right), (end, target, (kind == LOOP) | ~to_right)):
        found[0][aside] = (x[node] + np.where(at_right, width[node], 0.0))[aside]
        found[1][aside] = (y[node] + height[node] / 2)[aside]
    return begin, end


def _bends(bends: Bends, origins: Floats, kind: Column) -> tuple[Rows, Floats, Floats]:
    """Returns edge, x and y of the bends of edges that go down."""
    edge = np.array(bends.edge, np.int64)
    kept = kind[edge] == DOWN
    level = np.array(bends.level, np.int64)[kept]
    x, y = np.array(bends.x, np.float64)[kept], np.array(bends.y, np.float64)[kept]
    return edge[kept], x + origins[level, 0], y + origins[level, 1]


def _lanes(lanes: Bends, origins: Floats, begin: Floats, end: Floats) -> tuple[Rows, Floats, Floats]:
    """Returns two points for each edge that goes back up: beside its source, and beside its target."""
    edge = np.array(lanes.edge, np.int64)
    x = np.array(lanes.x, np.float64) + origins[np.array(lanes.level, np.int64), 0]
    return (
        np.concatenate([edge, edge]),
        np.concatenate([x, x]),
        np.concatenate([begin[1][edge], end[1][edge]]),
    )


def _order(edge: Rows, y: Floats, kind: Column, is_up: Column, edges: int) -> Rows:
    """Sorts points by edge. The points between the ends of an edge are sorted by height, unless the edge goes back."""
    along = np.where(is_up[edge], -y, y)
    along[kind[edge] != DOWN] = 0.0
    along[:edges], along[len(along) - edges :] = -np.inf, np.inf
    order: Rows = np.lexsort((along, edge))
    return order


def _fan_out(
    node: Rows, x: Floats, end: Rows, step: int, kind: Column, width: Floats, spines: Floats
) -> None:
    """Moves the ends of edges at one side of a node apart. Those from the left move to its left; straight ones stay."""
    down = np.flatnonzero(kind == DOWN)
    end, node = end[down], node[down]
    away = x[end + step] - x[end]
    side = np.sign(away).astype(np.int64)
    group = node * 3 + side + 1
    order = np.lexsort((np.abs(away), group))
    node, side, end = node[order], side[order], end[order]
    _, first, number, count = np.unique(
        group[order], return_index=True, return_inverse=True, return_counts=True
    )
    number = number.reshape(-1)
    rank = np.arange(len(order)) - first[number] + 1
    room = np.where(side > 0, width[node] - spines[node], spines[node]) - _CORNER
    gap = np.minimum(_PORT_GAP, np.maximum(room, 0.0) / count[number])
    is_alone = np.bincount(node, minlength=len(width))[node] == 1
    x[end] += np.where(is_alone, 0.0, side * rank * gap)


def _turns(edge: Rows, x: Floats) -> Column:
    """Returns which points are the end or a turn of a line."""
    kept = np.ones(len(edge), bool)
    same = (edge[1:-1] == edge[:-2]) & (edge[1:-1] == edge[2:])
    kept[1:-1] = ~(same & (x[1:-1] == x[:-2]) & (x[1:-1] == x[2:]))
    return kept
