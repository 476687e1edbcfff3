"""Joins the edges of a graph into edges between its visible items."""

from collections.abc import Sequence

import numpy as np

from ..graph.columns import DATA, NEXT, NONE, Graph
from ..tables.columns import Column
from .items import Items
from .records import ViewEdge


def lift_edges(graph: Graph, items: Items, order: Column, number: Column) -> tuple[ViewEdge, ...]:
    """Returns the edges between items, each pair once, in order of time.

    Args:
        graph: the graph.
        items: its visible items.
        order: the rank of each item in time.
        number: the number of the visible node of each item.
    """
    edges = graph.edges
    source, target = items.of_node[edges.source], items.of_node[edges.target]
    tensor = items.tensor_of_edge
    through = np.flatnonzero((tensor >= 0) & (source != target))
    straight = np.flatnonzero((tensor < 0) & (source != target))
    begin = np.concatenate([source[through], source[straight], tensor[through]])
    end = np.concatenate([tensor[through], target[straight], target[through]])
    edge = np.concatenate([through, straight, through])
    is_into = np.arange(len(edge)) < len(through)
    size = int(end.max(initial=0)) + 1
    _, first, which = np.unique(begin * size + end, return_index=True, return_inverse=True)
    by_time = np.lexsort((~is_into[first], edge[first]))
    first = first[by_time]
    edge, is_into, count = edge[first], is_into[first], np.bincount(which.reshape(-1))[by_time]
    maker, reader = source[edge], target[edge]
    is_back = (order[maker] >= order[reader]) & ~is_into
    made_in, read_in = items.phase_of(maker), items.phase_of(reader)
    is_loop = is_back & ((made_in == read_in) | (made_in < 0) | (read_in < 0))
    columns = (
        number[begin[first]], number[end[first]], edges.tensor[edge], edges.slot[edge],
        count, graph.nodes.start_ns[edges.target[edge]], is_loop, is_into,
        np.append(graph.tensors.slot, NONE)[edges.tensor[edge]],
    )  # fmt: skip
    return _to_view(graph, columns)


def _to_view(graph: Graph, columns: Sequence[Column]) -> tuple[ViewEdge, ...]:
    shapes, dtypes, slots = graph.tensors.shapes, graph.tensors.dtypes, graph.edges.slots
    outputs = graph.tensors.slots
    kind = DATA if graph.has_ops else NEXT
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
            *(column.tolist() for column in columns), strict=True
        )
    )
