"""Finds what a graph shows once: equal siblings, `layers.0` to `layers.31`, and the tensors of a structure."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..graph.columns import INPUT, LAYER_KINDS, MODULE, NODE_KINDS, NONE, OUTPUT, Graph
from ..tables.columns import Column, Rows, follow, take
from .signatures import sign_layers

_MODULE = LAYER_KINDS.index(MODULE)
_OF_CALLS = [NODE_KINDS.index(kind) for kind in (INPUT, OUTPUT)]

#: The name of a tensor in a structure with numbered parts, up to the first number: `['past_key_values'].layers` of
#: `['past_key_values'].layers[0].keys`. The first part is the argument, or the output if there are several.
_STRUCTURE = re.compile(r"((?:output)?(?:\[[^]]*\]|\.\w+).*?)\[\d+\]")

#: A structure has at least this many tensors to be shown as one node.
_FEWEST = 4


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
    #: The names of structures, such as a cache, by the first of their tensors, which is shown for all of them.
    structures: Mapping[int, str]


def fold_graph(graph: Graph, *, depth: int | None = None, apart: Column | None = None) -> Folding:
    """Folds runs of sibling layers that are equal inside, i.e. have the same ops, shapes, names and edges.

    A run is folded only if no path leads from one of its layers through layers outside of the run to another. Tensors
    of one shape in a structure that a call takes or returns fold, too, as those of a cache.

    Args:
        graph: the graph.
        depth: the depth below which no runs are looked for; None for all.
        apart: as for `sign_layers`.
    """
    layer, node = np.arange(len(graph.layers)), np.arange(len(graph.nodes))
    runs = []
    for run in _find_runs(graph, depth, apart):
        if layer[run.first] != run.first:
            continue  # the run is inside a layer that is folded away itself
        runs.append(run)
        _map_onto_first(graph, run, layer, node)
    structures = {}
    for name, members in _find_structures(graph):
        if node[members[0]] == members[0]:
            structures[members[0]] = name
            node[members] = members[0]
    return Folding(layer=follow(layer), node=follow(node), runs=tuple(runs), structures=structures)


def _find_structures(graph: Graph) -> Iterator[tuple[str, list[int]]]:
    """Yields the name of each structure of tensors of one shape that a call takes or returns, with their nodes."""
    nodes = graph.nodes
    names = [match[1] if (match := _STRUCTURE.match(name)) else "" for name in nodes.names]
    shape, dtype = (take(codes, nodes.tensor) for codes, _ in (graph.tensors.shape, graph.tensors.dtype))
    found = defaultdict[tuple[str, int, int, int, int], list[int]](list)
    for node in np.flatnonzero(np.isin(nodes.kind, _OF_CALLS)).tolist():
        if name := names[int(nodes.name[node])]:
            layer, kind, of_shape, of_dtype = (
                int(at[node]) for at in (nodes.layer, nodes.kind, shape, dtype)
            )
            found[name, layer, kind, of_shape, of_dtype].append(node)
    for (name, *_), members in found.items():
        if len(members) >= _FEWEST:
            yield name, members


def _map_onto_first(graph: Graph, run: Run, layer: Rows, node: Rows) -> None:
    """Maps each sublayer and node of a run to its counterpart in the first layer; all have the same order."""
    others = np.array(run.layers)[:, None]
    inside = np.arange(int(graph.layers.last[run.first]) - run.first + 1)
    layer[others + inside] = run.first + inside
    start = int(graph.first_node[run.first])
    inside = np.arange(int(graph.end_node[run.first]) - start)
    node[graph.first_node[others] + inside] = start + inside


def _find_runs(graph: Graph, depth: int | None, apart: Column | None) -> list[Run]:
    """Returns runs of siblings that may be folded, outer layers before inner ones."""
    layers, leaving = graph.layers, _LeavingEdges(graph)
    number = np.array([_number_of(place.label) for place in layers.places], np.int64)[layers.place]
    number = np.where(layers.kind == _MODULE, number, NONE)
    if depth is not None:
        number[layers.depth > depth] = NONE
    siblings = np.argsort(layers.parent, kind="stable")
    one, other = siblings[:-1], siblings[1:]
    step = number[other] - number[one]
    step[(number[one] < 0) | (number[other] < 0) | (layers.parent[one] != layers.parent[other])] = 0
    step[np.abs(step) != 1] = 0
    if step.any():  # signatures take the time of all layers
        signatures = sign_layers(graph, apart)
        step[signatures[one] != signatures[other]] = 0
    # A layer precedes the layers inside it.
    return sorted(filter(leaving.is_closed, _split(siblings, step)))


def _split(siblings: Rows, step: Column) -> Iterator[Run]:
    """Yields the longest runs of equal siblings with ascending numbers, or descending ones in backward.

    Args:
        siblings: layers, in which the children of a layer are adjacent.
        step: from each but the last of these to the next: 1 or -1 if they may be in one run, else 0.
    """
    bounds = np.flatnonzero(np.diff(step, prepend=0, append=0))
    steps = step[bounds[:-1]]
    taken = NONE  # the last layer of a run so far
    for begin, end, direction in zip(bounds[:-1].tolist(), bounds[1:].tolist(), steps.tolist(), strict=True):
        first = max(
            begin, taken + 1
        )  # where the direction changes, the layer between belongs to the run before
        if direction and first < end:
            yield Run(int(siblings[first]), tuple(siblings[first : end + 1].tolist()))
            taken = end


def _number_of(label: str) -> int:
    """Returns the number that a label is; NONE for another label."""
    return int(label) if label.isdecimal() and len(label) < 19 else NONE


class _LeavingEdges:
    """Finds the edges that leave layers."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._target = graph.edges.target
        self._by_source = np.argsort(graph.edges.source, kind="stable")
        self._sources = graph.edges.source[self._by_source]

    def is_closed(self, run: Run) -> bool:
        """Returns whether no path between two layers of a run leads through anything outside of the run."""
        layers = np.array(run.layers)
        first = int(self._graph.first_node[layers].min())
        end = int(self._graph.end_node[layers].max())
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
