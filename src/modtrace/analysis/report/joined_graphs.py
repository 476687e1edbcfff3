"""Joins the graphs of two compared runs: which rows correspond, which rows only the second has, and how all differ."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ..divergence.run_pair import CHANGED, FOLLOWS, RESHAPED, RunPair, UnpairedIds
from ..graph.columns import LEAF_KINDS, NODE_KINDS, OP, Graph
from ..tables.calls import iterate_levels
from ..tables.columns import Bools, Column, Rows, find_rows, follow, take
from .limits import GraphCut
from .modules import Place
from .nodes import first_orders, tabulate_edges
from .tables import NONE, ReportTable, number_column

# How a row differs: a level of its tensors, or one of these.
INSIDE, ONLY_A, ONLY_B = 5, 6, 7
DIFFERENCES = (
    "equal",
    "gradients differ",
    "inputs differ",
    "other shape",
    "changed",
    "changed inside",
    "only in A",
    "only in B",
)

_OP = NODE_KINDS.index(OP)
_LEAVES = [NODE_KINDS.index(kind) for kind in LEAF_KINDS]
_FORWARD = PHASES.index(FORWARD)


def include_inside(own: Column, parent: Rows) -> Column:
    """Returns the difference of each row, of which `own` knows that of its own tensors.

    What has a change inside it is changed inside. Else a row differs as most as anything inside it does.
    """
    shown: Column = own.copy()
    has_change = np.zeros(len(own) + 1, bool)
    inner = np.full(len(own) + 1, NONE)
    for level in reversed(list(iterate_levels(parent))):
        is_own = shown[level] >= RESHAPED
        shown[level] = np.where(~is_own & has_change[level], INSIDE, shown[level])
        shown[level] = np.maximum(shown[level], inner[level])
        has_change[parent[level[shown[level] >= RESHAPED]]] = True
        np.maximum.at(inner, parent[level], np.minimum(shown[level], FOLLOWS))
    return shown


@dataclass(frozen=True, eq=False)
class JoinedGraphs:
    """The graphs of two runs. Rows of each are numbered as in `GraphCut`: layers first, then nodes."""

    pair: RunPair
    a: Graph
    b: Graph
    step: int  # the shown step of the first run

    @cached_property
    def partner(self) -> Rows:
        """For each row of the second graph, the row of the first; -1 for none."""
        a, b = self.a, self.b
        partner = np.full(len(b.layers) + len(b.nodes), NONE, np.int64)
        of_calls = _translate(b.layers.call_id, self.pair.calls)
        partner[: len(b.layers)] = np.where(
            b.layers.call_id >= 0, find_rows(a.layers.call_id, of_calls), NONE
        )
        self._pair_containers(partner)
        ops = np.flatnonzero(b.nodes.kind == _OP)
        found = find_rows(a.nodes.op_id, _translate(b.nodes.op_id[ops], self.pair.ops))
        partner[len(b.layers) + ops] = np.where(found >= 0, found + len(a.layers), NONE)
        self._pair_others(partner)
        return partner

    def _pair_containers(self, partner: Rows) -> None:
        """Pairs phases and containers, which are no calls, by their place and the partner of their parent."""
        a, b = self.a.layers, self.b.layers
        names: dict[Place, Place] = {
            (two.root, two.path): (one.root, one.path) for one, two in self.pair.modules
        }
        at_place = {
            (int(a.parent[row]), int(a.phase[row]), *_place_of(self.a, row)): row
            for row in np.flatnonzero(a.call_id < 0).tolist()
        }
        for row in np.flatnonzero(b.call_id < 0).tolist():
            parent, place = int(b.parent[row]), _place_of(self.b, row)
            above = int(partner[parent]) if parent >= 0 else NONE
            if (parent < 0 or above >= 0) and (place[0] is None or place in names):
                key = (above, int(b.phase[row]), *names.get(place, place))
                partner[row] = at_place.get(key, NONE)

    def _pair_others(self, partner: Rows) -> None:
        """Pairs inputs, outputs, parameters and calls without inner calls by kind and name in the same layer."""
        names: dict[tuple[int, int, str], int] = {}
        a, b, size = self.a.nodes, self.b.nodes, len(self.a.layers)
        for node in np.flatnonzero(a.kind != _OP).tolist():
            key = int(a.layer[node]), int(a.kind[node]), a.names[a.name[node]].rpartition(".")[2]
            names.setdefault(key, node + size)
        for node in np.flatnonzero(b.kind != _OP).tolist():
            layer = int(partner[b.layer[node]]) if b.layer[node] >= 0 else NONE
            key = layer, int(b.kind[node]), b.names[b.name[node]].rpartition(".")[2]
            if b.layer[node] < 0 or layer >= 0:
                partner[len(self.b.layers) + node] = names.get(key, NONE)

    @cached_property
    def added(self) -> Rows:
        """The rows of the second graph that only it has: layers in pre-order, then nodes in order of time."""
        b = self.b
        is_alone, are_nodes = _find_unpaired(b, self.pair.extra, self.partner >= 0)
        nodes = np.flatnonzero(are_nodes)
        nodes = nodes[np.argsort(b.nodes.order[nodes], kind="stable")]
        return np.concatenate([np.flatnonzero(is_alone), nodes + len(b.layers)])

    @cached_property
    def parent(self) -> Rows:
        """For each added row, the layer of the first graph around it, or len(a) + n for the n-th added row."""
        b, size = self.b, len(self.a.layers) + len(self.a.nodes)
        number = np.full(len(b.layers) + 1, NONE, np.int64)
        layers = self.added[self.added < len(b.layers)]
        number[layers] = size + np.arange(len(layers))
        united = np.where(number[:-1] >= 0, number[:-1], self.partner[: len(b.layers)])
        up = np.concatenate([b.layers.parent, b.nodes.layer])[self.added]
        while True:
            climbing = np.flatnonzero((up >= 0) & (take(united, up) < 0))
            if not len(climbing):
                return take(united, up)
            up[climbing] = b.layers.parent[up[climbing]]

    @cached_property
    def orders(self) -> tuple[Rows, Rows]:
        """The rank in time of the rows of the first graph, among the added ones too, and that of the added rows."""
        a, b = self.a, self.b
        order = np.concatenate([first_orders(a), a.nodes.order])
        order_b = np.concatenate([first_orders(b), b.nodes.order])
        paired = np.flatnonzero(self.partner[len(b.layers) :] >= 0) + len(b.layers)
        paired = paired[np.argsort(order_b[paired])]
        # Each follows the last op before it that both have.
        before = np.searchsorted(order_b[paired], order_b[self.added]) - 1
        anchor = take(order[self.partner[paired]], before)
        rank = np.lexsort((order_b[self.added], anchor)).argsort()
        return order + np.searchsorted(np.sort(anchor), order, side="left"), anchor + 1 + rank

    @cached_property
    def differences(self) -> Column:
        """How the rows of the first graph and then the added ones differ; -1 where that is not known."""
        a, judged = self.a, self.pair.judged
        is_shown = judged.step == self.step
        own = np.full(len(a.layers) + len(a.nodes), NONE, np.int64)
        _raise(own, self._find_layers(), judged.level, is_shown & (judged.call >= 0))
        op = find_rows(a.nodes.op_id, judged.op)
        _raise(own, np.where(op >= 0, op + len(a.layers), NONE), judged.level, is_shown & (judged.op >= 0))
        self._judge_parameters(own)
        paired = np.zeros(len(own) + 1, bool)
        paired[self.partner] = True
        is_gone, ops = _find_unpaired(a, self.pair.missing, paired[:-1])
        own[: len(a.layers)][is_gone], own[len(a.layers) :][ops] = ONLY_A, ONLY_A
        own = np.append(own, np.full(len(self.added), ONLY_B))
        parent = np.concatenate([a.layers.parent, a.nodes.layer, self.parent])
        return include_inside(own, parent)

    def _find_layers(self) -> Rows:
        """Returns the layer of each judged tensor: of a gradient at a call of forward, that of its backward."""
        judged, layers = self.pair.judged, self.a.layers
        found = find_rows(layers.call_id, judged.call)
        is_elsewhere = (found >= 0) & (judged.phase >= 0) & (take(layers.phase, found) != judged.phase)
        later = np.flatnonzero(layers.repeats >= 0)
        keys = layers.repeats[later] * len(PHASES) + layers.phase[later]
        elsewhere = take(later, find_rows(keys, found * len(PHASES) + judged.phase))
        return np.where(is_elsewhere, elsewhere, found)

    def _judge_parameters(self, own: Column) -> None:
        """Marks the layers of forward whose parameters differ."""
        judged, layers = self.pair.judged, self.a.layers
        is_other = judged.is_parameter & (judged.level >= RESHAPED) & (judged.place >= 0)
        is_other &= judged.step == self.step
        places = {self.pair.names[place][:2] for place in np.unique(judged.place[is_other]).tolist()}
        marked = np.array([(place.root, place.path) in places for place in layers.places], bool)[layers.place]
        own[: len(layers)][marked & (layers.phase == _FORWARD)] = CHANGED

    def find_busy(self) -> frozenset[Place]:
        """Returns the modules of both runs that run ops which only one of them has."""
        a = self.a
        is_op = np.concatenate(
            [
                a.nodes.kind == _OP,
                np.append(np.zeros(len(self.b.layers), bool), self.b.nodes.kind == _OP)[self.added],
            ]
        )
        layer = np.concatenate([a.nodes.layer, self.parent])
        is_alone = self.differences[len(a.layers) :] >= ONLY_A
        layers = np.unique(layer[is_op & is_alone & (layer >= 0) & (layer < len(a.layers))])
        return frozenset(_place_of(a, row) for row in layers.tolist() if self.differences[row] < ONLY_A)

    def number_layers(self) -> Column:
        """Returns for each layer of the first graph a number that tells it apart from layers that differ otherwise."""
        return self.differences[: len(self.a.layers)] + 1

    def shown_in(self, cut: GraphCut) -> Bools:
        """Returns which of the added rows are shown: those whose layer is, and is not closed."""
        if cut.depth is None:
            return np.ones(len(self.added), bool)
        b = self.b
        depth = np.concatenate([b.layers.depth, take(b.layers.depth, b.nodes.layer) + 1])
        return np.asarray(depth[self.added] <= cut.depth)

    def tabulate_edges(self, united: Rows) -> ReportTable:
        """Returns the edges of added rows; `united` has the shown row of each row of the second graph, -1 for none."""
        b, edges = self.b, self.b.edges
        size = len(b.layers)
        rows = np.arange(len(b.nodes))
        first = rows.copy()
        first[edges.target[::-1]] = edges.source[::-1]
        # What is not drawn, and a view, passes on what it reads first.
        leads = follow(np.where((united[size:] >= 0) & ~b.nodes.is_view.astype(bool), rows, first))
        source, target = united[size:][leads[edges.source]], united[size:][edges.target]
        is_new = np.zeros(int(united.max(initial=0)) + 2, bool)
        is_new[united[self.added]] = True
        is_new[NONE] = False
        kept = np.flatnonzero((source >= 0) & (target >= 0) & (is_new[source] | is_new[target]))
        every = np.arange(size + len(b.nodes))
        table = tabulate_edges(replace(b, edges=edges.take(kept)), GraphCut(None, every, every))
        ends = {"source": source[kept], "target": target[kept]}
        columns = [
            number_column(column.name, column.label, column.kind, ends[column.name])
            if column.name in ends
            else column
            for column in table.columns
        ]
        return ReportTable(rows=len(kept), columns=tuple(columns))


def _find_unpaired(graph: Graph, unpaired: UnpairedIds, paired: Bools) -> tuple[Bools, Bools]:
    """Returns which layers and which nodes only one run has. A layer whose nodes all have partners has another name."""
    layers, nodes = graph.layers, graph.nodes
    in_modules = np.array([(place.root, place.path) in unpaired.modules for place in layers.places], bool)
    is_alone = in_modules[layers.place] | (np.isin(layers.call_id, unpaired.calls) & (layers.call_id >= 0))
    is_alone &= ~paired[: len(layers)]
    levels = list(iterate_levels(layers.parent))
    for level in levels[1:]:
        is_alone[level] |= is_alone[layers.parent[level]] & ~paired[level]
    are_nodes = np.isin(nodes.op_id, unpaired.ops) & (nodes.op_id >= 0)
    are_nodes |= np.append(is_alone, False)[nodes.layer]
    are_nodes &= ~paired[len(layers) :]
    works = nodes.layer[are_nodes & ~np.isin(nodes.kind, _LEAVES)]
    has_node = np.zeros(len(layers) + 1, bool)
    has_node[works] = True
    for level in reversed(levels):
        has_node[layers.parent[level[has_node[level]]]] = True
    is_alone &= has_node[:-1]
    return is_alone, are_nodes & (
        np.append(is_alone, False)[nodes.layer] | np.isin(nodes.op_id, unpaired.ops)
    )


def _place_of(graph: Graph, layer: int) -> Place:
    place = graph.layers.places[int(graph.layers.place[layer])]
    return (place.root, place.path) if place.path is not None else (None, place.name)


def _translate(ids: Column, pairs: Rows) -> Rows:
    """Returns for ids of the second run those of the first; -2, which is no id, for none."""
    found = find_rows(pairs[:, 1], ids)
    return np.where(found >= 0, take(pairs[:, 0], found), -2)


def _raise(own: Column, rows: Rows, levels: Column, chosen: Bools) -> None:
    chosen = chosen & (rows >= 0)
    np.maximum.at(own, rows[chosen], levels[chosen])
