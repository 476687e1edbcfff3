"""Finds the visible item for every layer and node: a closed layer, or the first layer of a folded run."""

from dataclasses import dataclass

import numpy as np

from ..graph.columns import LAYER_KINDS, LEAF_KINDS, NODE_KINDS, NONE, OPTIMIZER_STEP, Graph
from ..tables.columns import Column, Rows, count_before
from ..tables.tensors import Tensors
from .fold import Folding
from .signatures import number_columns

_OPTIMIZER_STEP = LAYER_KINDS.index(OPTIMIZER_STEP)
_LEAVES = [NODE_KINDS.index(kind) for kind in LEAF_KINDS]


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """The part of a graph that is to be visible."""

    closed: Column  # for each layer, whether it is shown as one node
    folding: Folding | None = None
    tensors: bool = False  # whether outputs of ops are shown as nodes


def close_below(graph: Graph, depth: int) -> Column:
    """Returns a mask of the layers that a view of this depth closes, and of all layers inside them.

    These are the layers at the depth below a root, innermost layers and optimizer steps.

    No layer is closed if none is that deep.

    Raises:
        ValueError: `depth` is negative.
    """
    if depth < 0:
        raise ValueError(f"depth={depth!r}: give 0 to see the roots alone, or more")
    layers = graph.layers
    if depth > layers.depth.max(initial=0):
        return np.zeros(len(layers), bool)
    is_innermost = _has_none_inside(graph) & (layers.depth > 0)
    is_step = layers.kind == _OPTIMIZER_STEP
    return np.asarray((layers.depth >= depth) | is_step | is_innermost)


class Items:
    """Numbers all items that may be visible: layer n is item n, node n is item `first_node + n`, and tensors follow."""

    def __init__(self, graph: Graph, seen: Seen) -> None:
        self.graph = graph
        self.first_node = len(graph.layers)
        self.first_tensor = self.first_node + len(graph.nodes)
        folding = seen.folding
        self.layer_for = np.arange(self.first_node) if folding is None else folding.layer
        self.node_for = np.arange(len(graph.nodes)) if folding is None else folding.node
        self.structures = {} if folding is None else folding.structures
        closed = seen.closed if graph.has_ops else seen.closed | _has_none_inside(graph)
        shown_closed = np.zeros(self.first_node, bool)
        shown_closed[self.layer_for[closed]] = True  # closing a layer closes all layers folded with it
        self.closed_at = _outermost_closed(graph.layers.parent, shown_closed)
        self.of_layer = np.append(self.closed_at[self.layer_for], NONE)
        layer = self.of_layer[graph.nodes.layer]
        self.of_node = np.where(layer >= 0, layer, self.first_node + self.node_for)
        self.tensor_of_edge = self._tensors() if seen.tensors else np.full(len(graph.edges), NONE, np.int64)

    def _tensors(self) -> Rows:
        """Returns the item of each edge's tensor, if an op made the tensor and it is visible outside of its layer."""
        edges, tensors = self.graph.edges, self.graph.tensors
        if not len(tensors):
            return np.full(len(edges), NONE, np.int64)
        key = _name_tensors(tensors, self.node_for)[edges.tensor]
        is_inside = self.of_node[edges.source] == self.of_node[edges.target]
        distinct, number = np.unique(np.where(is_inside, NONE, key), return_inverse=True)
        has_none = len(distinct) > 0 and distinct[0] == NONE
        number = number.reshape(-1) - has_none
        return np.where(number >= 0, self.first_tensor + number, NONE)

    def phase_of(self, items: Rows) -> Column:
        """Returns the phase of each item, as a code of `PHASES`; -1 for tensors."""
        phases = np.concatenate([self.graph.layers.phase, self.graph.nodes.phase, [NONE]])
        return np.asarray(phases[np.minimum(items, self.first_tensor)])

    def order(self) -> Column:
        """Returns the rank of each layer and node in time. A leaf precedes its readers, and hidden items are last."""
        graph = self.graph
        times = np.full(self.first_tensor, np.iinfo(np.int64).max, np.int64)
        np.minimum.at(times, self.of_node, 2 * graph.nodes.order + 1)
        is_leaf = np.isin(graph.nodes.kind, _LEAVES) & (self.of_node >= self.first_node)
        reads = np.flatnonzero(is_leaf[graph.edges.source])
        source, target = (self.of_node[end[reads]] for end in (graph.edges.source, graph.edges.target))
        np.minimum.at(times, source, times[target] - 1)
        return times


def _name_tensors(tensors: Tensors, node_for: Rows) -> Rows:
    """Returns a number for each tensor that an op made.

    Corresponding tensors in folded layers have the same number.

    The outputs of an op are distinguished by their slots, and those without slots (`_foreach_add_`) by their memory.
    """
    made = np.flatnonzero(tensors.producer >= 0)
    producer, slot = tensors.producer[made], tensors.slot[made].astype(np.int64)
    storage = tensors.storage[made].astype(np.int64)
    storage = np.where(storage >= 0, storage, -2 - made)
    place = number_columns(np.stack([producer, slot]))
    memory = number_columns(np.stack([place, storage - storage.min(initial=0)]))
    _, first, which = np.unique(memory, return_index=True, return_inverse=True)
    rank = count_before(place[first], first)
    key = np.full(len(tensors), NONE, np.int64)
    key[made] = number_columns(np.stack([node_for[producer], slot, rank[which.reshape(-1)]]))
    return key


def _has_none_inside(graph: Graph) -> Column:
    return np.asarray(graph.layers.last == np.arange(len(graph.layers)))


def _outermost_closed(parent: Rows, closed: Column) -> Rows:
    """Returns the outermost closed layer around each layer, or the layer itself; NONE if all of them are open."""
    found: list[int] = []
    for at, (above, is_closed) in enumerate(zip(parent.tolist(), closed.tolist(), strict=True)):
        outer = found[above] if above >= 0 else NONE
        found.append(outer if outer >= 0 else at if is_closed else NONE)
    return np.array(found, np.int64)
