"""Walks the graph that a backward runs, at 1 us a node, and finds what a write to a view has done to it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...torch_internals.autograd import will_engine_execute
from ...torch_internals.tensors import base_of
from ..log.segments import CallRef
from .graph_watch import node_of

_WRITE_THROUGH_VIEW = "CopySlices"  # the node of the whole base


def nodes_below(outputs: Any) -> Iterator[Any]:
    """Yields the nodes that lead to what a backward begins with: tensors, or the edges that torch takes as well."""
    given: Iterable[Any] = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    nodes = (
        node_of(each) if isinstance(each, torch.Tensor) else getattr(each, "node", None) for each in given
    )
    pending = [node for node in nodes if node is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)


def edges_to_written_bases(node: Any) -> Iterator[tuple[Any, int]]:
    """Yields, for a node of a write to a view that will run, the nodes of the base before it and their outputs."""
    if type(node).__name__ == _WRITE_THROUGH_VIEW and will_run(node):
        yield from ((below, output_nr) for below, output_nr in node.next_functions if below is not None)


def base_made_in(call: CallRef, tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the base of a view that the call returns, if the gradient of the view is that of the whole base.

    A ReLU that works in place may come next. Then the view's own node is in no graph any more, and the gradient goes to
    that of the base. What Linear returns of three and more dimensions is a view (torch 2.13). Only of bases that the
    call has made, and that are no larger.
    """
    base = base_of(tensor)
    if base is None or base.numel() != tensor.numel() or base.dtype != tensor.dtype:
        return None
    node, segment = node_of(base), call.segment
    if node is None or not (base.is_contiguous() and tensor.is_contiguous()):
        return None
    made_in = segment.call_at(node._sequence_nr()) if segment.has_made(node._sequence_nr()) else None
    return None if made_in is None or made_in.index < call.index else base


def will_run(node: Any) -> bool:
    """Returns whether the running engine will run the node; True where torch cannot tell."""
    if will_engine_execute is None:
        return True
    try:
        return will_engine_execute(node)
    except RuntimeError:  # of a leaf that `autograd.grad` was asked for (2.13): its hooks run
        return True
