"""Finds equal siblings with consecutive numbers in a graph: `layers.0` to `layers.31`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..graph.columns import LAYER_KINDS, MODULE, NONE, Graph
from ..graph.layers import follow, group_children
from ..tables.columns import Rows
from .signatures import sign_layers

_MODULE = LAYER_KINDS.index(MODULE)


class Run(NamedTuple):
    """A run of equal layers, of which only the first is shown."""

    first: int
    layers: tuple[int, ...]  # includes the first, in the order in which they ran


@dataclass(frozen=True, kw_only=True, eq=False)
class Folding:
    """The result of folding: for each layer and node the one that is shown for it, which may be itself."""

    layer: Rows
    node: Rows
    runs: tuple[Run, ...]


def fold_graph(graph: Graph) -> Folding:
    """Folds runs of sibling layers that are equal inside, i.e. have the same ops, shapes, names and edges.

    A run is folded only if no path leads from one of its layers through layers outside of the run to another.
    """
    layer, node = np.arange(len(graph.layers)), np.arange(len(graph.nodes))
    runs = []
    for run in _find_runs(graph):
        if layer[run.first] != run.first:
            continue  # the run is inside a layer that is folded away itself
        runs.append(run)
        for other in run.layers:
            _map_onto(graph, run.first, other, layer, node)
    return Folding(layer=follow(layer), node=follow(node), runs=tuple(runs))


def _map_onto(graph: Graph, first: int, other: int, layer: Rows, node: Rows) -> None:
    """Maps each sublayer and node of `other` to its counterpart in `first`; both have the same order."""
    size = int(graph.layers.last[first]) - first + 1
    layer[other : other + size] = np.arange(first, first + size)
    start, end = int(graph.first_node[first]), int(graph.end_node[first])
    begin = int(graph.first_node[other])
    node[begin : begin + end - start] = np.arange(start, end)


def _find_runs(graph: Graph) -> list[Run]:
    """Returns runs of siblings that may be folded, outer layers before inner ones."""
    signatures = sign_layers(graph)
    leaving = _LeavingEdges(graph)
    children = group_children(graph.layers.parent)
    runs = chain.from_iterable(_split(graph, siblings, signatures) for siblings in children.values())
    return sorted(filter(leaving.is_closed, runs))  # a layer precedes the layers inside it


def _split(graph: Graph, siblings: Sequence[int], signatures: Sequence[int]) -> Iterator[Run]:
    """Yields the longest runs of equal siblings with ascending numbers, or descending ones in backward."""
    run: list[int] = []
    direction = 0
    numbers = [_number(graph, sibling) for sibling in siblings]
    for sibling, number in zip([*siblings, NONE], [*numbers, None], strict=True):
        last = _number(graph, run[-1]) if run else None
        step = 0 if number is None or last is None else number - last
        is_next = (
            run and abs(step) == 1 and direction in (0, step) and signatures[sibling] == signatures[run[-1]]
        )
        if is_next:
            direction = step
            run.append(sibling)
            continue
        if len(run) > 1:
            yield Run(run[0], tuple(run))
        run, direction = ([sibling] if number is not None else []), 0


def _number(graph: Graph, layer: int) -> int | None:
    if graph.layers.kind[layer] != _MODULE:
        return None
    label = graph.layers.places[int(graph.layers.place[layer])].label
    return int(label) if label.isdecimal() else None


class _LeavingEdges:
    """Finds the edges that leave layers."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._target = graph.edges.target
        self._by_source = np.argsort(graph.edges.source, kind="stable")
        self._sources = graph.edges.source[self._by_source]

    def is_closed(self, run: Run) -> bool:
        """Returns whether no path between two layers of a run leads through anything outside of the run."""
        first = min(int(self._graph.first_node[layer]) for layer in run.layers)
        end = max(int(self._graph.end_node[layer]) for layer in run.layers)
        order = self._graph.nodes.order
        latest = int(order[first:end].max(initial=NONE))
        met: set[int] = set()
        reached = self._target[self._edges(first, end)]
        while len(reached):
            if met and bool(((reached >= first) & (reached < end)).any()):
                return False
            outside = (reached < first) | (reached >= end)
            new = {*reached[outside & (order[reached] < latest)].tolist()} - met
            met |= new
            edges = [self._edges(node, node + 1) for node in new]
            reached = self._target[np.concatenate(edges)] if edges else reached[:0]
        return True

    def _edges(self, first: int, end: int) -> Rows:
        """Returns the edges from the nodes `first` to `end - 1`."""
        begin, behind = np.searchsorted(self._sources, [first, end])
        return self._by_source[begin:behind]
