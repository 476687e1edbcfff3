"""Chooses how much of a recording goes into a report, so that its file does not become too large."""

from dataclasses import dataclass

import numpy as np

from ..graph.columns import Graph
from ..tables.columns import Column, Rows, take
from .tables import NONE

#: Of each large table, the part of the file that it may take, and the bytes of one row there, compressed: measured on a
#: GPT with ops, where `nodes` counts the edges of a node too. The parts are more than one together, because hardly a
#: recording has much of everything; where it has, smaller limits are tried.
_ROOM = {"nodes": (0.6, 20), "spans": (0.6, 12), "values": (0.9, 2.5), "histograms": (0.3, 30)}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many rows the large tables may have."""

    nodes: int
    spans: int
    values: int  # numbers: sites times steps times statistics
    histograms: int

    @classmethod
    def of(cls, size_bytes: float) -> "Limits":
        """Returns the limits for a file of this size."""
        return cls(**{name: int(size_bytes * part / row) for name, (part, row) in _ROOM.items()})


def thin(steps: Column, rows_of_step: float, most: int, kept: int | None) -> Column:
    """Returns evenly chosen steps that have at most `most` rows together, and the step `kept`.

    Each step has `rows_of_step` rows.
    """
    room = min(len(steps), int(most / max(rows_of_step, 1e-9)))
    is_shown = steps == kept
    if len(steps):
        is_shown[np.linspace(0, len(steps) - 1, max(room, 1)).round().astype(int)] = True
    shown: Column = steps[is_shown]
    return shown


def choose_window(steps: Column, rows: Column, most: int, kept: int | None) -> tuple[int, int] | None:
    """Returns the first and the last of the steps around `kept` with at most `most` rows together; None for no step.

    Each step has its number of `rows`.
    """
    number = np.flatnonzero(steps == kept)
    if not len(number) or rows[number[0]] > most:
        return None
    first = last = int(number[0])
    taken, before, after = int(rows[first]), True, True
    while before or after:
        before = first > 0 and taken + rows[first - 1] <= most
        if before:
            first -= 1
            taken += int(rows[first])
        after = last + 1 < len(steps) and taken + rows[last + 1] <= most
        if after:
            last += 1
            taken += int(rows[last])
    return int(steps[first]), int(steps[last])


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
