"""Pairs the measured tensors of two recordings."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..step.calls import Column, Rows, take
from .calls import translate
from .keys import Partners, number_codes, number_keys, pair_keys, rows_in_order
from .modules import PlacePairs
from .sides import Side, ValueSide
from .sizes import Sizes, count_elements, number_sizes


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
    a: Side, b: Side, places: PlacePairs, steps: Rows, calls: Partners, ops: Partners
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
    a: ValueSide, b: ValueSide, places: PlacePairs, step: Column, role: Partners, kept: tuple[Column, Column]
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


def _find_owners(side: Side, places: Rows, calls: Rows, ops: Rows) -> _Owners:
    """Returns the owner of each row, by the numbers of places, calls and ops."""
    values = side.values
    kind = np.where(values.is_of_op, 2, np.where(values.call >= 0, 1, 0))
    number = np.choose(kind, (take(places, values.place), take(calls, values.call), take(ops, values.op)))
    return _Owners(kind, number, (number >= 0) | ((kind == 0) & (values.place < 0)))


def _number(back: Rows) -> Rows:
    """Returns the own number of each row that has a partner; -1 for the others."""
    return np.where(back >= 0, np.arange(len(back)), -1)


def pair_values(a: Side, b: Side, keys: ValueKeys) -> Partners:
    """Returns the partner of each row of `values`; -1 if there is none.

    Tensors of one owner are paired by slot; a module inside of compiled code owns them by the number of its call. An
    input, parameter or buffer that another op reads first in the other run is still the same. What is left (a module
    returns a tuple, its port a tensor) is paired in order where the shapes are equal, else where they are but for the
    order of dimensions or have as many elements.
    """
    partners = np.full(len(a.values.step), -1, np.int64), np.full(len(b.values.step), -1, np.int64)
    _pair_more(a, b, keys.known, partners, number_keys(keys.owner, keys.slot))
    _pair_more(a, b, keys.known, partners, number_keys(keys.parameter, keys.slot))
    _pair_more(a, b, keys.is_read_first, partners, number_keys(keys.home, keys.slot))
    if keys.inside is not None:
        _pair_more(a, b, keys.inside.known, partners, number_keys(keys.inside.owner, keys.slot))
    for form in (np.asarray, _sorted, count_elements):
        if not all(
            (known & (partner < 0)).any() for known, partner in zip(keys.known, partners, strict=True)
        ):
            break
        shapes = number_sizes(form(a.values.sizes), form(b.values.sizes))
        _pair_more(a, b, keys.known, partners, number_keys(keys.owner, shapes))
    return partners


def _pair_more(a: Side, b: Side, wanted: tuple[Column, Column], partners: Partners, by: Partners) -> None:
    """Pairs wanted rows without partner whose numbers are equal, in the order in which they were measured."""
    rows, rows_b = (
        rows_in_order(each & (partner < 0), side.values.order)
        for side, each, partner in zip((a, b), wanted, partners, strict=True)
    )
    found, back = pair_keys(by[0][rows], by[1][rows_b])
    partners[0][rows], partners[1][rows_b] = take(rows_b, found), take(rows, back)


def _sorted(sizes: Sizes) -> Sizes:
    return -np.sort(-sizes, axis=1)
