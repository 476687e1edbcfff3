"""Finds the thread that made an autograd node, and marks nodes that are made on the engine's own threads."""

from typing import Any

import torch

from ...torch_internals.autograd import (
    ACCUMULATE_SEQUENCE_NR,
    is_custom_function,
    queue_callback,
    sequence_nr,
)
from ...torch_internals.modes import DisableTorchFunction
from ...torch_internals.tensors import grad_fn_of
from ...torch_internals.transforms import is_functorch_tensor, wrapped_by_functorch
from ..log.segments import Segment
from ..log.thread_log import Backward, NodeMark, ThreadLog, ThreadLogs
from .graph_walk import walk_graph
from .graph_watch import GraphOwners


class NodeThreads:
    """Finds the threads that made the nodes of running graphs.

    On the CPU the engine runs nodes on the thread that began the backward, which most often also built the graph. For a
    device it uses a thread of its own, on which the same numbers belong to other nodes: those of a reentrant
    checkpoint's recompute, and of backwards with `create_graph`.
    """

    def __init__(self, logs: ThreadLogs) -> None:
        self._logs = logs
        self._unseen: tuple[int, GraphOwners] | None = None  # graph task and owners

    def sole(self, log: ThreadLog, backward: Backward | None) -> ThreadLog | None:
        """Returns the log of the thread that has made all nodes of a graph; None if several may have made some.

        Args:
            log: the log of this thread, which runs a node.
        """
        home = log if backward is None else backward.home
        if backward is not None and backward.log is not home:
            return None  # a node on an engine thread began it
        is_another = any(other.has_built() for other in self._logs.all if other is not home)
        return None if is_another else home

    def of(self, log: ThreadLog, task: int, backward: Backward | None, node: Any) -> ThreadLog | None:
        """Returns the log of the thread that has made a node of a running graph; None if that cannot be known.

        Args:
            backward: the run of the graph; None if it did not come through the wrapped entry.
        """
        sole = self.sole(log, backward)
        if sole is not None:
            return sole
        mark = mark_of(node)
        if mark is not None:
            return mark.log
        number = node._sequence_nr()
        if backward is None:
            return _only(self._builders(log, task, None, node))
        began_on = backward.log
        own = began_on.span_of(number)
        if isinstance(own, Segment) and backward.outer is not None and own.task == backward.outer.task:
            return began_on  # that thread recomputed it within the surrounding backward
        known = self._builders(began_on, task, backward, node)
        makers = known or {backward.home, *(other for other in self._logs.all if other.has_built_forward())}
        if number >= backward.home_seq:
            makers.discard(backward.home)
        makers |= {other for other in self._logs.all if number < other.unmarked_seq}
        if backward.may_have_remade(number):
            visited: GraphOwners = backward.owners
            is_inside = backward.remade_from <= visited.lowest and visited.highest < backward.first_seq
            if not known and is_inside and is_custom_function(backward.inside):
                return began_on  # it runs only what it has just recomputed
            makers.add(began_on)
        return _only(makers)

    def _builders(self, log: ThreadLog, task: int, backward: Backward | None, node: Any) -> set[ThreadLog]:
        """Returns the threads of the calls whose outputs are at or below a node in the graph."""
        known = set(self._owners_of(task, backward).below(node))
        if backward is not None:
            known |= backward.reached_logs
        if len(known) > 1:
            number = node._sequence_nr()
            known = {maker for maker in known if maker.span_of(number) is not None}
        return known

    def _owners_of(self, task: int, backward: Backward | None) -> GraphOwners:
        """Returns the owners of a graph that runs, which are forgotten when the backward ends."""
        if backward is not None:
            if backward.owners is None:
                backward.owners = GraphOwners()
            owners: GraphOwners = backward.owners
            return owners
        unseen = self._unseen
        if unseen is None or unseen[0] != task:  # C++ code started this backward
            unseen = self._unseen = task, GraphOwners()
            queue_callback(self.forget_unseen)  # not called if the backward raises; then the next one forgets
        return unseen[1]

    def forget_unseen(self) -> None:
        """Forgets the owners of graphs that have no `Backward`."""
        self._unseen = None


def _only(makers: set[ThreadLog]) -> ThreadLog | None:
    return next(iter(makers)) if len(makers) == 1 else None


_METADATA_KEY = "modtrace gradient"


def mark_of(node: Any) -> NodeMark | None:
    """Returns the mark of a node; None if it has none."""
    mark = node.metadata.get(_METADATA_KEY)
    return mark if isinstance(mark, NodeMark) else None


def mark_made_by(backward: Backward, outputs: Any, gradients: Any) -> None:
    """Marks nodes that a backward made on the engine's own threads, as far as they can be reached from its gradients.

    It costs 1.5 us for each node of both graphs. A node is not marked if several threads may have made one of its
    number.
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
    """Returns the nodes of tensors, or of edges of the graph."""
    given = (values,) if isinstance(values, torch.Tensor) else values
    with DisableTorchFunction():
        found = [
            _nodes_of_tensor(value) if isinstance(value, torch.Tensor) else [getattr(value, "node", None)]
            for value in given
        ]
    return [node for nodes in found for node in nodes if node is not None]


def _nodes_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """Returns the node of a tensor, and those of what is inside the wrappers of running transforms."""
    nodes = [grad_fn_of(tensor)]
    while is_functorch_tensor(tensor):
        tensor = wrapped_by_functorch(tensor)
        nodes.append(grad_fn_of(tensor))
    return nodes
