"""Pairs the measured tensors of two recordings, and finds how the axes of a pair are permuted."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...recording.role import OF_PARAMETERS, OUTPUT
from ..tables.columns import (
    Bools,
    Column,
    Partners,
    Rows,
    number_codes,
    number_keys,
    number_texts,
    pair_keys,
    rows_in_order,
    take,
)
from ..tables.run import RunTables, RunValues
from ..tables.tensors import Sizes, count_elements, number_sizes, sort_sizes
from .calls import translate
from .contents import have_equal_extremes, number_contents
from .modules import PlacePairs


@dataclass(frozen=True, eq=False)
class ValueKeys:
    """What the rows of both recordings belong to, as numbers that are equal if this has a partner."""

    owner: Partners  # step, phase, role, and call, op or module
    parameter: Partners  # of what belongs to a module: step, role and module; of the rest as `owner`
    slot: Partners
    known: tuple[Column, Column]  # whether the owner has a partner
    home: Partners  # step, role and module of the site, whatever has read or returned the tensor
    is_read_first: tuple[Column, Column]  # whether it is a module's, and an op read it first
    inside: "KeysInside | None"  # None if neither recording measured inside of compiled code


class KeysInside(NamedTuple):
    """What tensors of modules belong to that a recording measured inside of compiled code, where calls have no rows."""

    owner: Partners  # step, phase, role, module and n-th call
    known: tuple[Column, Column]  # whether it is of such a module


def number_values(
    a: RunTables, b: RunTables, places: PlacePairs, steps: Rows, calls: Partners, ops: Partners
) -> ValueKeys:
    """Returns what each measured tensor belongs to."""
    of_a, of_b = a.values, b.values
    step = translate(of_a.step, steps)
    role = number_codes((of_a.roles, of_a.role), (of_b.roles, of_b.role))
    owners = (
        _find_owners(a, places.partner, calls[0], ops[0]),
        _find_owners(b, _number(places.back), _number(calls[1]), _number(ops[1])),
    )
    keys = number_keys(
        (step, of_b.step),
        (of_a.phase, of_b.phase),
        role,
        (owners[0].kind, owners[1].kind),
        (owners[0].number, owners[1].number),
    )
    is_alone = owners[0].kind == 0, owners[1].kind == 0
    parameter = number_keys(
        (step, of_b.step),
        (np.where(is_alone[0], -1, keys[0]), np.where(is_alone[1], -1, keys[1])),
        role,
        (np.where(is_alone[0], owners[0].number, -1), np.where(is_alone[1], owners[1].number, -1)),
    )
    kept = of_a.kept & (step >= 0), of_b.kept & np.isin(of_b.step, steps[:, 1])
    return ValueKeys(
        keys,
        parameter,
        number_codes((of_a.slots, of_a.slot), (of_b.slots, of_b.slot)),
        (kept[0] & owners[0].has_partner, kept[1] & owners[1].has_partner),
        number_keys((step, of_b.step), role, (take(places.partner, of_a.home), of_b.home)),
        (kept[0] & of_a.is_read_first, kept[1] & of_b.is_read_first),
        _number_inside(of_a, of_b, places, step, role, kept),
    )


def _number_inside(
    a: RunValues, b: RunValues, places: PlacePairs, step: Column, role: Partners, kept: tuple[Column, Column]
) -> KeysInside | None:
    """Numbers tensors by module and call, as `step` of `a` and `role` of both are in `b`."""
    if not (a.is_inside.any() or b.is_inside.any()):
        return None
    place = take(places.partner, a.place)
    found = np.union1d(place[a.is_inside], b.place[b.is_inside])
    found = found[found >= 0]
    owner = number_keys(
        (step, b.step),
        (a.phase, b.phase),
        role,
        (place, b.place),
        (a.nth, b.nth),
    )
    return KeysInside(owner, (kept[0] & a.is_at(places.back[found]), kept[1] & b.is_at(found)))


class _Owners(NamedTuple):
    """What each row was measured of."""

    kind: Rows  # 0: a module, 1: a call, 2: an op
    number: Rows  # that of the partner in `b`; -1 for none
    has_partner: Column


def _find_owners(side: RunTables, places: Rows, calls: Rows, ops: Rows) -> _Owners:
    """Returns the owner of each row, by the numbers of places, calls and ops."""
    values = side.values
    kind = np.where(values.is_of_op, 2, np.where(values.call >= 0, 1, 0))
    number = np.choose(kind, (take(places, values.place), take(calls, values.call), take(ops, values.op)))
    return _Owners(kind, number, (number >= 0) | ((kind == 0) & (values.place < 0)))


def _number(back: Rows) -> Rows:
    """Returns the own number of each row that has a partner; -1 for the others."""
    return np.where(back >= 0, np.arange(len(back)), -1)


def pair_values(a: RunTables, b: RunTables, keys: ValueKeys) -> Partners:
    """Returns the partner of each row of `values`; -1 if there is none.

    An input, parameter or buffer that an op reads first is paired by the module that has it, whichever op that is.
    Other tensors of one owner are paired by slot, and outputs of modules by what they hold, where those at the same
    slots hold something else. A module inside of compiled code owns them by the number of its call. What is left (a
    module returns a tuple, its port a tensor) is paired in order where the shapes are equal, else where they are but
    for the order of dimensions or have as many elements; not what `_find_unlike` returns.
    """
    partners = np.full(len(a.values.step), -1, np.int64), np.full(len(b.values.step), -1, np.int64)
    _pair_more(a, b, keys.is_read_first, partners, number_keys(keys.home, keys.slot))
    _pair_more(a, b, keys.known, partners, number_keys(keys.owner, keys.slot))
    _pair_by_content(a, b, keys, partners)
    _pair_more(a, b, keys.known, partners, number_keys(keys.parameter, keys.slot))
    if keys.inside is not None:
        _pair_more(a, b, keys.inside.known, partners, number_keys(keys.inside.owner, keys.slot))
    unlike = _find_unlike(a, b, keys, partners)
    known = keys.known[0] & ~unlike[0], keys.known[1] & ~unlike[1]
    for form in (np.asarray, sort_sizes, count_elements):
        if not all((each & (partner < 0)).any() for each, partner in zip(known, partners, strict=True)):
            break
        shapes = number_sizes(form(a.values.sizes), form(b.values.sizes))
        _pair_more(a, b, known, partners, number_keys(keys.owner, shapes))
    return partners


def _pair_by_content(a: RunTables, b: RunTables, keys: ValueKeys, partners: Partners) -> None:
    """Pairs outputs of modules that hold the same, where their partners by slot hold something else.

    A module may return `y`, and its port `(y, residual)` or `(residual, y)`. What outermost calls return stays with its
    slot: nothing that was recorded tells that both runs read it alike.
    """
    inside = [
        np.flatnonzero(each.values.is_of(OUTPUT) & (take(each.calls.parent, each.values.call) >= 0))
        for each in (a, b)
    ]
    partner = partners[0][inside[0]]
    if (partner >= 0).all() and have_equal_extremes(a, b, inside[0], partner):
        return
    content = number_contents(a, b, inside)
    rows = np.flatnonzero((partners[0] >= 0) & (content[0] >= 0))
    rows = rows[(content[1][partners[0][rows]] >= 0) & (content[1][partners[0][rows]] != content[0][rows])]
    partners[1][partners[0][rows]] = -1
    partners[0][rows] = -1
    can_tell = keys.known[0] & (content[0] >= 0), keys.known[1] & (content[1] >= 0)
    _pair_more(a, b, can_tell, partners, number_keys(keys.owner, content))
    _pair_more(a, b, keys.known, partners, number_keys(keys.owner, keys.slot))


def _find_unlike(a: RunTables, b: RunTables, keys: ValueKeys, partners: Partners) -> tuple[Bools, Bools]:
    """Returns outputs of modules that may be other tensors: one returns `x + mlp`, its port `mlp` and `x` apart.

    They are those without partner of calls that return another number of tensors and are inside of other calls, if no
    call of a module of this type has shown by what it returned which slot is which.
    """
    sides = a, b
    of_calls = [
        each.values.is_of(OUTPUT) & (each.values.call >= 0) & known
        for each, known in zip(sides, keys.known, strict=True)
    ]
    owners, position = np.unique(
        np.concatenate([owner[mine] for owner, mine in zip(keys.owner, of_calls, strict=True)]),
        return_inverse=True,
    )
    split = int(of_calls[0].sum())
    counts = [np.bincount(each, minlength=len(owners)) for each in np.split(position.reshape(-1), [split])]
    differs = owners[counts[0] != counts[1]]
    places = [[name.type for name in each.names] for each in sides]
    types = number_texts(places[0], places[1])
    paired = np.flatnonzero(of_calls[0] & (partners[0] >= 0))
    paired = paired[keys.slot[0][paired] != keys.slot[1][partners[0][paired]]]
    told = (
        np.unique(types[0][a.values.place[paired]]),
        np.unique(types[1][b.values.place[partners[0][paired]]]),
    )
    found = []
    for each, mine, owner, partner, type_of, known in zip(
        sides, of_calls, keys.owner, partners, types, told, strict=True
    ):
        rows = np.flatnonzero(mine & (partner < 0))
        rows = rows[np.isin(owner[rows], differs)]
        rows = rows[each.calls.parent[each.values.call[rows]] >= 0]
        rows = rows[~np.isin(type_of[each.values.place[rows]], known)]
        found.append(np.isin(np.arange(len(partner)), rows))
    return found[0], found[1]


def _pair_more(
    a: RunTables, b: RunTables, wanted: tuple[Column, Column], partners: Partners, by: Partners
) -> None:
    """Pairs wanted rows without partner whose numbers are equal, in the order in which they were measured.

    Outputs of one call are in the order of their indices: a residual may be computed before what is returned first.
    """
    rows, rows_b = (
        rows_in_order(each & (partner < 0), _order(side.values))
        for side, each, partner in zip((a, b), wanted, partners, strict=True)
    )
    found, back = pair_keys(by[0][rows], by[1][rows_b])
    partners[0][rows], partners[1][rows_b] = take(rows_b, found), take(rows, back)


def _order(values: RunValues) -> Rows:
    index = [re.match(r"\[(\d+)\]", slot) for slot in values.slots]
    rank = np.array([*(int(each[1]) if each else 0 for each in index), 0])[values.slot]
    is_output = values.is_of(OUTPUT) & (values.call >= 0)
    return np.asarray(np.where(is_output, rank * len(rank), 0) + values.order)


_TRANSPOSE = (1, 0)
TRANSPOSED = 0  # its code


def find_permutations(a: RunTables, b: RunTables, pairs: Rows) -> tuple[Rows, tuple[tuple[int, ...], ...]]:
    """Returns of each pair how the dimensions of `b` have to be permuted, as a code; -1 for not at all; and the codes.

    A square weight is transposed if another weight is whose modules have the same types.
    """
    sizes, others = a.values.sizes[pairs[:, 0]], b.values.sizes[pairs[:, 1]]
    one, other = number_sizes(sizes, others)
    codes: dict[tuple[int, ...], int] = {_TRANSPOSE: TRANSPOSED}
    permuted = np.full(len(pairs), -1, np.int64)
    differ = np.flatnonzero(one != other)
    kinds, first, back = np.unique(
        np.stack([one[differ], other[differ]], axis=1), axis=0, return_index=True, return_inverse=True
    )
    found = [_permute(to_shape(sizes[at]), to_shape(others[at])) for at in differ[first].tolist()]
    numbers = [-1 if axes is None else codes.setdefault(axes, len(codes)) for axes in found]
    permuted[differ] = np.array(numbers, np.int64)[back.reshape(-1)] if len(kinds) else -1
    square = _find_square(a, b, pairs, permuted == TRANSPOSED)
    permuted[square] = TRANSPOSED
    return permuted, tuple(codes)


def is_transposed(type_name: str, other: str) -> bool:
    """Returns whether modules of two types have each other's weights transposed.

    A Conv1D of transformers has a bias of one dimension and a weight of two, as Linear has, the other way round.
    """
    return {type_name, other} == {"Conv1D", "Linear"}


def to_shape(sizes: Rows) -> tuple[int, ...]:
    """Returns one row of a matrix of shapes as a tuple."""
    return tuple(size for size in sizes.tolist() if size >= 0)


def _permute(wanted: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns for which axes `given` permuted is `wanted`: of equal sizes in their order; None if there are none."""
    if sorted(wanted) != sorted(given):
        return None
    left = list(enumerate(given))
    axes = []
    for size in wanted:
        at = next(place for place, (_, other) in enumerate(left) if other == size)
        axes.append(left.pop(at)[0])
    return tuple(axes)


def _find_square(a: RunTables, b: RunTables, pairs: Rows, transposed: Rows) -> Rows:
    """Returns which pairs are square weights of modules of types of which other weights are transposed."""
    is_weight = a.values.is_of(*OF_PARAMETERS, rows=pairs[:, 0]) & (a.values.place[pairs[:, 0]] >= 0)
    is_weight &= b.values.place[pairs[:, 1]] >= 0
    sizes = _both_matrices(a.values.sizes[pairs[:, 0]])
    rows = np.flatnonzero(is_weight & (sizes >= 0))
    at = np.stack([a.values.place[pairs[rows, 0]], b.values.place[pairs[rows, 1]]], axis=1)
    distinct, which = np.unique(at, axis=0, return_inverse=True)
    which = which.reshape(-1)
    types = [(a.names[one].type, b.names[other].type) for one, other in distinct.tolist()]
    known = {types[each] for each in np.unique(which[transposed[rows]]).tolist()}
    is_known = np.array([each in known or is_transposed(*each) for each in types], bool)
    square = np.zeros(len(pairs), bool)
    chosen = rows[is_known[which]]
    square[chosen] = sizes[chosen] == 1
    return square


def _both_matrices(sizes: Sizes) -> Rows:
    """Returns 1 for square matrices, 0 for others, and -1 for what is no matrix."""
    if sizes.shape[1] < 2:
        return np.full(len(sizes), -1, np.int64)
    is_matrix = (sizes[:, 1] >= 0) & (sizes[:, 2:] < 0).all(axis=1)
    return np.where(is_matrix, (sizes[:, 0] == sizes[:, 1]).astype(np.int64), -1)
