"""Makes the layers of a graph from the calls of a step: a box for each call, for containers and for phases."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ...recording.module_path import is_below
from ...recording.phase import OPTIMIZER, PHASES
from ..tables.calls import Calls
from ..tables.columns import Column, Rows
from .columns import CONTAINER, LAYER_KINDS, MODULE, NONE, OPTIMIZER_STEP, PHASE, LayerBoxes, LayerPlace

_OPTIMIZER = PHASES.index(OPTIMIZER)
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTree(LayerBoxes):
    """The layers, with the layer of each call and each phase."""

    call: Rows  # the row of the layer's call; NONE for containers and phases
    of_call: Rows  # the layer of each call; NONE if it is not in the graph
    of_phase: Rows  # the layer of each phase; NONE if nothing ran in it


@dataclass
class _Layer:
    """A layer while the layers are still being collected."""

    kind: int
    phase: int
    parent: int
    where: int  # index of a place in the module tree; negative for none
    place: int
    call: int
    depth: int
    start_ns: int
    children: list[int] = field(default_factory=list)


def build_layers(calls: Calls, kept: Column, phase: Column, start_ns: Column) -> LayerTree:
    """Returns the layers of the calls that are `kept`, and of the phases in which ops ran.

    Args:
        kept: which calls become layers.
        phase: the code of each op's phase; NONE for an op without phase.
        phase: the code of each op's phase; NONE for none.
        start_ns: the start of each op.
    """
    growing = _Growing(calls)
    for level in calls.levels:
        for row in level[kept[level]].tolist():
            growing.add_call(row)
    for code in range(len(PHASES)):
        begun = start_ns[phase == code]
        if len(begun):
            growing.begin_phase(code, int(begun.min()))
    return growing.to_tree()


class _Growing:
    """Collects layers, each after the layer around it."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._phase, self._parent = calls.phase.tolist(), calls.parent.tolist()
        self._module, self._start_ns = calls.module.tolist(), calls.start_ns.tolist()
        self._where = calls.where.tolist()
        self._layers: list[_Layer] = []
        self._of_call = [NONE] * len(calls)
        self._of_phase: dict[int, int] = {}
        self._container = cache(self._add_container)
        self._containers_between = cache(self._find_containers_between)
        self._place = cache(self._add_place)
        self._place_names: list[LayerPlace] = []

    def add_call(self, row: int) -> None:
        """Adds the layer of a call. Its enclosing call was added before, or is not in the graph."""
        above = self._parent[row]
        where, phase = self._where[row], self._phase[row]
        around = self._of_call[above] if above >= 0 else NONE
        if around == NONE:
            around = self.phase_layer(phase)
        elif self._where[above] == where and self._module[above] != self._module[row]:
            self._of_call[row] = around  # a wrapper and its wrapped module share a layer
            return
        for container in self._containers_between(where, self._layers[around].where):
            around = self._container(around, container, phase)
        kind = OPTIMIZER_STEP if phase == _OPTIMIZER and where < 0 else MODULE
        self._of_call[row] = self._add(kind, phase, around, where, row, self._start_ns[row])

    def begin_phase(self, phase: int, start_ns: int) -> None:
        """Adds the layer of a phase in which an op ran, even if the op ran outside of all calls."""
        layer = self._layers[self.phase_layer(phase)]
        layer.start_ns = min(layer.start_ns, start_ns)

    def phase_layer(self, phase: int) -> int:
        """Returns the layer of a phase."""
        if phase not in self._of_phase:
            self._place_names.append(LayerPlace(PHASES[phase], PHASES[phase]))
            layer = _Layer(
                LAYER_KINDS.index(PHASE), phase, NONE, NONE, len(self._place_names) - 1, NONE, NONE, _FAR
            )
            self._layers.append(layer)
            self._of_phase[phase] = len(self._layers) - 1
        return self._of_phase[phase]

    def _find_containers_between(self, where: int, around: int) -> tuple[int, ...]:
        """Returns the places between a place and that of the enclosing layer, the outermost first.

        The result is empty if the place is not inside the layer.
        """
        if where < 0:
            return ()
        above: list[int] = []
        at = self._calls.places[where].parent
        while at >= 0 and at != around:
            above.append(at)
            at = self._calls.places[at].parent
        return tuple(reversed(above)) if at == around or around < 0 else ()

    def _add_container(self, around: int, where: int, phase: int) -> int:
        return self._add(CONTAINER, phase, around, where, NONE, _FAR)

    def _add(self, kind: str, phase: int, around: int, where: int, call: int, start_ns: int) -> int:
        outer = self._layers[around]
        place = self._place(where, outer.where)
        depth = outer.depth + 1
        layer = _Layer(LAYER_KINDS.index(kind), phase, around, where, place, call, depth, start_ns)
        self._layers.append(layer)
        outer.children.append(len(self._layers) - 1)
        return len(self._layers) - 1

    def _add_place(self, where: int, around: int) -> int:
        name = self._calls.name(where)
        above = self._calls.places[around].path if around >= 0 else None
        is_inside = name.path is not None and above is not None and is_below(name.path, above)
        label = name.path[len(above) :].lstrip(".") if is_inside and name.path and above else ""
        found = LayerPlace(name.name, label or name.name, name.path, name.root, name.type or "")
        self._place_names.append(found)
        return len(self._place_names) - 1

    def to_tree(self) -> LayerTree:
        """Returns the collected layers in pre-order."""
        for layer in reversed(self._layers):
            if layer.parent >= 0:
                outer = self._layers[layer.parent]
                outer.start_ns = min(outer.start_ns, layer.start_ns)
        order = self._pre_order()
        new = np.full(len(order) + 1, NONE, np.int64)
        new[order] = np.arange(len(order))
        layers = [self._layers[number] for number in order]
        parent = new[np.array([layer.parent for layer in layers], np.int64)]
        return LayerTree(
            parent=parent,
            last=find_last(parent),
            depth=np.array([layer.depth for layer in layers], np.int32),
            kind=np.array([layer.kind for layer in layers], np.int8),
            phase=np.array([layer.phase for layer in layers], np.int8),
            place=np.array([layer.place for layer in layers], np.int64),
            call=np.array([layer.call for layer in layers], np.int64),
            start_ns=np.array([layer.start_ns for layer in layers], np.int64),
            places=tuple(self._place_names),
            of_call=new[np.array(self._of_call, np.int64)],
            of_phase=new[np.array([self._of_phase.get(phase, NONE) for phase in range(len(PHASES))])],
        )

    def _pre_order(self) -> list[int]:
        def by_time(layer: int) -> tuple[int, int]:
            return self._layers[layer].start_ns, layer

        waiting = sorted((at for at, layer in enumerate(self._layers) if layer.parent < 0), key=by_time)
        waiting.reverse()
        order = []
        while waiting:
            order.append(waiting.pop())
            waiting.extend(sorted(self._layers[order[-1]].children, key=by_time, reverse=True))
        return order


def find_last(parent: Rows) -> Rows:
    """Returns the last layer inside each layer, or the layer itself if it contains none. Layers are in pre-order."""
    last = list(range(len(parent)))
    for at, above in zip(range(len(parent) - 1, -1, -1), reversed(parent.tolist()), strict=True):
        if above >= 0 and last[above] < last[at]:
            last[above] = last[at]
    return np.array(last, np.int64)


def common_layer(low: Rows, high: Rows, parent: Rows, last: Rows) -> Rows:
    """Returns the innermost layer around two layers and all layers between them in pre-order; NONE if there is none.

    Args:
        low: the first layer of each pair; NONE for none.
        high: the second layer of each pair.
        parent: the parent of each layer.
        last: the last layer inside each layer.
    """
    low = low.copy()
    climbing = np.flatnonzero(low >= 0)
    while len(climbing):
        climbing = climbing[last[low[climbing]] < high[climbing]]
        low[climbing] = parent[low[climbing]]
        climbing = climbing[low[climbing] >= 0]
    return low


def follow(leads_to: Rows) -> Rows:
    """Returns the end of each chain of references; a row at the end refers to itself."""
    while True:
        further = leads_to[leads_to]
        if np.array_equal(further, leads_to):
            return leads_to
        leads_to = further


def group_children(parent: Rows) -> dict[int, list[int]]:
    """Returns for each layer its inner layers, in order; outermost layers are under NONE."""
    children: dict[int, list[int]] = defaultdict(list)
    for at, above in enumerate(parent.tolist()):
        children[above].append(at)
    return children
