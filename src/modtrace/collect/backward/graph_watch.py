"""Watches the graph of an outermost call: when backward reaches its outputs, and when the graph is freed."""

import math
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR
from ...torch_internals.dynamo import is_dynamo_compiling
from ...torch_internals.modes import DisableTorchFunction
from ..log.segments import Segment
from ..log.thread_log import ThreadLog
from ..structures.find import find_slots
from .graph_walk import node_of, walk_graph

_METADATA_KEY = "modtrace"

#: The number of an output's tensors that are watched, from the first on.
_MAX_TENSORS = 64


class GraphWatch:
    """A hook before an autograd node. The node's metadata holds this object too, so that it dies with the node."""

    __slots__ = ("__weakref__", "_handle", "_reached", "segment")

    def __init__(self, segment: Segment, reached: Callable[[Segment], None]) -> None:
        self.segment: Segment | None = segment
        self._reached: Callable[[Segment], None] | None = reached
        self._handle: Any = None

    def attach(self, node: Any) -> None:
        """Attaches the watch to a node."""
        node.metadata[_METADATA_KEY] = self
        self._handle = node.register_prehook(self)

    def remove(self) -> None:
        """Removes the hook. The graph still holds this object, which is empty then."""
        self.segment = None
        self._reached = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, grad_outputs: Any) -> None:
        if is_dynamo_compiling() or self._reached is None or self.segment is None:
            return
        self._reached(self.segment)


def watch_graph(segment: Segment, output: Any, reached: Callable[[Segment], None]) -> None:
    """Watches the nodes made in a closed segment that lead to the tensors of its output."""
    assert segment.last_seq is not None
    nodes: dict[int, Any] = {}
    with DisableTorchFunction():  # otherwise a user's function mode would see that grad_fn is read
        for tensor in tensors_in(output):
            node = node_of(tensor)
            if node is not None and segment.first_seq <= node._sequence_nr() < segment.last_seq:
                nodes[node._sequence_nr()] = node
    for node in nodes.values():
        watch = GraphWatch(segment, reached)
        watch.attach(node)
        segment.watches.append(weakref.ref(watch))


class GraphOwners:
    """Finds the threads whose calls returned the outputs that lead to a graph's nodes. Each node is visited once."""

    def __init__(self) -> None:
        self._owners: dict[Any, frozenset[ThreadLog]] = {}
        self.lowest, self.highest = math.inf, -math.inf  # the range of the visited nodes' numbers

    def below(self, node: Any) -> frozenset[ThreadLog]:
        """Returns the threads of the first watched nodes at or below a node of the graph."""
        if node not in self._owners:
            self._visit(node)
        return self._owners[node]

    def _visit(self, root: Any) -> None:
        known = self._owners
        found: dict[Any, frozenset[ThreadLog]] = {}
        above: dict[Any, list[Any]] = {}
        watched: dict[Any, frozenset[ThreadLog]] = {}
        for node, number, edges in walk_graph([root], known):
            found[node] = _NOBODY
            if number != ACCUMULATE_SEQUENCE_NR:
                self.lowest, self.highest = min(self.lowest, number), max(self.highest, number)
            segment = _segment_of(node)
            if segment is not None:
                watched[node] = frozenset([segment.log])
            else:
                for below, _ in edges:
                    above.setdefault(below, []).append(node)
        pending = [*watched.items(), *((below, known[below]) for below in above if below in known)]
        while pending:
            node, owners = pending.pop()
            before = found.get(node, _NOBODY)
            if node in found:
                found[node] = before | owners
            if owners - before:
                pending += [(upper, owners) for upper in above.get(node, ())]
        known.update(found)


_NOBODY: frozenset[Any] = frozenset()


def _segment_of(node: Any) -> Segment | None:
    watch = node.metadata.get(_METADATA_KEY)
    return watch.segment if isinstance(watch, GraphWatch) else None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the first tensors in an output, at any depth; at most `_MAX_TENSORS`."""
    found = (slot.tensor for slot in find_slots(value))
    return list(islice((tensor for tensor in found if tensor is not None), _MAX_TENSORS))
