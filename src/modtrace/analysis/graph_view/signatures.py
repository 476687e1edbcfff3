"""Determines which layers of a graph are equal inside: in modules, ops, shapes, and the edges between them."""

from collections.abc import Hashable

import numpy as np

from ..graph.columns import BUFFER, NODE_KINDS, NONE, PARAMETER, Graph
from ..graph.layers import common_layer, group_children
from ..tables.columns import Column, Rows

#: Kinds of nodes whose name is a path; in equal layers only its last part is equal.
_OWNED = [NODE_KINDS.index(PARAMETER), NODE_KINDS.index(BUFFER)]


def sign_layers(graph: Graph) -> list[int]:
    """Returns a number for each layer. Layers with equal numbers are equal inside."""
    layers = graph.layers
    codes = _sign_nodes(graph)
    own_first = graph.first_node.tolist()
    own_end = np.searchsorted(graph.nodes.layer, np.arange(len(layers)), side="right").tolist()
    edges, edge_first = _edges_by_layer(graph)
    children = group_children(layers.parent)
    places = [layers.places[place] for place in layers.place.tolist()]
    known: dict[Hashable, int] = {}
    signatures = [NONE] * len(layers)
    for at in range(len(layers) - 1, -1, -1):
        inside = tuple((places[child].label, signatures[child]) for child in children.get(at, ()))
        signature = (
            places[at].type,
            int(layers.kind[at]),
            inside,
            codes[own_first[at] : own_end[at]].tobytes(),
            edges[edge_first[at] : edge_first[at + 1]].tobytes(),
        )
        signatures[at] = known.setdefault(signature, len(known))
    return signatures


def _sign_nodes(graph: Graph) -> Column:
    """Returns a number for each node; nodes of the same kind, name, arguments and outputs have the same number."""
    nodes = graph.nodes
    codes: dict[str, int] = {}
    full = np.array([codes.setdefault(name, len(codes)) for name in nodes.names], np.int64)
    short = np.array(
        [codes.setdefault(name.rpartition(".")[2], len(codes)) for name in nodes.names], np.int64
    )
    shapes: dict[Hashable, int] = {}
    described = zip(graph.tensors.shapes, graph.tensors.dtypes, strict=True)
    shape = np.array([*(shapes.setdefault(tensor, len(shapes)) for tensor in described), NONE], np.int64)
    name = (
        np.where(np.isin(nodes.kind, _OWNED), short[nodes.name], full[nodes.name])
        if len(nodes)
        else nodes.name
    )
    columns = np.stack([nodes.kind.astype(np.int64), name, shape[nodes.tensor], nodes.args])
    return number_columns(columns)


def number_columns(columns: Column) -> Column:
    """Returns a number for each column of a matrix of small integers. Equal columns have equal numbers."""
    key = np.zeros(columns.shape[1], np.int64)
    for row in columns:
        _, key = np.unique(key * (int(row.max(initial=0)) + 2) + row + 1, return_inverse=True)
        key = key.reshape(-1).astype(np.int64)
    return key


def _edges_by_layer(graph: Graph) -> tuple[Column, Rows]:
    """Groups edges by the innermost layer that contains both ends.

    Returns:
        the edges, grouped by layer, as rows (start and end in the layer, slot); and the index of each layer's first
        edge.
    """
    edges, layers = graph.edges, graph.layers
    one, other = graph.nodes.layer[edges.source], graph.nodes.layer[edges.target]
    layer = common_layer(np.minimum(one, other), np.maximum(one, other), layers.parent, layers.last)
    kept = np.flatnonzero(layer >= 0)
    layer = layer[kept]
    begin = graph.first_node[layer] if len(layers) else layer
    rows = np.stack([edges.source[kept] - begin, edges.target[kept] - begin, edges.slot[kept]], axis=1)
    order = np.lexsort((rows[:, 2], rows[:, 0], rows[:, 1], layer))
    starts = np.searchsorted(layer[order], np.arange(len(layers) + 1))
    return np.ascontiguousarray(rows[order]), starts
