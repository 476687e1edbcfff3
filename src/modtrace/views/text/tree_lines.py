"""Draws a module tree as lines with guides."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...analysis.modules.module_tree import ModuleNode

#: The number of levels with guides; deeper lines begin with the number of their level.
_DRAWN_LEVELS = 30
_GUIDE_WIDTH = 3


class TreeLine(NamedTuple):
    """A node, and the guides before it."""

    guides: str
    below_guides: str  # the guides of further lines about the same node
    node: ModuleNode


def draw_lines(roots: Sequence[ModuleNode], depth: int | None) -> Iterator[TreeLine]:
    """Yields the nodes down to `depth` levels below the roots, in reading order."""
    waiting = [(node, 0, "", "") for node in reversed(roots)]
    while waiting:
        node, level, around, corner = waiting.pop()
        children = _visible_children(node, level, depth)
        inner = around + {"": "", "├─ ": "│  ", "└─ ": "   "}[corner]
        yield TreeLine(
            _with_level(around + corner, level),
            _with_level(inner, level) + ("│  " if children else "   "),
            node,
        )
        inner = inner[-_DRAWN_LEVELS * _GUIDE_WIDTH :]
        for child in reversed(children):
            waiting.append((child, level + 1, inner, "└─ " if child is children[-1] else "├─ "))


def _visible_children(node: ModuleNode, level: int, depth: int | None) -> Sequence[ModuleNode]:
    if depth is None or level + 1 < depth:
        return node.children
    if level == depth:
        return ()
    return [child for child in node.children if child.role != "inside"]


def _with_level(guides: str, level: int) -> str:
    return f"({level}) {guides}" if level > _DRAWN_LEVELS else guides
