"""Makes the layers of a graph from the calls of a step: a box for each call, for containers and for phases."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...recording.module_path import is_below
from ...recording.phase import OPTIMIZER, PHASES
from ..tables.calls import CallOrder, Calls, iterate_levels, number_calls
from ..tables.columns import Column, Rows, find_rows, take
from ..tables.placement import OPTIMIZERS
from .columns import CONTAINER, LAYER_KINDS, MODULE, NONE, OPTIMIZER_STEP, PHASE, LayerBoxes, LayerPlace

_CONTAINER, _MODULE, _OPTIMIZER_STEP, _PHASE = (
    LAYER_KINDS.index(kind) for kind in (CONTAINER, MODULE, OPTIMIZER_STEP, PHASE)
)
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTree(LayerBoxes):
    """The layers, with the layer of each call and each phase."""

    call: Rows  # the row of the layer's call; NONE for containers and phases
    of_call: Rows  # the layer of each call; NONE if it is not in the graph
    of_phase: Rows  # the layer of each phase; NONE if nothing ran in it


class _Found(NamedTuple):
    """Layers in any order: those of calls, outer ones first, then containers, and phases."""

    call: Rows  # the row of the layer's call; NONE for containers and phases
    phase: Column
    where: Rows  # index of a place in the module tree; negative for none
    parent: Rows  # the row of the enclosing layer; NONE for a phase


def build_layers(calls: Calls, kept: Column, phase: Column, start_ns: Column) -> LayerTree:
    """Returns the layers of the calls that are `kept`, and of the phases in which ops ran.

    Args:
        calls: the calls of the step.
        kept: which calls become layers.
        phase: the code of each op's phase; NONE for none.
        start_ns: the start of each op.
    """
    begun = np.full(len(PHASES), _FAR)
    np.minimum.at(begun, phase[phase >= 0], start_ns[phase >= 0])
    shared = _share_layers(calls, kept)
    found = _find_layers(calls, shared, np.flatnonzero(begun < _FAR))
    starts = np.where(found.call >= 0, take(calls.start_ns, found.call), _FAR)
    starts = np.where(found.parent < 0, begun[found.phase], starts)
    depth, order = _number_by_time(found.parent, starts)
    at = np.argsort(order.number)
    call, parent = found.call[at], take(order.number, found.parent[at])
    is_optimizer = (found.phase == PHASES.index(OPTIMIZER)) & (found.where < 0)
    kind = np.where(found.call >= 0, np.where(is_optimizer, _OPTIMIZER_STEP, _MODULE), _CONTAINER)
    kind[found.parent < 0] = _PHASE
    place, places = _name_places(calls, found)
    of_call = np.full(len(calls), NONE, np.int64)
    of_call[call[call >= 0]] = np.flatnonzero(call >= 0)
    of_phase = np.full(len(PHASES), NONE, np.int64)
    of_phase[found.phase[at][parent < 0]] = np.flatnonzero(parent < 0)
    return LayerTree(
        parent=parent,
        last=order.last[at],
        depth=(depth[at] - 1).astype(np.int32),
        kind=kind[at].astype(np.int8),
        phase=found.phase[at].astype(np.int8),
        place=place[at],
        call=call,
        start_ns=starts[at],
        places=places,
        of_call=take(of_call, shared),
        of_phase=of_phase,
    )


def _share_layers(calls: Calls, kept: Column) -> Rows:
    """Returns for each kept call the call whose layer it has: a wrapped module shares the layer of its wrapper."""
    shared = np.full(len(calls), NONE, np.int64)
    for level in calls.levels:
        rows = level[kept[level]]
        above = calls.parent[rows]
        is_shared = (take(shared, above) >= 0) & (calls.where[above] == calls.where[rows])
        is_shared &= calls.module[above] != calls.module[rows]
        shared[rows] = np.where(is_shared, shared[above], rows)
    return shared


def _find_layers(calls: Calls, shared: Rows, phases: Rows) -> _Found:
    """Returns the layers of calls, of containers between these, and of phases.

    Args:
        calls: the calls of the step.
        shared: the call whose layer each call has; NONE for none.
        phases: the codes of phases that have a layer even if no call ran in them.
    """
    by_level = np.concatenate([np.zeros(0, np.int64), *calls.levels])
    call = by_level[shared[by_level] == by_level]
    # Calls and phases are numbered together: a call is its row, and a phase follows the last call.
    phase_of = np.concatenate([calls.phase, np.arange(len(PHASES))])
    caller = take(shared, calls.parent[call])
    caller = np.where(caller >= 0, caller, len(calls) + phase_of[call])
    place_of = np.concatenate([calls.where, np.full(len(PHASES), NONE)])
    containers = _Containers(calls, place_of, caller, calls.where[call])
    phases = np.union1d(phases, phase_of[caller[caller >= len(calls)]])
    size = len(call) + len(containers.place)
    layer_of = np.full(len(place_of), NONE, np.int64)
    layer_of[call] = np.arange(len(call))
    layer_of[len(calls) + phases] = size + np.arange(len(phases))
    none = np.full(len(phases), NONE)
    caller = np.concatenate([caller, containers.caller])
    where = np.concatenate([calls.where[call], containers.place])
    around = containers.find(caller, where)
    return _Found(
        call=np.concatenate([call, np.full(len(containers.place), NONE), none]),
        phase=np.concatenate([phase_of[caller], phases]),
        where=np.concatenate([where, none]),
        parent=np.concatenate([np.where(around >= 0, len(call) + around, layer_of[caller]), none]),
    )


class _Containers:
    """The containers between places and the places of the callers, which are numbers of calls and phases."""

    def __init__(self, calls: Calls, place_of: Rows, caller: Rows, where: Rows) -> None:
        """Finds the containers.

        Args:
            calls: the calls of the step.
            place_of: the place of each caller; negative for none.
            caller: the caller of each call that has a layer.
            where: the place of each call that has a layer; negative for none.
        """
        self._above = np.array([*(place.parent for place in calls.places), NONE], np.int64)
        self._width = len(self._above)
        keys = np.zeros(0, np.int64)
        self._keys = keys
        is_below = self._is_below(where, place_of[caller])
        caller, above = caller[is_below], self._above[np.maximum(where[is_below], NONE)]
        while len(caller):
            is_between = (above >= 0) & (above != place_of[caller])
            found = np.unique(self._key(caller[is_between], above[is_between]))
            keys = np.union1d(keys, found)
            caller, above = found // self._width, self._above[found % self._width]
        self._keys = keys
        self.caller, self.place = keys // self._width, keys % self._width

    def find(self, caller: Rows, where: Rows) -> Rows:
        """Returns the container right around each place, if it is called by a caller; NONE if there is none."""
        return find_rows(self._keys, self._key(caller, self._above[np.maximum(where, NONE)]))

    def _is_below(self, where: Rows, outer: Rows) -> Column:
        """Returns which places are below the places `outer`, which all are that are negative."""
        at = self._above[np.maximum(where, NONE)]
        climbing = np.arange(len(at))
        while len(climbing):
            climbing = climbing[(at[climbing] >= 0) & (at[climbing] != outer[climbing])]
            at[climbing] = self._above[at[climbing]]
        return np.asarray((outer < 0) | (at == outer))

    def _key(self, caller: Rows, place: Rows) -> Rows:
        return caller * self._width + place  # no key has the place NONE, since no place has the last number


def _number_by_time(parent: Rows, start_ns: Column) -> tuple[Rows, CallOrder]:
    """Numbers layers in pre-order, by time, and lets outer layers start no later than inner ones.

    Args:
        parent: the enclosing layer of each layer; NONE for none.
        start_ns: the start of each layer, which is changed in place.

    Returns:
        the depth of each layer, from 0; and their numbers.
    """
    first = np.arange(
        len(parent)
    )  # of layers that start at the same time, the one that was found first precedes
    depth: Rows = np.zeros(len(parent), np.int64)
    levels = list(iterate_levels(parent))
    for number, level in reversed([*enumerate(levels)][1:]):
        depth[level] = number
        np.minimum.at(start_ns, parent[level], start_ns[level])
        np.minimum.at(first, parent[level], first[level])
    by_time = np.lexsort((first, start_ns))
    rank = np.argsort(by_time)
    parent = take(rank, parent[by_time])
    order = number_calls(list(iterate_levels(parent)), parent)
    return depth, CallOrder(order.number[rank], order.last[rank])


def _name_places(calls: Calls, found: _Found) -> tuple[Rows, tuple[LayerPlace, ...]]:
    """Returns the code of each layer's names, and the names."""
    inner, phases = np.flatnonzero(found.parent >= 0), np.flatnonzero(found.parent < 0)
    where, outer = found.where[inner], found.where[found.parent[inner]]
    # Places are counted from OPTIMIZERS, which is -2.
    keys = (where - OPTIMIZERS) * (len(calls.places) - OPTIMIZERS) + outer - OPTIMIZERS
    _, first, code = np.unique(keys, return_index=True, return_inverse=True)
    pairs = zip(where[first].tolist(), outer[first].tolist(), strict=True)
    places = [_name_place(calls, *pair) for pair in pairs]
    codes = np.empty(len(found.where), np.int64)
    codes[inner], codes[phases] = code, len(places) + np.arange(len(phases))
    names = [PHASES[phase] for phase in found.phase[phases].tolist()]
    return codes, (*places, *(LayerPlace(name, name) for name in names))


def _name_place(calls: Calls, where: int, outer: int) -> LayerPlace:
    """Returns the names of layers at the place `where` inside of layers at the place `outer`."""
    name = calls.name(where)
    above = calls.places[outer].path if outer >= 0 else None
    is_inside = name.path is not None and above is not None and is_below(name.path, above)
    label = name.path[len(above) :].lstrip(".") if is_inside and name.path and above else ""
    return LayerPlace(name.name, label or name.name, name.path, name.root, name.type or "")


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
