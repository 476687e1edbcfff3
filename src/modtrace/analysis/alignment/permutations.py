"""Finds tensors whose dimensions are in another order in the other recording, such as a weight and its transpose."""

import numpy as np

from ...recording.role import OF_PARAMETERS
from ..tables.columns import Rows
from .sides import Side
from .sizes import Sizes, number_sizes

_TRANSPOSE = (1, 0)
TRANSPOSED = 0  # its code


def find_permutations(a: Side, b: Side, pairs: Rows) -> tuple[Rows, tuple[tuple[int, ...], ...]]:
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


def _find_square(a: Side, b: Side, pairs: Rows, transposed: Rows) -> Rows:
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
