"""The state of placing levels: items, edges and their points, and the forward twins of items."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, RECOMPUTE
from ..graph.columns import INPUT, LEAF_KINDS, PHASE
from ..graph_view.records import GraphView, ViewBox
from ..tables.columns import Column, Rows
from .sizes import HALF, Floats
from .tree import ACROSS, DOWN, LOOP, ItemTree, LiftedPairs

Entry = TypeVar("Entry")

# When an item is placed: in its turn, or with its first reader.
AT_ONCE, ENTRANT, WITH_LEAVES, LEAF = range(4)

_LEAVES = frozenset(LEAF_KINDS)
_CONSTANTS = _LEAVES - {INPUT}
# An op that reads more leaves than this is placed in its turn.
_FEW = 4


@dataclass(frozen=True)
class Bends:
    """Points on edges as columns; x and y are relative to the origin of a level."""

    edge: list[int] = field(default_factory=list)
    level: list[int] = field(default_factory=list)
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, edge: int, level: int, x: float, y: float) -> None:
        """Adds a point."""
        self.edge.append(edge)
        self.level.append(level)
        self.x.append(x)
        self.y.append(y)


@dataclass(frozen=True)
class Grouped:
    """Edges by item: those of item n are `edge[first[n] : first[n + 1]]`."""

    first: list[int]
    edge: list[int]
    read: list[int]  # the item that each comes from

    def has(self, item: int) -> bool:
        """Returns whether an item has any edges."""
        return self.first[item + 1] > self.first[item]


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """The state of placing. Lists have one entry for each item, and a last one for outside of all boxes."""

    tree: ItemTree
    #: Of the column of the item, from the origin of its level: the spine, at the top of the content.
    x: list[float]
    y: list[float]  # of its top edge
    left: list[float]  # from the column to its left edge
    right: list[float]
    height: list[float]  # of a box with its title
    last_row: list[int]  # in its level; -1: it is not placed yet
    waits: list[int]
    is_aside: list[bool]  # what it makes goes to other phases alone: it leaves its column to what comes next
    into: Grouped  # edges from another item of the level
    entering: Grouped  # edges from outside of the level
    #: Of a level: edges to outside, and the items that they start in.
    leaving: dict[int, list[tuple[int, int]]]
    looping: dict[int, list[int]]  # of a level: the edges that go back up
    source: list[int]  # of each edge: the node
    content_height: list[float]  # of each level: without title and padding
    bends: Bends
    lanes: Bends  # one for each edge that goes back up; y says nothing


def prepare_work(view: GraphView, tree: ItemTree, sizes: Floats) -> Work:
    """Returns the initial state, in which no item has a position yet."""
    items = tree.nodes + tree.boxes + 1
    boxes = [0.0] * (tree.boxes + 1)
    edges = tree.edges
    down, looping = np.flatnonzero(edges.kind == DOWN), np.flatnonzero(edges.kind == LOOP)
    leaving, left = _only_down(edges, edges.left_by)
    half = np.minimum(sizes[:, 0] / 2, HALF)
    return Work(
        tree=tree,
        x=[0.0] * items,
        y=[0.0] * items,
        left=half.tolist() + boxes,
        right=(sizes[:, 0] - half).tolist() + boxes,
        height=sizes[:, 1].tolist() + boxes,
        last_row=[-1] * items,
        waits=_find_waiting(view, tree, items),
        is_aside=_find_aside(tree, items),
        into=_group(items, down, edges.to_item[down], edges),
        entering=_group(items, *_only_down(edges, edges.entered_by), edges),
        leaving=_by_level(tree.level_of[left], zip(leaving.tolist(), left.tolist(), strict=True)),
        looping=_by_level(tree.level_of[edges.from_item[looping]], looping.tolist()),
        source=edges.source.tolist(),
        content_height=[0.0] * (tree.boxes + 1),
        bends=Bends(),
        lanes=Bends(),
    )


def _group(size: int, edge: Rows, item: Rows, edges: LiftedPairs) -> Grouped:
    """Groups edges by the item of each, in order. An edge may be at several items."""
    order = np.argsort(item, kind="stable")
    first = np.searchsorted(item[order], np.arange(size + 1))
    edge = edge[order]
    return Grouped(first.tolist(), edge.tolist(), edges.from_item[edge].tolist())


def _only_down(edges: LiftedPairs, pairs: tuple[Rows, Rows]) -> tuple[Rows, Rows]:
    """Returns only the pairs whose edge goes down: edges, and the items whose level they enter or leave."""
    edge, item = pairs
    kept = edges.kind[edge] == DOWN
    return edge[kept], item[kept]


def _by_level(levels: Rows, entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    """Groups entries by the level of each, in order."""
    found: dict[int, list[Entry]] = {}
    for level, each in zip(levels.tolist(), entries, strict=True):
        found.setdefault(level, []).append(each)
    return found


def _find_waiting(view: GraphView, tree: ItemTree, items: int) -> list[int]:
    """Returns how each item waits for its first reader, as one of AT_ONCE, ENTRANT, WITH_LEAVES and LEAF.

    Leaves wait, as do ops that read only leaves, nothing, or only from outside of the level. An item that nothing in
    its level reads is placed in its turn, so that later items do not move it.
    """
    is_node = np.arange(items) < tree.nodes
    is_leaf, is_constant = np.zeros(items, bool), np.zeros(items, bool)
    is_leaf[: tree.nodes] = [node.kind in _LEAVES for node in view.nodes]
    is_constant[: tree.nodes] = [node.kind in _CONSTANTS for node in view.nodes]
    edges, down = tree.edges, np.flatnonzero(tree.edges.kind == DOWN)
    inside, constants_inside = _count(items, edges.to_item[down], is_constant[edges.from_item[down]])
    edge, item = _only_down(edges, edges.entered_by)
    outside, constants_outside = _count(items, item, is_constant[edges.source[edge]])
    is_read = is_node & (np.bincount(edges.from_item[down], minlength=items) > 0)
    of_none = is_read & (inside == 0)
    of_leaves = is_read & (inside > 0) & (inside <= _FEW) & (inside == constants_inside) & (outside == 0)
    waits = np.full(items, AT_ONCE)
    waits[of_leaves] = WITH_LEAVES
    waits[of_none] = ENTRANT
    waits[of_none & ((outside == constants_outside) | (is_leaf & (outside == 0)))] = LEAF
    found: list[int] = waits.tolist()
    return found


def _find_aside(tree: ItemTree, items: int) -> list[bool]:
    """Returns the nodes that are read only in other phases."""
    edges = tree.edges
    across = edges.kind == ACROSS
    in_all, in_others = (np.bincount(each, minlength=items) for each in (edges.source, edges.source[across]))
    found: list[bool] = ((in_all > 0) & (in_all == in_others)).tolist()
    return found


def _count(size: int, item: Rows, is_constant: Column) -> tuple[Column, Column]:
    """Returns the number of entries for each item, and the number of those that are constants."""
    return np.bincount(item, minlength=size), np.bincount(item[is_constant], minlength=size)


class Twins:
    """The forward items to which items of other phases belong."""

    def __init__(self, view: GraphView, tree: ItemTree) -> None:
        size = tree.nodes
        self.is_phase = [box.kind == PHASE for box in view.boxes]
        phases = [box.phase if box.kind == PHASE else None for box in (view.boxes[each] for each in tree.top)]
        self.is_forward = [phase == FORWARD for phase in phases]
        self.is_mirrored = [*(phase == BACKWARD for phase in phases), False]
        forward = {_key(box): at for at, box in enumerate(view.boxes) if self.is_forward[at]}
        boxes = [
            forward.get(_key(box), -1) if phases[at] in (BACKWARD, RECOMPUTE) else -1
            for at, box in enumerate(view.boxes)
        ]
        self.of_level = [*boxes, -1]
        self.of_item = [node.twin for node in view.nodes] + [size + at if at >= 0 else -1 for at in boxes]

    def heights_in(self, work: Work, level: int) -> dict[int, float]:
        """Returns the heights of the items of a level that have a twin in the forward twin of the level."""
        twin_level = self.of_level[level]
        if twin_level < 0:
            return {}
        level_of, heights = work.tree.level_of, {}
        content = work.content_height[twin_level]
        for item in work.tree.children[level]:
            twin = self.of_item[item]
            if twin >= 0 and level_of[twin] == twin_level:
                y = work.y[twin]
                heights[item] = content - y - work.height[twin] if self.is_mirrored[level] else y
        return heights


def _key(box: ViewBox) -> tuple[object, ...]:
    if box.kind == PHASE:
        return (PHASE,)
    return box.kind, box.root, box.path, box.call, box.name
