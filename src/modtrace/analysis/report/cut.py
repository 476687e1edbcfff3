"""Leaves the innermost part of a graph out that a page has no room for."""

from dataclasses import dataclass

import numpy as np

from ..graph.columns import Graph
from ..tables.columns import Rows, take
from .tables import NONE


@dataclass(frozen=True, eq=False)
class GraphCut:
    """Which rows of a graph are shown. Rows are those of the layers, and then those of the nodes."""

    depth: int | None  # modules at this depth are closed; None: all of the graph is shown
    shown: Rows  # in ascending order
    new: Rows  # the number of each row among the shown ones, of a hidden one that of the layer around it

    def renumber(self, rows: Rows) -> Rows:
        """Returns references to rows as references to shown rows; -1 for -1."""
        return np.append(self.new, NONE)[rows]


def cut_graph(graph: Graph, most: int) -> GraphCut:
    """Returns the deepest cut with at most `most` rows; the roots are shown in any case."""
    size = len(graph.layers) + len(graph.nodes)
    rows = np.arange(size)
    if size <= most:
        return GraphCut(None, rows, rows)
    depth = np.concatenate([graph.layers.depth, take(graph.layers.depth, graph.nodes.layer) + 1])
    counts = np.bincount(np.maximum(depth, 0))
    deepest = int(np.searchsorted(np.cumsum(counts), most, side="right")) - 1
    shown = depth <= max(deepest, 0)
    parent = np.concatenate([graph.layers.parent, graph.nodes.layer])
    stands_for = rows.copy()
    for row in np.flatnonzero(~shown).tolist():  # a layer precedes what is inside it
        stands_for[row] = stands_for[parent[row]]
    number = np.cumsum(shown) - 1
    return GraphCut(max(deepest, 0), np.flatnonzero(shown), number[stands_for])
