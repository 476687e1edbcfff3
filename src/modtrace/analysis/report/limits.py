"""Chooses how much of a recording goes into a report, so that its file does not become too large."""

from dataclasses import dataclass

import numpy as np

from ..graph.columns import Graph
from ..tables.columns import Column, Rows, follow, take
from .tables import NONE

#: The share of the file that each large table may take, and the compressed size of one row in bytes, measured on a GPT
#: with ops, where `nodes` includes the edges. The shares add up to more than one because few recordings fill all
#: tables; if one does, smaller limits are tried.
_ROOM = {"nodes": (0.6, 20), "spans": (0.6, 12), "values": (0.9, 2.5), "histograms": (0.3, 30)}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest numbers of rows that the large tables may have."""

    nodes: int
    spans: int
    values: int  # counts sites times steps times statistics
    histograms: int

    @classmethod
    def of(cls, size_bytes: float) -> "Limits":
        """Returns the limits for a file of this size."""
        return cls(**{name: int(size_bytes * part / row) for name, (part, row) in _ROOM.items()})


def thin(steps: Column, rows_of_step: float, most: int, kept: int | None) -> Column:
    """Returns evenly spaced steps with at most `most` rows together, including the step `kept`.

    Each step is assumed to have `rows_of_step` rows.
    """
    room = min(len(steps), int(most / max(rows_of_step, 1e-9)))
    is_shown = steps == kept
    if len(steps):
        is_shown[np.linspace(0, len(steps) - 1, max(room, 1)).round().astype(int)] = True
    shown: Column = steps[is_shown]
    return shown


def choose_window(steps: Column, rows: Column, most: int, kept: int | None) -> tuple[int, int] | None:
    """Returns the first and last of the steps around `kept` with at most `most` rows together; None for no step.

    `rows` gives the number of rows of each step.
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
    """Selects the rows of a graph that are shown. Rows of layers are numbered first, then those of nodes."""

    depth: int | None  # modules at this depth are closed; None if the whole graph is shown
    shown: Rows  # in ascending order
    new: Rows  # the new number of each row; a hidden row has that of the shown layer around it

    def renumber(self, rows: Rows) -> Rows:
        """Returns references to rows as references to the shown rows; -1 stays -1."""
        return np.append(self.new, NONE)[rows]


def cut_graph(graph: Graph, most: int) -> GraphCut:
    """Returns the deepest cut with at most `most` rows, or at least the roots."""
    size = len(graph.layers) + len(graph.nodes)
    if size <= most:
        rows = np.arange(size)
        return GraphCut(None, rows, rows)
    inside = (take(graph.layers.depth, graph.nodes.layer) + 1).astype(np.int32)
    depth = np.concatenate([graph.layers.depth, inside])
    counts = np.bincount(np.maximum(depth, 0))
    deepest = int(np.searchsorted(np.cumsum(counts), most, side="right")) - 1
    shown = depth <= max(deepest, 0)
    stands_for = np.concatenate([graph.layers.parent, graph.nodes.layer])
    rows = np.flatnonzero(shown)
    stands_for[rows] = rows
    number = np.cumsum(shown) - 1
    return GraphCut(max(deepest, 0), rows, number[follow(stands_for)])
