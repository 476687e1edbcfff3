"""Sorts a view into nested levels: the contents of each box, and the edges between items of one level."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, RECOMPUTE
from ..graph.columns import PHASE
from ..graph_view.records import GraphView
from ..tables.columns import Column, Rows

# Kinds of edges.
DOWN, LOOP, ACROSS = range(3)


@dataclass(frozen=True, kw_only=True, eq=False)
class ItemTree:
    """Items and levels by number: node n is item n, box n is item `nodes + n`, level n is the inside of box n.

    The last level is outside of all boxes.
    """

    nodes: int
    boxes: int
    level_of: Rows  # of each item: its level
    children: list[list[int]]  # the items of each level, in the order of time
    top: list[int]  # the outermost box around each box, itself if it is that one
    edges: "LiftedPairs"


@dataclass(frozen=True, kw_only=True, eq=False)
class LiftedPairs:
    """The items that each edge joins in the innermost level around both ends, and the levels that it crosses."""

    kind: Column  # DOWN, LOOP or ACROSS
    source: Rows  # the nodes
    target: Rows
    from_item: Rows  # the items, in one level
    to_item: Rows
    left_by: tuple[Rows, Rows]  # edges, and an item that they start in and whose level they leave
    entered_by: tuple[Rows, Rows]  # edges, and an item that they end in and whose level they enter


def build_item_tree(view: GraphView) -> ItemTree:
    """Sorts nodes and boxes into levels, and lifts the edges."""
    size, boxes = len(view.nodes), len(view.boxes)
    box_level = [box.box if box.box >= 0 else boxes for box in view.boxes]
    node_level = [node.box if node.box >= 0 else boxes for node in view.nodes]
    children = _children(node_level, box_level)
    _put_recompute_first(view, children[-1])
    level_of = np.array(node_level + box_level, np.int64)
    top: list[int] = []
    for box, around in enumerate(box_level):
        top.append(top[around] if around < box else box)
    return ItemTree(
        nodes=size,
        boxes=boxes,
        level_of=level_of,
        children=children,
        top=top,
        edges=_lift(view, level_of, _depths(box_level)),
    )


def _children(node_level: list[int], box_level: list[int]) -> list[list[int]]:
    """Returns the items of each level by their first node. Boxes without nodes are last."""
    size, outside = len(node_level), len(box_level)
    children: list[list[int]] = [[] for _ in range(outside + 1)]
    is_new = [True] * outside + [False]

    def open_from(at: int) -> None:
        while is_new[at]:
            is_new[at] = False
            children[box_level[at]].append(size + at)
            at = box_level[at]

    for node, at in enumerate(node_level):
        children[at].append(node)
        if is_new[at]:
            open_from(at)
    for box in range(outside):
        open_from(box)
    return children


def _put_recompute_first(view: GraphView, items: list[int]) -> None:
    """Moves each recompute before the backward that encloses it, so that it is next to the forward."""
    phases = [each.phase if each.kind == PHASE else None for each in view.boxes]
    places = {phases[item - len(view.nodes)]: at for at, item in enumerate(items) if item >= len(view.nodes)}
    backward, recompute = places.get(BACKWARD), places.get(RECOMPUTE)
    if backward is not None and recompute is not None and backward < recompute:
        items.insert(backward, items.pop(recompute))


def _depths(box_level: list[int]) -> list[int]:
    """Returns how many boxes are around each box; the last entry, for outside of all boxes, is -1."""
    depth = [-1] * (len(box_level) + 1)
    for box, around in enumerate(box_level):
        depth[box] = depth[around] + 1
    return depth


def _lift(view: GraphView, level_of: Rows, depth: list[int]) -> LiftedPairs:
    """Moves both ends of all edges outwards, until the ends of each edge are in one level."""
    begin = np.array([edge.source for edge in view.edges], np.int64)
    end = np.array([edge.target for edge in view.edges], np.int64)
    source, target = begin.copy(), end.copy()
    item_depth = np.array(depth, np.int64)[level_of]
    left: list[tuple[Rows, Rows]] = []
    entered: list[tuple[Rows, Rows]] = []
    climbing = np.flatnonzero(level_of[source] != level_of[target])
    while len(climbing):
        from_depth, to_depth = item_depth[source[climbing]], item_depth[target[climbing]]
        left.append(_climb(source, climbing[from_depth >= to_depth], level_of, len(view.nodes)))
        entered.append(_climb(target, climbing[to_depth >= from_depth], level_of, len(view.nodes)))
        climbing = climbing[level_of[source[climbing]] != level_of[target[climbing]]]
    return LiftedPairs(
        kind=_kinds(view, source, target),
        source=begin,
        target=end,
        from_item=source,
        to_item=target,
        left_by=_join(left),
        entered_by=_join(entered),
    )


def _climb(ends: Rows, edges: Rows, level_of: Rows, first_box: int) -> tuple[Rows, Rows]:
    """Moves the ends of some edges to the boxes around them. Returns the edges and their former ends."""
    items = ends[edges]
    ends[edges] = first_box + level_of[items]
    return edges, items


def _join(parts: Iterable[tuple[Rows, Rows]]) -> tuple[Rows, Rows]:
    nothing = np.zeros(0, np.int64)
    edges, items = zip((nothing, nothing), *parts, strict=True)
    return np.concatenate(edges), np.concatenate(items)


def _kinds(view: GraphView, source: Rows, target: Rows) -> Column:
    """Returns the kind of each edge.

    An edge at the box of a phase other than forward is ACROSS, one to itself a LOOP.
    """
    beside = [box.kind == PHASE and box.phase != FORWARD for box in view.boxes]
    is_beside = np.array([False] * len(view.nodes) + beside, bool)
    is_loop = np.array([edge.is_loop for edge in view.edges], bool) | (source == target)
    return np.where(is_beside[source] | is_beside[target], ACROSS, np.where(is_loop, LOOP, DOWN))
