"""Pairs the measured tensors of two recordings, and finds how the dimensions of a pair are permuted."""

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
    rows_in_order,
    take,
)
from ..tables.run import RunTables, RunValues
from ..tables.tensors import Sizes, count_elements, number_sizes, sort_sizes
from .both import (
    Runs,
    for_both,
    have_equal_extremes,
    no_partners,
    number_contents,
    number_partners,
    number_steps,
    pair_rows,
)
from .modules import PlacePairs


@dataclass(frozen=True, eq=False)
class ValueKeys:
    """For rows of both recordings, numbers of the call, op or module they belong to; partners have equal numbers."""

    owner: Partners  # a number of step, phase, role, and call, op or module
    parameter: Partners  # for rows of modules, of step, role and module; for other rows, `owner`
    slot: Partners
    known: tuple[Column, Column]  # whether the call, op or module has a partner
    home: Partners  # a number of step, role and the site's module, not of the op that read or returned it
    is_read_first: tuple[Column, Column]  # whether an op first read a tensor of a module here
    inside: "KeysInside | None"  # None if neither recording measured inside of compiled code


class KeysInside(NamedTuple):
    """Numbers for tensors of modules measured inside of compiled code, where calls have no rows."""

    owner: Partners  # a number of step, phase, role, module and number of the call
    known: tuple[Column, Column]  # whether the row is of such a module


def number_values(runs: Runs, places: PlacePairs, steps: Rows, calls: Partners, ops: Partners) -> ValueKeys:
    """Returns numbers of the call, op or module that each measured tensor belongs to."""
    one, other = values = runs[0].values, runs[1].values
    step = number_steps(one.step, other.step, steps)
    role = number_codes((one.roles, one.role), (other.roles, other.role))
    kind = for_both(lambda of: np.where(of.is_of_op, 2, np.where(of.call >= 0, 1, 0)), values)
    numbers = (number_partners(places.partner, places.back), number_partners(*calls), number_partners(*ops))
    owner = for_both(_find_owners, values, kind, *numbers)
    phase_of_calls = for_both(lambda of, kind: np.where(kind == 0, -1, of.phase), values, kind)
    kept = for_both(lambda of, step: of.kept & (step >= 0), values, step)
    return ValueKeys(
        number_keys(step, (one.phase, other.phase), role, kind, owner),
        number_keys(step, phase_of_calls, role, kind, owner),
        number_codes((one.slots, one.slot), (other.slots, other.slot)),
        for_both(_have_partners, values, kept, kind, owner),
        number_keys(step, role, (take(places.partner, one.home), other.home)),
        for_both(lambda of, kept: kept & of.is_read_first, values, kept),
        _number_inside(values, places, step, role, kept),
    )


def _number_inside(
    values: tuple[RunValues, RunValues], places: PlacePairs, step: Partners, role: Partners, kept: Partners
) -> KeysInside | None:
    """Returns numbers of each tensor's module and call; `step` and `role` are numbers that both recordings share."""
    one, other = values
    if not (one.is_inside.any() or other.is_inside.any()):
        return None
    place = take(places.partner, one.place), other.place
    inside = np.union1d(place[0][one.is_inside], place[1][other.is_inside])
    inside = inside[inside >= 0]
    owner = number_keys(step, (one.phase, other.phase), role, place, (one.nth, other.nth))
    return KeysInside(owner, (kept[0] & one.is_at(places.back[inside]), kept[1] & other.is_at(inside)))


def _find_owners(values: RunValues, kind: Rows, places: Rows, calls: Rows, ops: Rows) -> Rows:
    """Returns a number of the place (kind 0), call (1) or op (2) that each row was measured of."""
    owners = (take(places, values.place), take(calls, values.call), take(ops, values.op))
    return np.asarray(np.choose(kind, owners))


def _have_partners(values: RunValues, kept: Bools, kind: Rows, owner: Rows) -> Bools:
    return np.asarray(kept & ((owner >= 0) | ((kind == 0) & (values.place < 0))))


def pair_values(runs: Runs, keys: ValueKeys) -> Partners:
    """Returns the partner of each row of `values` in both recordings; -1 if there is none.

    An input, parameter or buffer that an op reads first is paired by its module, whichever op that is. Other tensors of
    a call, op or module are paired by slot, and outputs of modules by their contents if those at equal slots differ.
    Inside of compiled code the module and the number of its call take the place of the call. Remaining rows (a module
    returns a tuple, its port a tensor) are paired in order if their shapes are equal, else if only the order of
    dimensions differs, else by element count, except rows that `_find_unlike` returns.
    """
    partners = no_partners(runs[0].values.step, runs[1].values.step)
    _pair_more(runs, keys.is_read_first, partners, number_keys(keys.home, keys.slot))
    _pair_more(runs, keys.known, partners, number_keys(keys.owner, keys.slot))
    _pair_by_content(runs, keys, partners)
    _pair_more(runs, keys.known, partners, number_keys(keys.parameter, keys.slot))
    if keys.inside is not None:
        _pair_more(runs, keys.inside.known, partners, number_keys(keys.inside.owner, keys.slot))
    known = for_both(lambda known, unlike: known & ~unlike, keys.known, _find_unlike(runs, keys, partners))
    for form in (np.asarray, sort_sizes, count_elements):
        if not all(for_both(lambda known, partner: (known & (partner < 0)).any(), known, partners)):
            break
        shapes = number_sizes(form(runs[0].values.sizes), form(runs[1].values.sizes))
        _pair_more(runs, known, partners, number_keys(keys.owner, shapes))
    return partners


def _pair_by_content(runs: Runs, keys: ValueKeys, partners: Partners) -> None:
    """Pairs outputs of modules that have equal contents, if their partners by slot have other contents.

    A module may return `y`, and its port `(y, residual)` or `(residual, y)`. Outputs of outermost calls stay paired by
    slot, because no recorded reader shows that both runs use them alike.
    """
    partner, back = partners
    inside = for_both(
        lambda run: np.flatnonzero(run.values.is_of(OUTPUT) & (take(run.calls.parent, run.values.call) >= 0)),
        runs,
    )
    by_slot = partner[inside[0]]
    if (by_slot >= 0).all() and have_equal_extremes(runs, (inside[0], by_slot)):
        return
    content, content_b = contents = number_contents(runs, inside)
    rows = np.flatnonzero((partner >= 0) & (content >= 0))
    of_partner = content_b[partner[rows]]
    rows = rows[(of_partner >= 0) & (of_partner != content[rows])]
    back[partner[rows]] = -1
    partner[rows] = -1
    can_tell = for_both(lambda known, content: known & (content >= 0), keys.known, contents)
    _pair_more(runs, can_tell, partners, number_keys(keys.owner, contents))
    _pair_more(runs, keys.known, partners, number_keys(keys.owner, keys.slot))


def _find_unlike(runs: Runs, keys: ValueKeys, partners: Partners) -> tuple[Bools, Bools]:
    """Returns outputs of modules that may be different tensors: one returns `x + mlp`, its port `mlp` and `x` apart.

    These are unpaired outputs of inner calls that return different numbers of tensors in the two recordings, unless the
    outputs of another module of the same type have shown which slot is which.
    """
    is_output = for_both(
        lambda run, known: run.values.is_of(OUTPUT) & (run.values.call >= 0) & known, runs, keys.known
    )
    owners, position = np.unique(
        np.concatenate(for_both(lambda owner, chosen: owner[chosen], keys.owner, is_output)),
        return_inverse=True,
    )
    positions = np.split(position.reshape(-1), [int(is_output[0].sum())])
    count, count_b = (np.bincount(numbers, minlength=len(owners)) for numbers in positions)
    differs = owners[count != count_b]
    types = number_texts(*for_both(lambda run: [name.type for name in run.names], runs))
    paired = np.flatnonzero(is_output[0] & (partners[0] >= 0))
    paired = paired[keys.slot[0][paired] != keys.slot[1][partners[0][paired]]]
    shown = for_both(
        lambda run, types, rows: types[run.values.place[rows]], runs, types, (paired, partners[0][paired])
    )

    def find(run: RunTables, is_output: Bools, owner: Rows, partner: Rows, types: Rows, shown: Rows) -> Bools:
        is_unlike = is_output & (partner < 0)
        rows = np.flatnonzero(is_unlike)
        is_unlike[rows] = (
            np.isin(owner[rows], differs)
            & (run.calls.parent[run.values.call[rows]] >= 0)
            & ~np.isin(types[run.values.place[rows]], shown)
        )
        return is_unlike

    return for_both(find, runs, is_output, keys.owner, partners, types, shown)


def _pair_more(runs: Runs, wanted: tuple[Column, Column], partners: Partners, keys: Partners) -> None:
    """Pairs wanted rows without partner whose keys are equal, in the order in which they were measured.

    Outputs of one call are taken by slot index, because a residual may be computed before the first output.
    """
    rows = for_both(
        lambda run, wanted, partner: rows_in_order(wanted & (partner < 0), _order(run.values)),
        runs,
        wanted,
        partners,
    )
    pair_rows(rows, keys, partners)


def _order(values: RunValues) -> Rows:
    matches = [re.match(r"\[(\d+)\]", slot) for slot in values.slots]
    rank = np.array([*(int(match[1]) if match else 0 for match in matches), 0])[values.slot]
    is_output = values.is_of(OUTPUT) & (values.call >= 0)
    return np.asarray(np.where(is_output, rank * len(rank), 0) + values.order)


_TRANSPOSE = (1, 0)
TRANSPOSED = 0  # the code of the permutation (1, 0)


def find_permutations(runs: Runs, pairs: Rows) -> tuple[Rows, tuple[tuple[int, ...], ...]]:
    """Returns for each pair a code of how the dimensions of `b` have to be permuted, -1 for not at all, and the codes.

    A square weight counts as transposed if another weight is transposed whose modules have the same types.
    """
    sizes, others = for_both(lambda run, rows: run.values.sizes[rows], runs, pairs.T)
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
    square = _find_square(runs, pairs, permuted == TRANSPOSED)
    permuted[square] = TRANSPOSED
    return permuted, tuple(codes)


def is_transposed(type_name: str, other: str) -> bool:
    """Returns whether modules of these two types store each other's weights transposed.

    Conv1D of transformers has a bias of one dimension and a weight of two, as Linear has, but transposed.
    """
    return {type_name, other} == {"Conv1D", "Linear"}


def to_shape(sizes: Rows) -> tuple[int, ...]:
    """Returns one row of a matrix of shapes as a tuple."""
    return tuple(size for size in sizes.tolist() if size >= 0)


def _permute(wanted: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the axes that permute `given` into `wanted`, with equal sizes in order; None if there are none."""
    if sorted(wanted) != sorted(given):
        return None
    left = list(enumerate(given))
    axes = []
    for size in wanted:
        at = next(place for place, (_, other) in enumerate(left) if other == size)
        axes.append(left.pop(at)[0])
    return tuple(axes)


def _find_square(runs: Runs, pairs: Rows, transposed: Rows) -> Rows:
    """Returns which pairs are square weights of modules of two types that have other weights transposed."""
    places = np.stack(for_both(lambda run, rows: run.values.place[rows], runs, pairs.T), axis=1)
    is_weight = runs[0].values.is_of(*OF_PARAMETERS, rows=pairs[:, 0]) & (places >= 0).all(axis=1)
    sizes = _both_matrices(runs[0].values.sizes[pairs[:, 0]])
    rows = np.flatnonzero(is_weight & (sizes >= 0))
    distinct, which = np.unique(places[rows], axis=0, return_inverse=True)
    which = which.reshape(-1)
    types = [(runs[0].names[one].type, runs[1].names[other].type) for one, other in distinct.tolist()]
    known = {types[number] for number in np.unique(which[transposed[rows]]).tolist()}
    is_known = np.array([pair in known or is_transposed(*pair) for pair in types], bool)
    square = np.zeros(len(pairs), bool)
    chosen = rows[is_known[which]]
    square[chosen] = sizes[chosen] == 1
    return square


def _both_matrices(sizes: Sizes) -> Rows:
    """Returns for each shape 1 for a square matrix, 0 for another matrix, and -1 for any other tensor."""
    if sizes.shape[1] < 2:
        return np.full(len(sizes), -1, np.int64)
    is_matrix = (sizes[:, 1] >= 0) & (sizes[:, 2:] < 0).all(axis=1)
    return np.where(is_matrix, (sizes[:, 0] == sizes[:, 1]).astype(np.int64), -1)
