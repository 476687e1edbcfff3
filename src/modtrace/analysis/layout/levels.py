"""Places the contents of each level of a view, innermost levels first."""

from ..graph_view.records import GraphView
from .level import LevelPlacer
from .sizes import PADDING, TITLE_HEIGHT, Floats, title_width
from .tree import ItemTree
from .work import Twins, Work, prepare_work


def lay_out_levels(view: GraphView, tree: ItemTree, sizes: Floats) -> tuple[Work, list[bool]]:
    """Places the items of every level. Returns also, for each level, whether time goes up in it.

    Levels of the forward are placed before those beside them.

    Args:
        view: the visible part of a graph.
        tree: its levels.
        sizes: width and height of each node.
    """
    work, twins = prepare_work(view, tree, sizes), Twins(view, tree)
    for level in sorted(range(tree.boxes), key=lambda box: (not twins.is_forward[box], -box)):
        _lay_out_level(work, level, twins)
        _close_box(work, level, view.boxes[level].label or view.boxes[level].name)
    _lay_out_level(work, tree.boxes, twins)
    _raise_backward(work, twins)
    return work, twins.is_mirrored


def _lay_out_level(work: Work, level: int, twins: Twins) -> None:
    first_bend = len(work.bends.edge)
    LevelPlacer(work, level, twins).run()
    twin = twins.of_level[level]
    if twin >= 0:
        work.content_height[level] = max(work.content_height[level], work.content_height[twin])
    if twins.is_mirrored[level]:
        _mirror(work, level, first_bend)


def _mirror(work: Work, level: int, first_bend: int) -> None:
    """Turns a level upside down, so that its first item is at the bottom."""
    height = work.content_height[level]
    for item in work.tree.children[level]:
        work.y[item] = height - work.y[item] - work.height[item]
    bends = work.bends.y
    for at in range(first_bend, len(bends)):
        bends[at] = height - bends[at]


def _close_box(work: Work, level: int, title: str) -> None:
    """Adds padding and a title around the contents of a box."""
    item = work.tree.nodes + level
    left = work.left[item] + PADDING
    work.left[item] = left
    work.right[item] = max(work.right[item] + PADDING, title_width(title) - left)
    work.height[item] = work.content_height[level] + TITLE_HEIGHT + 2 * PADDING


def _raise_backward(work: Work, twins: Twins) -> None:
    """Moves the backward, which begins at its bottom, to the height of the forward's end."""
    size, boxes = work.tree.nodes, work.tree.boxes
    for item in work.tree.children[boxes]:
        level = item - size
        if level < 0 or not twins.is_mirrored[level] or twins.of_level[level] < 0:
            continue
        for inside in work.tree.children[level]:
            twin = twins.of_item[inside]
            if twin >= 0 and work.tree.level_of[twin] == twins.of_level[level]:
                bottom = work.y[twin] + work.height[twin] + work.y[size + twins.of_level[level]]
                work.y[item] = bottom - work.y[inside] - work.height[inside]
                break
