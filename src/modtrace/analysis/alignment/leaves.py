"""Reads the modules that call no other ones, with what is known of their parameters."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ...recording.role import OUTPUT, PARAMETER
from ..tables.columns import Rows, rows_in_order, take
from ..tables.run import RunTables

#: Parts of type names; modules without parameters are alike if their types' names contain the same part.
_KINDS = ("dropout", "norm", "pool", "softmax", "elu", "act", "loss", "identity")


#: The largest number of consecutive modules that are tried as the parts of one.
_MOST_PARTS = 8

_Shape = tuple[int, ...]
Likeness = tuple[int, int, str, tuple[_Shape, ...]]


class _Weights(NamedTuple):
    """What was measured of a module's own parameters."""

    shapes: tuple[_Shape, ...] = ()  # see `_read_shape`, the largest first; empty if no output was measured
    content: tuple[float, ...] = ()  # by which the largest one is recognized; empty if it is constant

    @property
    def squeezed(self) -> tuple[_Shape, ...]:
        """The shapes without sizes of 1."""
        return tuple(tuple(size for size in shape if size != 1) for shape in self.shapes)


@dataclass(frozen=True)
class LeafModule:
    """A module that calls no other module, or several consecutive ones that may be parts of one."""

    places: tuple[int, ...]
    output: int  # the row of `values` of one of its outputs; -1 for none
    parameters: int
    kind: str
    weights: _Weights

    @property
    def likeness(self) -> Likeness:
        """The properties that leaves must share to be considered alike."""
        return len(self.places), self.parameters, self.kind, self.weights.squeezed

    def is_unlike(self, other: "LeafModule") -> bool:
        """Returns whether the parameters of two leaves are known to have other shapes."""
        shapes, others = self.weights.squeezed, other.weights.squeezed
        return bool(shapes and others) and shapes != others


def find_leaves(side: RunTables) -> list[LeafModule]:
    """Returns the leaves of a recording in the order in which they are first called."""
    calls = side.calls
    is_called = calls.kept & (calls.phase == PHASES.index(FORWARD)) & (calls.place >= 0)
    around = take(calls.place, calls.parent[is_called])
    above = np.unique(around[around != calls.place[is_called]])
    rows = rows_in_order(is_called & ~np.isin(calls.place, above), calls.start_ns)
    _, first = np.unique(calls.place[rows], return_index=True)
    place = calls.place[rows[np.sort(first)]]
    leaves, weights = [], _describe_weights(side)
    for at, output in zip(place.tolist(), _find_outputs(side, place).tolist(), strict=True):
        module = side.places.places[at].module
        kind = "" if module.parameters else _name_kind(module.type)
        leaves.append(LeafModule((at,), output, module.parameters or 0, kind, weights.get(at, _Weights())))
    return leaves


def join_siblings(
    side: RunTables, leaves: Sequence[LeafModule], others: Sequence[LeafModule]
) -> list[LeafModule]:
    """Returns the leaves, where siblings are joined if they are together as large as a leaf that only `others` has."""
    own = {(leaf.parameters, leaf.weights.squeezed) for leaf in leaves}
    wanted: dict[int, set[tuple[_Shape, ...]]] = defaultdict(set)
    for leaf in others:
        if (leaf.parameters, leaf.weights.squeezed) not in own:
            wanted[leaf.parameters].add(leaf.weights.shapes)
    known = {leaf.weights.content for leaf in others if leaf.weights.content}
    joined: list[LeafModule] = []
    taken: set[int] = set()
    for first, leaf in enumerate(leaves):
        if leaf.places[0] in taken:
            continue
        parts, shapes = _find_parts(side, leaves[first : first + 2 * _MOST_PARTS], wanted, known)
        places = tuple(part.places[0] for part in parts)
        taken.update(places)
        total = sum(part.parameters for part in parts)
        joined.append(LeafModule(places, -1, total, "", _Weights(shapes)) if parts else leaf)
    return joined


def _find_parts(
    side: RunTables,
    leaves: Sequence[LeafModule],
    wanted: Mapping[int, Collection[tuple[_Shape, ...]]],
    known: Collection[tuple[float, ...]],
) -> tuple[list[LeafModule], tuple[_Shape, ...]]:
    """Returns the first leaf and siblings that are together the parts of a wanted one, and its shapes.

    Leaves without parameters, such as an activation, may be called in between, and leaves whose weights the other
    recording has too. No leaf is returned if there are no such parts.
    """
    parts: list[LeafModule] = []
    total = 0
    parents = [side.places.places[leaf.places[0]].parent for leaf in leaves]
    for leaf, parent in zip(leaves, parents, strict=True):
        if parent != parents[0]:
            break
        if leaf.parameters and leaf.weights.content not in known:
            parts.append(leaf)
            total += leaf.parameters
        if not parts or len(parts) > _MOST_PARTS:
            break
        if len(parts) > 1:
            given = [part.weights.shapes for part in parts]
            for shapes in wanted.get(total, ()):
                if _are_parts(given, shapes):
                    return parts, shapes
    return [], ()


def _are_parts(given: Sequence[tuple[_Shape, ...]], wanted: tuple[_Shape, ...]) -> bool:
    """Returns whether the largest of some parameters are that of a whole if they are concatenated."""
    if not wanted or not all(given):
        return not wanted and not any(given)
    shapes, whole = [shapes[0] for shapes in given], wanted[0]
    if any(len(shape) != len(whole) for shape in shapes):
        return False
    other = [at for at, sizes in enumerate(zip(whole, *shapes, strict=True)) if len({*sizes}) > 1]
    return len(other) == 1 and sum(shape[other[0]] for shape in shapes) == whole[other[0]]


def _name_kind(type_name: str) -> str:
    lower = type_name.lower()
    return next((kind for kind in _KINDS if kind in lower), lower)


def _find_outputs(side: RunTables, place: Rows) -> Rows:
    values = side.values
    rows = rows_in_order(values.kept & values.is_of(OUTPUT) & (values.place >= 0), values.order)
    distinct, first = np.unique(values.place[rows], return_index=True)
    found = np.full(len(side.names), -1, np.int64)
    found[distinct] = rows[first]
    return found[place]


def _describe_weights(side: RunTables) -> dict[int, _Weights]:
    """Returns what was measured of the parameters of each place."""
    values = side.values
    rows = rows_in_order(values.kept & values.is_of(PARAMETER) & (values.home >= 0), values.order)
    _, first = np.unique(values.home[rows] * (len(values.slots) + 1) + values.slot[rows], return_index=True)
    rows = rows[first]
    least, largest = (extreme[rows] for extreme in values.read_extremes())
    output = _find_outputs(side, values.home[rows])
    of_place: dict[int, list[tuple[tuple[float, ...], _Shape]]] = defaultdict(list)
    for place, sizes, low, high, made in zip(
        *(column.tolist() for column in (values.home[rows], values.sizes[rows], least, largest, output)),
        strict=True,
    ):
        known = sorted(size for size in sizes if size >= 0)
        shape = _read_shape(sizes, values.sizes[made].tolist()) if made >= 0 else ()
        of_place[place].append(((math.prod(known), *known, low, high), shape))
    described = {}
    for place, weights in of_place.items():
        weights.sort(reverse=True)
        content, shapes = weights[0][0], tuple(shape for _, shape in weights)
        is_constant = not content[-2] < content[-1]
        described[place] = _Weights(shapes if any(shapes) else (), () if is_constant else content)
    return described


def _read_shape(sizes: Sequence[int], output: Sequence[int]) -> _Shape:
    """Returns a parameter's shape; that of a matrix begins with the last size of its module's output, if it has it.

    The reason is that Conv1D of transformers and Linear store the matrix for the same output transposed.
    """
    shape = tuple(size for size in sizes if size >= 0)
    made = [size for size in output if size >= 0][-1:]
    if len(shape) == 2 and made == [shape[1]]:
        return shape[::-1]
    return shape
