"""The sizes and distances of a graph picture, in pixels."""

import numpy as np
import numpy.typing as npt

from ..graph.columns import LEAF_KINDS
from ..graph_view.records import ViewNode

Floats = npt.NDArray[np.float64]

#: The gap between a box and its contents.
PADDING = 12.0
#: The height of a box's title, which is above its contents.
TITLE_HEIGHT = 18.0
#: The gap between rows, in which lines turn.
ROW_GAP = 26.0
#: The gap between items side by side.
COLUMN_GAP = 16.0
#: The gap between a node and a line that passes it, or between two such lines.
LINE_GAP = 7.0
#: The most of a node, and the least of a box, that is left of its column. So a wider node
#: further down does not move a box to the left.
HALF = 70.0

#: The position beyond which a row takes no further node.
WIDEST_ROW = 1000.0
#: The least height of a row, so that items of about the same height share a row, whichever comes first.
ROW_HEIGHT = 26.0

_CHARACTER, _SMALL_CHARACTER = 7.2, 6.2
_NARROWEST, _WIDEST = 48.0, 240.0
_LEAF_HEIGHT = 20.0
_LEAVES = frozenset(LEAF_KINDS)


def default_size(node: ViewNode) -> tuple[float, float]:
    """Returns the size for a label of one line. A label of more than about 30 characters has to be cut."""
    characters = len(node.label)
    if node.repeats > 1:
        characters += len(str(node.repeats)) + 3
    is_leaf = node.kind in _LEAVES
    width = 18.0 + (_SMALL_CHARACTER if is_leaf else _CHARACTER) * characters
    width = _NARROWEST if width < _NARROWEST else _WIDEST if width > _WIDEST else width
    return width, _LEAF_HEIGHT if is_leaf else ROW_HEIGHT


def title_width(title: str) -> float:
    """Returns the width of a box that its title fits into."""
    return min(18.0 + _CHARACTER * len(title), _WIDEST)
