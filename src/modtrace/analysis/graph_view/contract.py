"""Removes view ops from a graph: readers of a view read the tensor that it is a view of."""

from dataclasses import replace

import numpy as np

from ..graph.columns import LEAF_KINDS, NODE_KINDS, NONE, Graph
from ..tables.columns import Rows, follow


def without_views(graph: Graph) -> Graph:
    """Returns a graph without the ops that only return views of tensors they read."""
    nodes, edges = graph.nodes, graph.edges
    base = _find_bases(graph)
    kept = np.flatnonzero(base == np.arange(len(nodes)))
    new = np.full(len(nodes) + 1, NONE, np.int64)
    new[kept] = np.arange(len(kept))
    edges = edges.take(np.flatnonzero(new[edges.target] >= 0))
    is_leaf = np.append(np.isin(nodes.kind, [NODE_KINDS.index(kind) for kind in LEAF_KINDS]), True)
    maker = np.append(base, NONE)[graph.tensors.producer]
    return replace(
        graph,
        nodes=replace(nodes.take(kept), repeats=new[nodes.repeats[kept]]),
        edges=replace(edges, source=new[base[edges.source]], target=new[edges.target]),
        tensors=replace(
            graph.tensors,
            producer=np.where(is_leaf[maker], NONE, new[maker]),
            slot=graph.tensors.slot[_find_viewed(graph)],
        ),
    )


def _find_viewed(graph: Graph) -> Rows:
    """Returns, for each tensor, the tensor that it is a view of, or the tensor itself if it is not a view.

    Views of views are resolved.
    """
    edges, producer = graph.edges, graph.tensors.producer
    # By view op, the tensor that it reads; the last element stands for no op.
    read = np.full(len(graph.nodes) + 1, NONE, np.int64)
    into = np.flatnonzero(graph.nodes.is_view[edges.target])[::-1]
    read[edges.target[into]] = edges.tensor[into]
    shown = np.where(read[producer] >= 0, read[producer], np.arange(len(producer)))
    return follow(shown)


def _find_bases(graph: Graph) -> Rows:
    """Returns, for each node, the node that it is a view of, or the node itself if it is not a view.

    Views of views are resolved.
    """
    nodes, edges = graph.nodes, graph.edges
    base = np.arange(len(nodes))
    into = np.flatnonzero(nodes.is_view[edges.target])[::-1]
    base[edges.target[into]] = edges.source[into]  # reversed, so the first argument stays
    return follow(base)
