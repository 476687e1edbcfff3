"""Computes the positions of a graph view's nodes, boxes and lines."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..graph_view.pausing import without_collection
from ..graph_view.records import GraphView, ViewNode
from ..tables.columns import Rows
from .levels import lay_out_levels
from .lines import draw_lines
from .sizes import PADDING, TITLE_HEIGHT, Floats, default_size
from .tree import ItemTree, build_item_tree
from .work import Work


@dataclass(frozen=True, kw_only=True, eq=False)
class Rectangles:
    """The left edges, top edges and sizes of rectangles, in pixels; y grows downwards."""

    x: Floats
    y: Floats
    width: Floats
    height: Floats

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The positions of a view's nodes, boxes and edges, in pixels. y grows downwards; x and y may be negative.

    Items that are added at the end of a view do not move earlier ones, with two exceptions: a box becomes wider if a
    line leaves it to its first reader outside, and an item beside a box moves if a box opens inside that one.
    """

    nodes: Rectangles
    boxes: Rectangles
    points: Floats  # (points, 2): x and y, those of one edge together, from its source to its target
    first_point: Rows  # of each edge; one more at the end
    left: float  # of the picture, as what follows
    top: float
    width: float
    height: float

    def line(self, edge: int) -> list[tuple[float, float]]:
        """Returns the points of one edge."""
        found = self.points[self.first_point[edge] : self.first_point[edge + 1]]
        return [(x, y) for x, y in found.tolist()]


@without_collection()
def lay_out(view: GraphView, *, size_of: Callable[[ViewNode], tuple[float, float]] = default_size) -> Layout:
    """Places the visible items: down the page in order of execution, a backward up the page beside its forward.

    Args:
        view: the visible part of a graph.
        size_of: returns width and height of a node in pixels.

    Raises:
        ValueError: a node has a size that is not finite or not positive.
    """
    sizes = _read_sizes(view, size_of)
    tree = build_item_tree(view)
    work, is_mirrored = lay_out_levels(view, tree, sizes)
    nodes, boxes, origins = _place(tree, work, sizes)
    rectangles = np.stack([nodes.x, nodes.y, nodes.width, nodes.height])
    points, first_point = draw_lines(tree, work, origins, is_mirrored, rectangles)
    left, top, right, bottom = _bounds(nodes, boxes, points)
    return Layout(
        nodes=nodes,
        boxes=boxes,
        points=points,
        first_point=first_point,
        left=left,
        top=top,
        width=right - left,
        height=bottom - top,
    )


def _read_sizes(view: GraphView, size_of: Callable[[ViewNode], tuple[float, float]]) -> Floats:
    """Returns width and height of each node: (nodes, 2)."""
    flat = np.fromiter(chain.from_iterable(map(size_of, view.nodes)), np.float64)
    sizes = flat.reshape(-1, 2)
    wrong = np.flatnonzero(~(np.isfinite(sizes) & (sizes > 0)).all(axis=1))
    if len(wrong):
        node, size = view.nodes[int(wrong[0])], tuple(sizes[int(wrong[0])].tolist())
        raise ValueError(f"{node.key}: size_of gave {size!r}. Give a finite width and height above 0.")
    return sizes


def _place(tree: ItemTree, work: Work, sizes: Floats) -> tuple[Rectangles, Rectangles, Floats]:
    """Returns the rectangles of nodes and boxes, and x and y of the origin of each level: (levels, 2)."""
    size = tree.nodes
    left, x, y = (np.array(each, np.float64) for each in (work.left, work.x, work.y))
    origins = np.array(_origins(tree, work), np.float64).reshape(-1, 2)
    around = origins[tree.level_of]
    x, y = x[:-1] + around[:, 0] - left[:-1], y[:-1] + around[:, 1]
    width = left[:-1] + np.array(work.right[:-1], np.float64)
    height = np.array(work.height[:-1], np.float64)
    nodes = Rectangles(x=x[:size], y=y[:size], width=sizes[:, 0], height=sizes[:, 1])
    boxes = Rectangles(x=x[size:], y=y[size:], width=width[size:], height=height[size:])
    return nodes, boxes, origins


def _origins(tree: ItemTree, work: Work) -> list[tuple[float, float]]:
    """Returns the spine and the top of each level. A box precedes the boxes inside it."""
    xs, ys = [0.0] * (tree.boxes + 1), [0.0] * (tree.boxes + 1)
    for box in range(tree.boxes):
        item, around = tree.nodes + box, int(tree.level_of[tree.nodes + box])
        xs[box] = xs[around] + work.x[item]
        ys[box] = ys[around] + work.y[item] + TITLE_HEIGHT + PADDING
    return list(zip(xs, ys, strict=True))


def _bounds(nodes: Rectangles, boxes: Rectangles, points: Floats) -> tuple[float, float, float, float]:
    """Returns left, top, right and bottom of the picture. An empty picture is a point."""
    if not len(nodes) and not len(boxes):
        return 0.0, 0.0, 0.0, 0.0
    x = np.concatenate([nodes.x, boxes.x, points[:, 0]])
    y = np.concatenate([nodes.y, boxes.y, points[:, 1]])
    right = np.concatenate([nodes.x + nodes.width, boxes.x + boxes.width, points[:, 0]])
    bottom = np.concatenate([nodes.y + nodes.height, boxes.y + boxes.height, points[:, 1]])
    return float(x.min()), float(y.min()), float(right.max()), float(bottom.max())
