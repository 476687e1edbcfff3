"""Marks the nodes that a backward has made on a thread of the engine's own (`create_graph`) with that thread."""

from typing import Any

import torch

from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR, sequence_nr
from ...torch_internals.modes import DisableTorchFunction
from ...torch_internals.tensors import grad_fn_of
from ...torch_internals.transforms import is_functorch_tensor, wrapped_by_functorch
from ..log.thread_log import Backward, NodeMark
from .graph_walk import walk_graph

_METADATA_KEY = "modtrace gradient"


def mark_of(node: Any) -> NodeMark | None:
    """Returns the mark of a node; None if it has none."""
    mark = node.metadata.get(_METADATA_KEY)
    return mark if isinstance(mark, NodeMark) else None


def mark_made_by(backward: Backward, outputs: Any, gradients: Any) -> None:
    """Marks what a backward has made on threads of the engine's own, as far as its gradients lead to it.

    It costs 1.5 us for a node of both graphs. Where several threads may have given a node its number, none is named.
    """
    logs = [log for log in backward.spans if log is not backward.log]
    unclear, made_at_home = NodeMark(None), range(backward.first_seq, sequence_nr())
    before, leaves = _read(outputs)
    if backward.accumulate:
        gradients = [leaf.grad for leaf in leaves]
    for node, number, _ in walk_graph(_nodes_of(gradients), before):
        made_on = [log for log in logs if backward.spans[log].has_made(number)]
        if made_on:
            is_one = len(made_on) == 1 and number not in made_at_home
            node.metadata[_METADATA_KEY] = made_on[0].mark if is_one else unclear


def _read(outputs: Any) -> tuple[set[Any], list[torch.Tensor]]:
    """Returns the nodes of a graph, and the leaves whose gradients it accumulates."""
    nodes, leaves = set(), []
    for node, number, _ in walk_graph(_nodes_of(outputs)):
        nodes.add(node)
        if number == ACCUMULATE_SEQUENCE_NR:
            leaves.append(node.variable)
    return nodes, leaves


def _nodes_of(values: Any) -> list[Any]:
    """Returns the nodes of tensors, or of the edges that torch takes as well."""
    given = (values,) if isinstance(values, torch.Tensor) else values
    with DisableTorchFunction():
        found = [
            _nodes_of_tensor(each) if isinstance(each, torch.Tensor) else [getattr(each, "node", None)]
            for each in given
        ]
    return [node for nodes in found for node in nodes if node is not None]


def _nodes_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """Returns the node of a tensor, and those of what is inside the wrappers of running transforms."""
    nodes = [grad_fn_of(tensor)]
    while is_functorch_tensor(tensor):
        tensor = wrapped_by_functorch(tensor)
        nodes.append(grad_fn_of(tensor))
    return nodes
