"""Keeps torch from freeing a deep autograd graph recursively, which would overflow the stack.

Torch frees a chain of nodes in a loop. A node that has a Python object, however, is freed inside of the node above it,
with some 200 bytes of stack for each (2.13, where the object lives as long as the node does). Whoever walks a graph, or
registers a hook on a tensor in it, makes such objects: a chain of 50,000 of them overflows a stack of 8 MB.

So nodes that are touched here refer once more to those below them, in their metadata, which is the last that is freed
of a node. Nodes that are referred to in this way are freed one after another. None lives longer by it.
"""

from collections.abc import Callable
from typing import Any

#: Holds nodes. Where it is not compiled it is a tuple: CPython limits how deep tuples are freed inside of each other,
#: but in 3.13 too late.
ReleasedInTurn: Callable[[Any], object]

try:
    from ._released_in_turn import ReleasedInTurn
except ImportError:
    ReleasedInTurn = tuple

_METADATA_KEY = "modtrace.below"

#: A walk cuts the graph between nodes of two blocks of this many numbers. Numbers fall along each path, so that at most
#: this many nodes are freed inside of each other, or 50 times as many where tuples hold them.
_BLOCK = 32


def is_cut_between(number: int, below: int) -> bool:
    """Returns whether a walk cuts the graph between two consecutive nodes, given by their sequence numbers."""
    return number // _BLOCK != below // _BLOCK


def is_cut_below(number: int) -> bool:
    """Returns whether the graph is cut below a node that is touched alone, given by its sequence number.

    It is for one of eight numbers, without a pattern that those of a program's nodes could have as well.
    """
    return number * 0x9E3779B1 & 0x38000000 == 0


def cut_below(node: Any, below: Any) -> None:
    """Makes the next nodes of a node be freed after it and not inside of it, unless that was done before.

    Args:
        below: what refers to the next nodes and to nothing else, such as `node.next_functions` or a list of nodes.
    """
    metadata = node.metadata
    if _METADATA_KEY not in metadata:
        metadata[_METADATA_KEY] = ReleasedInTurn(below)
