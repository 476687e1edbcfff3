"""Keeps torch from freeing a deep autograd graph recursively, which would overflow the stack.

Torch frees a chain of nodes in a loop. However, a node with a Python object is freed inside of the node above it, which
takes some 200 bytes of stack each (2.13, where the object lives as long as the node). Walking a graph, or registering a
hook on a tensor in it, makes such objects, and a chain of 50,000 of them overflows a stack of 8 MB.

So nodes that are touched here get a second reference to the nodes below them, in their metadata, which is freed last.
Nodes referenced in this way are freed one after another, and none lives longer because of it.
"""

from collections.abc import Callable
from typing import Any

#: A holder of nodes. Where it is not compiled it is a tuple: CPython limits how deeply tuples are freed inside each
#: other, but in 3.13 too late.
ReleasedInTurn: Callable[[Any], object]

try:
    from ._released_in_turn import ReleasedInTurn
except ImportError:
    ReleasedInTurn = tuple

_METADATA_KEY = "modtrace.below"

#: A walk cuts the graph between nodes of two blocks of this many numbers. Numbers fall along each path, so at most this
#: many nodes are freed inside each other, or 50 times as many with tuples.
BLOCK = 32


def is_cut_below(number: int) -> bool:
    """Returns whether to cut the graph below a node that is touched alone, given the node's sequence number.

    This holds for one of eight numbers, chosen without a pattern that numbers of a program's nodes might have as well.
    """
    return number * 0x9E3779B1 & 0x38000000 == 0


def cut_below(node: Any, below: Any) -> None:
    """Makes the next nodes of a node be freed after it instead of inside it, unless that was done before.

    Args:
        below: an object that refers only to the next nodes, such as `node.next_functions` or a list of nodes.
    """
    metadata = node.metadata
    if _METADATA_KEY not in metadata:
        metadata[_METADATA_KEY] = ReleasedInTurn(below)
