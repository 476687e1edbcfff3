"""Lifts the edges of a graph to its visible items."""

import numpy as np

from ..graph.columns import DATA, NEXT, NONE, Graph
from ..step.calls import Column
from .items import Items
from .records import ViewEdge


class LiftedEdges:
    """Edges between items. Each pair occurs once, in order of time."""

    def __init__(self, graph: Graph, items: Items, order: Column) -> None:
        edges = graph.edges
        source, target = items.of_node[edges.source], items.of_node[edges.target]
        tensor = items.tensor_of_edge
        through = np.flatnonzero((tensor >= 0) & (source != target))
        straight = np.flatnonzero((tensor < 0) & (source != target))
        into, out_of = (
            np.stack([source[through], tensor[through]]),
            np.stack([tensor[through], target[through]]),
        )
        pairs = np.concatenate([into, np.stack([source, target])[:, straight], out_of], axis=1)
        edge = np.concatenate([through, straight, through])
        is_into = np.arange(len(edge)) < len(through)
        size = int(pairs.max(initial=0)) + 1
        _, first, which = np.unique(pairs[0] * size + pairs[1], return_index=True, return_inverse=True)
        by_time = np.lexsort((~is_into[first], edge[first]))
        first = first[by_time]
        self._graph = graph
        self.source, self.target = pairs[0][first], pairs[1][first]
        self.edge, self.count = edge[first], np.bincount(which.reshape(-1))[by_time]
        self.is_into_tensor = is_into[first]
        maker, reader = source[self.edge], target[self.edge]
        is_back = (order[maker] >= order[reader]) & ~self.is_into_tensor
        made_in, read_in = items.phase_of(maker), items.phase_of(reader)
        self.is_loop = is_back & ((made_in == read_in) | (made_in < 0) | (read_in < 0))

    def to_view(self, number: Column) -> tuple[ViewEdge, ...]:
        """Returns the edges; `number` is that of the visible node of each item."""
        graph, edges = self._graph, self._graph.edges
        shapes, dtypes, slots = graph.tensors.shapes, graph.tensors.dtypes, edges.slots
        outputs = graph.tensors.slots
        made_as = np.append(graph.tensors.slot, NONE)[edges.tensor[self.edge]]
        kind = DATA if graph.has_ops else NEXT
        columns = (
            number[self.source], number[self.target], edges.tensor[self.edge], edges.slot[self.edge],
            self.count, edges.time_ns[self.edge], self.is_loop, self.is_into_tensor, made_as,
        )  # fmt: skip
        return tuple(
            ViewEdge(
                source,
                target,
                kind,
                "" if is_into or slot < 0 else slots[slot],
                shapes[tensor] if tensor >= 0 else None,
                dtypes[tensor] if tensor >= 0 else None,
                count,
                time_ns,
                is_loop,
                outputs[made] if tensor >= 0 and made >= 0 else "",
            )
            for source, target, tensor, slot, count, time_ns, is_loop, is_into, made in zip(
                *(each.tolist() for each in columns), strict=True
            )
        )
