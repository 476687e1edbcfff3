"""The sizes and distances of a graph picture, in pixels."""

import numpy as np
import numpy.typing as npt

from ..graph.columns import LEAF_KINDS
from ..graph_view.records import ViewNode

Floats = npt.NDArray[np.float64]

#: Between a box and what is inside of it.
PADDING = 12.0
#: Of the title inside of a box, above all else.
TITLE_HEIGHT = 18.0
#: Between rows; lines turn in there.
ROW_GAP = 26.0
#: Between what stands side by side.
COLUMN_GAP = 16.0
#: Between a node and a line that passes it, or between two such lines.
LINE_GAP = 7.0
#: The part of a node that stands left of its column, at most, and of a box at least. So a wider node
#: further down does not move a box to the left.
HALF = 70.0

#: A row takes no further node that would stand further to the right than this.
WIDEST_ROW = 1000.0
#: So that things of about one height stand in one row, whichever comes first.
ROW_HEIGHT = 26.0

_CHARACTER, _SMALL_CHARACTER = 7.2, 6.2
_NARROWEST, _WIDEST = 48.0, 240.0
_LEAF_HEIGHT = 20.0
_LEAVES = frozenset(LEAF_KINDS)


def default_size(node: ViewNode) -> tuple[float, float]:
    """Returns the size for a label of one line; a label of more than about 30 characters has to be cut."""
    characters = len(node.label)
    if node.repeats > 1:
        characters += len(str(node.repeats)) + 3
    is_leaf = node.kind in _LEAVES
    width = 18.0 + (_SMALL_CHARACTER if is_leaf else _CHARACTER) * characters
    width = _NARROWEST if width < _NARROWEST else _WIDEST if width > _WIDEST else width
    return width, _LEAF_HEIGHT if is_leaf else ROW_HEIGHT


def title_width(title: str) -> float:
    """Returns the width of a box whose title fits."""
    return min(18.0 + _CHARACTER * len(title), _WIDEST)
