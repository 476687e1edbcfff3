"""Determines which layers of a graph are equal inside: in modules, ops, shapes, and the edges between them."""

from collections.abc import Hashable, Iterable

import numpy as np

from ..graph.columns import BUFFER, NODE_KINDS, NONE, PARAMETER, Graph
from ..graph.layers import common_layer
from ..tables.calls import iterate_levels
from ..tables.columns import Column, Rows, ranges

#: Kinds of nodes whose name is a path; in equal layers only its last part is equal.
_OWNED = [NODE_KINDS.index(PARAMETER), NODE_KINDS.index(BUFFER)]


def sign_layers(graph: Graph, apart: Column | None = None) -> Column:
    """Returns a number for each layer. Layers with the same parent and equal numbers are equal inside.

    Args:
        graph: the graph.
        apart: for each layer a number from 0 on, which tells it apart from others.
    """
    layers, size = graph.layers, len(graph.layers)
    types = _number([place.type for place in layers.places])[layers.place]
    labels = _number([place.label for place in layers.places])[layers.place]
    is_inside = graph.nodes.layer >= 0
    counts = np.bincount(graph.nodes.layer[is_inside], minlength=size)
    nodes = number_sequences(_sign_nodes(graph)[is_inside], counts)
    apart = np.zeros(size, np.int64) if apart is None else apart
    own = number_columns(np.stack([types, layers.kind, nodes, _sign_edges(graph), apart]))
    counts = np.bincount(layers.parent[layers.parent >= 0], minlength=size)
    signatures, inner = np.zeros(size, np.int64), np.zeros(0, np.int64)
    for level in reversed(list(iterate_levels(layers.parent))):
        of_inner = number_columns(np.stack([labels[inner], signatures[inner]]))
        inside = number_sequences(of_inner, counts[level])
        signatures[level] = number_columns(np.stack([own[level], inside]))
        inner = level
    return signatures


def _number(values: Iterable[Hashable]) -> Rows:
    """Returns a number for each value. Equal values have equal numbers."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], np.int64)


def _sign_nodes(graph: Graph) -> Column:
    """Returns a number for each node; nodes of the same kind, name, arguments and outputs have the same number."""
    nodes, tensors = graph.nodes, graph.tensors
    names = _number([*nodes.names, *(name.rpartition(".")[2] for name in nodes.names)])
    name = names[nodes.name + len(nodes.names) * np.isin(nodes.kind, _OWNED)] if len(nodes) else nodes.name
    shape = np.append(_number(zip(tensors.shapes, tensors.dtypes, strict=True)), NONE)
    return number_columns(np.stack([nodes.kind, name, shape[nodes.tensor], nodes.args]))


def _sign_edges(graph: Graph) -> Column:
    """Returns a number for each layer. Layers with equal numbers have equal edges between what is inside of them.

    An edge is that of the innermost layer that contains both ends.
    """
    edges, layers = graph.edges, graph.layers
    one, other = graph.nodes.layer[edges.source], graph.nodes.layer[edges.target]
    layer = common_layer(np.minimum(one, other), np.maximum(one, other), layers.parent, layers.last)
    kept = np.flatnonzero(layer >= 0)
    source, target, slot, layer = edges.source[kept], edges.target[kept], edges.slot[kept], layer[kept]
    order = np.lexsort((slot, source, target, layer))
    begin = graph.first_node[layer]
    ends = number_columns(np.stack([source - begin, target - begin, slot]))
    return number_sequences(ends[order], np.bincount(layer, minlength=len(layers)))


def number_columns(columns: Column) -> Column:
    """Returns a number for each column of a matrix of small integers. Equal columns have equal numbers."""
    key = np.zeros(columns.shape[1], np.int64)
    for row in columns:
        _, key = np.unique(key * (int(row.max(initial=0)) + 2) + row + 1, return_inverse=True)
        key = key.reshape(-1).astype(np.int64)
    return key


def number_sequences(values: Rows, counts: Rows) -> Rows:
    """Returns a number for each of several sequences. Equal sequences have equal numbers.

    Neighbours are numbered as pairs until one number is left of each sequence, which takes linear time.

    Args:
        values: the elements of all sequences, one after the other; they are not negative.
        counts: the length of each sequence.
    """
    numbers = np.full(len(counts), NONE, np.int64)
    rows, lengths = np.arange(len(counts)), counts
    while len(rows):
        starts = np.cumsum(lengths) - lengths
        numbers[rows[lengths == 1]] = values[starts[lengths == 1]]
        longer = lengths > 1
        rows, starts, ends, lengths = (
            rows[longer],
            starts[longer],
            (starts + lengths)[longer],
            lengths[longer],
        )
        lengths = (lengths + 1) // 2
        first = 2 * ranges(np.zeros(len(rows), np.int64), lengths) + np.repeat(starts, lengths)
        has_second = first + 1 < np.repeat(ends, lengths)
        second = np.where(has_second, values[np.minimum(first + 1, len(values) - 1)], NONE)
        values = number_columns(np.stack([values[first], second]))
    return number_columns(np.stack([counts, numbers]))
