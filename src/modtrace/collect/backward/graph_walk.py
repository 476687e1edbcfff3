"""Walks the graph that a backward will run (1.2 us a node), and finds the bases of views that were written to."""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch

from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR, will_engine_execute
from ...torch_internals.deep_graphs import BLOCK, cut_below, is_cut_below
from ...torch_internals.modes import DisableTorchFunction
from ...torch_internals.tensors import base_of, grad_fn_of
from ...torch_internals.transforms import is_functorch_tensor
from ..log.segments import Segment

#: The next edges of a node: for each, the node (or None) and the number of its output.
Edges = tuple[tuple[Any, int], ...]

_WRITE_THROUGH_VIEW = "CopySlices"  # the name of the node that a write through a view gives to the whole base


def node_of(tensor: torch.Tensor) -> Any:
    """Returns the node that made a tensor; None if there is none, or if torch cannot say."""
    try:
        node = None if is_functorch_tensor(tensor) else grad_fn_of(tensor)
    except RuntimeError:  # torch raises for a view whose base was written to
        return None
    if node is not None and is_cut_below(node._sequence_nr()):  # 3 us
        cut_below(node, node.next_functions)
    return node


def root_nodes(outputs: Any, *, with_leaves: bool = False) -> list[Any]:
    """Returns the nodes at which a backward begins, given tensors or edges of the graph.

    An edge may lead to the node that accumulates the gradient of a leaf; `with_leaves` returns these too.
    """
    given = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    with DisableTorchFunction():
        nodes = [
            node_of(output) if isinstance(output, torch.Tensor) else getattr(output, "node", None)
            for output in given
        ]
    found = [node for node in dict.fromkeys(nodes) if node is not None]
    return found if with_leaves else [node for node in found if node._sequence_nr() != ACCUMULATE_SEQUENCE_NR]


def begins_at_leaf(outputs: Any) -> bool:
    """Returns whether a backward may begin at the gradient of a leaf, or of a tensor whose node torch cannot say.

    Hooks on `root_nodes` do not run before the gradient of that leaf.
    """
    given = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return any(not root_nodes((output,)) for output in given)


def walk_graph(roots: Iterable[Any], known: Container[Any] = ()) -> Iterator[tuple[Any, int, Edges]]:
    """Yields the given nodes and all nodes below them, each once, with its sequence number and its next edges.

    Nodes in `known` are left out, and so are nodes that only these lead to.
    """
    pending = [(root, root._sequence_nr()) for root in dict.fromkeys(roots) if root not in known]
    seen = {root for root, _ in pending}
    while pending:
        node, number = pending.pop()
        edges = node.next_functions
        yield node, number, edges
        block, cut_off = number // BLOCK, []
        for below, _ in edges:
            if below is None:
                continue
            below_number = below._sequence_nr()
            if below_number // BLOCK != block and below_number != ACCUMULATE_SEQUENCE_NR:
                cut_off.append(below)
            if below not in seen and below not in known:
                seen.add(below)
                pending.append((below, below_number))
        if cut_off:
            cut_below(node, cut_off)


def edges_to_written_bases(node: Any) -> Iterator[tuple[Any, int]]:
    """Yields the nodes of the base below `node`, if it writes to a view and will run.

    Each node comes with the number of its output.
    """
    if type(node).__name__ == _WRITE_THROUGH_VIEW and will_run(node):
        yield from ((below, output_nr) for below, output_nr in node.next_functions if below is not None)


def base_made_in(segment: Segment, first_seq: int, tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the base of a view that a call returns, if the gradient of the view is that of the whole base.

    An in-place ReLU may come next. Then the view's own node leaves the graph, and the gradient goes to the node of the
    base. Linear returns a view for inputs of three and more dimensions (torch 2.13). The result is None unless the call
    made the base and the base is no larger than the view.

    Args:
        segment: the segment of the call.
        first_seq: the number of the first node that could be made in the call.
    """
    base = base_of(tensor)
    if base is None or base.numel() != tensor.numel() or base.dtype != tensor.dtype:
        return None
    node = node_of(base)
    if node is None or not (base.is_contiguous() and tensor.is_contiguous()):
        return None
    number = node._sequence_nr()
    return base if first_seq <= number and segment.has_made(number) else None


def will_run(node: Any) -> bool:
    """Returns whether the running engine will run the node; True where torch does not know."""
    if will_engine_execute is None:
        return True
    try:
        return will_engine_execute(node)
    except RuntimeError:  # a leaf that `autograd.grad` was given: its hooks run
        return True
