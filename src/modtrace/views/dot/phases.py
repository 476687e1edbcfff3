"""Arranges the phases of a step side by side: backward runs upward, each layer beside its forward."""

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from ...analysis.graph.columns import CALL, LEAF_KINDS, NEXT, OP
from ...analysis.graph_view.records import LAYER, GraphView, ViewEdge, ViewNode
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE

#: The phases that run upward in a picture with a forward.
_UPWARD = frozenset({BACKWARD, OPTIMIZER})

#: The phases beside the forward, from left to right.
_BESIDE = (RECOMPUTE, BACKWARD)

#: The largest number of ops of a loss that are kept in order.
_MOST_IN_LOSS = 20

#: The side of a leaf whose reader ran outside of all phases.
_ORDER = (None, FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER)

_Call = tuple[str | None, str | None, int]  # root, path, and number of the call


class Sides:
    """The side of the picture of each node in a view, and the directions of its edges."""

    def __init__(self, view: GraphView) -> None:
        self.of_node = _find_sides(view)
        self.rows = list(find_rows(view, self.of_node))
        self._mirrors = FORWARD in view.phases
        self._box = [node.box for node in view.nodes]
        ranked = [edge for edge in view.edges if self._is_inside(edge)]
        self._has_start = self._find_below_starts(ranked)
        self._holds = self._hold_loose(view, ranked) if self._mirrors else {}

    def is_ranked(self, edge: ViewEdge) -> bool:
        """Returns whether the edge determines which node is above; edges between sides and loops do not."""
        is_last = (self.of_node[edge.source], self.of_node[edge.target]) == (BACKWARD, OPTIMIZER)
        return self._is_inside(edge) or is_last or self._holds.get(edge.target) == edge.source

    def rows_between(self, edge: ViewEdge) -> int:
        """Returns the number of rows from source to target: one more into a box with a parameter above the target.

        The box then begins below the source, not beside it.
        """
        is_into_box = self._box[edge.source] != self._box[edge.target] and edge.target in self._has_start
        return 2 if is_into_box else 1

    def is_upward(self, edge: ViewEdge) -> bool:
        """Returns whether the target is above the source."""
        return self._mirrors and self.of_node[edge.target] in _UPWARD

    def _is_inside(self, edge: ViewEdge) -> bool:
        return self.of_node[edge.source] == self.of_node[edge.target] and not edge.is_loop

    def _find_below_starts(self, ranked: Sequence[ViewEdge]) -> set[int]:
        """Returns the nodes that read from a node in their own box which reads nothing itself, as a parameter."""
        reading = {edge.target for edge in ranked}
        return {
            edge.target
            for edge in ranked
            if edge.source not in reading and self._box[edge.source] == self._box[edge.target] >= 0
        }

    def _hold_loose(self, view: GraphView, ranked: Sequence[ViewEdge]) -> dict[int, int]:
        """Returns for each upward node without edges on its side a node that it reads.

        Without that, the node (a gradient that only the optimizer reads) would be at the top of the picture.
        """
        tied = {edge.source for edge in ranked} | {edge.target for edge in ranked}
        tied.update(at for row in self.rows for at in row)
        holds: dict[int, int] = {}
        for edge in view.edges:
            if self.of_node[edge.target] == BACKWARD and edge.target not in tied and not edge.is_loop:
                holds[edge.target] = max(edge.source, holds.get(edge.target, edge.source))
        return holds


def _find_sides(view: GraphView) -> list[str]:
    """Returns the side of each node, which is a phase.

    A node without a phase is on the side of the last node that it reads, and a leaf on that of its reader.
    """
    known = [node.phase for node in view.nodes]
    is_free = [node.phase is None and node.kind not in LEAF_KINDS for node in view.nodes]
    readers: dict[int, int] = {}
    for edge in view.edges:
        readers.setdefault(edge.source, edge.target)
        if is_free[edge.target] and not edge.is_loop:
            known[edge.target] = max(known[edge.target], known[edge.source], key=_ORDER.index)
    first = FORWARD if FORWARD in view.phases else next(iter(view.phases), FORWARD)
    for at in reversed(range(len(known))):  # in reverse order, so that readers come before what they read
        known[at] = known[at] or known[readers.get(at, at)] or first
    return [column or first for column in known]


def find_rows(view: GraphView, sides: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yields groups of nodes that are drawn in one row: a forward, its recompute, and its backward.

    Only nodes are chosen for which all edges keep their direction: the backward has the reverse order of the forward.
    """
    forwards = _layers_by_call(view, FORWARD)
    rows: dict[int, dict[str, int]] = {}
    last = len(view.nodes)
    for at, node in enumerate(view.nodes):
        twin = node.twin if node.twin >= 0 or node.kind != LAYER else forwards.get(_call_of(node), -1)
        if twin < 0 or sides[at] not in _BESIDE or sides[twin] != FORWARD:
            continue
        if sides[at] == BACKWARD and twin >= last:
            continue
        last = twin if sides[at] == BACKWARD else last
        rows.setdefault(twin, {}).setdefault(sides[at], at)
    for twin, beside in sorted(rows.items()):
        yield (twin, *(beside[side] for side in _BESIDE if side in beside))
    placed = {at for beside in rows.values() for at in beside.values()}
    yield from _find_rows_without_forward(view, placed)


def _find_rows_without_forward(view: GraphView, placed: Set[int]) -> Iterator[tuple[int, int]]:
    """Yields a recompute and the backward that needs it, if the forward is folded or elsewhere."""
    backwards = _layers_by_call(view, BACKWARD)
    for call, at in _layers_by_call(view, RECOMPUTE).items():
        if call in backwards and placed.isdisjoint((at, backwards[call])):
            yield at, backwards[call]


def _layers_by_call(view: GraphView, phase: str) -> dict[_Call, int]:
    return {
        _call_of(node): at
        for at, node in enumerate(view.nodes)
        if node.kind == LAYER and node.phase == phase and node.path is not None
    }


def _call_of(node: ViewNode) -> _Call:
    return node.root, node.path, node.call or 0  # a container has no calls


def find_columns(view: GraphView, sides: Sequence[str]) -> list[list[int]]:
    """Returns the nodes of each phase, from left to right, if there are several phases.

    Graphviz orders boxes so that the fewest edges cross, whatever order is requested. Invisible edges from ordered
    points make the requested order the one with the fewest crossings: one edge to each box, and one to each op of the
    loss, which has no box and is in between.
    """
    seen: dict[str | None, list[int]] = {}
    for at, node in enumerate(view.nodes):
        if node.kind == OP and node.phase is None and sides[at] == FORWARD:
            seen.setdefault(None, []).append(at)
        elif node.phase is not None and node.box >= 0 and (node.phase in _UPWARD or node.phase not in seen):
            seen[node.phase] = [at]
    if FORWARD not in seen or len(seen.keys() - {None}) < 2:
        return []
    return [seen[phase][:_MOST_IN_LOSS] for phase in (FORWARD, None, *_BESIDE, OPTIMIZER) if phase in seen]


class DrawnEdge(NamedTuple):
    """An edge of a picture."""

    edge: ViewEdge
    is_bundle: bool = False  # whether it stands for all edges between the boxes of two phases


def choose_edges(view: GraphView, sides: Sequence[str]) -> Iterator[DrawnEdge]:
    """Yields all edges to draw.

    The optimizer, which reads every parameter and gradient, gets only one edge from each side.
    """
    bundles: dict[str, ViewEdge] = {}
    for edge in view.edges:
        side = sides[edge.source]
        if view.nodes[edge.target].phase != OPTIMIZER or side == OPTIMIZER:
            yield DrawnEdge(edge)
        else:
            bundles[side] = _bundle(side, bundles[side], edge) if side in bundles else edge
    yield from (DrawnEdge(bundle, is_bundle=True) for bundle in bundles.values())


def _bundle(side: str, before: ViewEdge, edge: ViewEdge) -> ViewEdge:
    """Merges two edges into one, from the source that is further up."""
    choose = max if side in _UPWARD else min
    return choose(before, edge, key=lambda end: end.source)._replace(reads=before.reads + edge.reads)


def place_idle(view: GraphView) -> Iterator[ViewEdge]:
    """Yields invisible edges for calls without ops, which would otherwise be at the top of the picture.

    Each edge leads from the node before such a call in its phase, or to the node after it.
    """
    tied = {end for edge in view.edges for end in (edge.source, edge.target)}
    is_idle = [
        node.kind in (CALL, LAYER) and not node.ops and at not in tied for at, node in enumerate(view.nodes)
    ]
    last: dict[str | None, int] = {}
    for at, node in enumerate(view.nodes):
        if node.kind in (OP, CALL, LAYER):
            before = last.get(node.phase)
            last[node.phase] = at
            if before is not None and (is_idle[before] or is_idle[at]):
                yield ViewEdge(before, at, NEXT, "", None, None, 1, node.start_ns, False)


def outermost_boxes(view: GraphView) -> list[int]:
    """Returns, for each box, the outermost box around it, or the box itself."""
    found: list[int] = []
    for at, box in enumerate(view.boxes):
        found.append(found[box.box] if box.box >= 0 else at)
    return found
