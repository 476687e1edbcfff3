"""Tells which kind of difference makes one tensor of the other: a factor, an offset, another order, a mask."""

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ...errors import RecordingError
from ...recording.statistics.fingerprints import sketch_of_ones
from ...recording.statistics.moments import Numbers
from ..tables.measured import ComparedRows
from .tensor_metrics import distances, norm_of, to_numbers

#: What is left of a difference once it is explained is at most so much of the tensor, or four times the noise.
_LEFT = 1e-5
_OF_NOISE = 4.0

#: A kind explains a difference that is so many times as large as what is left of it.
_EXPLAINS = 5.0

#: A factor has a name if it is apart from it by so much at most.
_OF_FACTORS = 1e-4

#: Rows are shifted by so many at most, and larger tensors are not looked at for another order.
_MOST_ROWS = 2
_LARGEST = 2**24


class Relation(NamedTuple):
    """How the second tensor comes from the first."""

    kind: str  # scale, sign, offset, masked, shifted, transposed, permuted, reordered, stale
    text: str  # what it is of the first: `1/8 x`, `the negative of`


def find_relation(
    a: ComparedRows, b: ComparedRows, at: int, error: float, noise: float, sizes: Iterable[int]
) -> Relation | None:
    """Returns which kind of difference a pair of tensors has; None if it is none that is known.

    Args:
        a: rows of one recording.
        b: as many rows of another.
        at: the pair.
        error: how far they are apart.
        noise: how much of that is noise.
        sizes: sizes of axes that a factor may come from, besides those of the tensor.
    """
    left = max(_LEFT, _OF_NOISE * noise)
    dtypes = a.dtypes[a.dtype[at]], b.dtypes[b.dtype[at]]
    if (
        not error > _EXPLAINS * left
        or a.numel[at] != b.numel[at]
        or a.numel[at] < 2
        or "complex" in "".join(dtypes)
    ):
        return None
    sizes = dict.fromkeys([*(size for size in a.shape(at)), int(a.numel[at]), *sizes])
    if a.has_tensor[at] and b.has_tensor[at]:
        try:
            one, other = to_numbers(a.tensor(at)), to_numbers(b.tensor(at))
        except RecordingError:
            one = other = None
        if one is not None and other is not None and np.isfinite(one).all() and np.isfinite(other).all():
            return _relate_tensors(one, other, left, sizes)
    return _relate_statistics(a, b, at, left, sizes) if a.is_measured[at] and b.is_measured[at] else None


# Of whole tensors.


def _relate_tensors(a: Numbers, b: Numbers, left: float, sizes: Iterable[int]) -> Relation | None:
    b = b.reshape(a.shape)
    most = left * max(norm_of(a), norm_of(b))
    squares = float(np.vdot(a, a))
    factor = float(np.vdot(a, b)) / squares if squares else 0.0
    if factor and norm_of(b - factor * a) <= most:
        return _name_factor(factor, left, sizes)
    offset = float(np.mean(b - a))
    if norm_of(b - a - offset) <= most:
        return _name_offset(offset)
    for kept, masked, whose in ((a, b, "the second run"), (b, a, "the first run")):
        is_masked = (masked == 0) & (kept != 0)
        if is_masked.any() and not is_masked[kept != 0].all() and norm_of((b - a)[~is_masked]) <= most:
            return Relation(
                "masked", f"equal but for {is_masked.mean():.0%} of the elements, which {whose} has as 0"
            )
    return next(_find_orders(a, b, most), None) if a.size <= _LARGEST else None


def _find_orders(a: Numbers, b: Numbers, most: float) -> Iterator[Relation]:
    for axis, size in enumerate(a.shape):
        for rows in range(1, min(_MOST_ROWS, size // 4) + 1):  # most of them have to be compared
            for one, other, by in ((a, b, rows), (b, a, -rows)):
                ahead = np.take(one, range(size - rows), axis)
                if norm_of(np.take(other, range(rows, size), axis) - ahead) <= most and norm_of(ahead):
                    yield Relation("shifted", f"the first run's, shifted by {by} along axis {axis}")
    for one_axis, other_axis in combinations(range(a.ndim), 2):
        turned = a.swapaxes(one_axis, other_axis)
        is_turned = min(turned.shape[one_axis], turned.shape[other_axis]) > 1
        if is_turned and norm_of(distances(turned.reshape(a.shape), b)) <= most:
            yield Relation("transposed", f"the first run's with axes {one_axis} and {other_axis} exchanged")
    for axis in range(a.ndim):
        if a.ndim > 1 and np.array_equal(_sort_rows(a, axis), _sort_rows(b, axis)):
            yield Relation("permuted", f"the first run's in another order along axis {axis}")
    if norm_of(np.sort(a, axis=None) - np.sort(b, axis=None)) <= most:
        yield Relation("reordered", "the same numbers as the first run's in another order")


def _sort_rows(numbers: Numbers, axis: int) -> Numbers:
    rows = np.moveaxis(numbers, axis, 0).reshape(numbers.shape[axis], -1)
    return rows[np.lexsort(rows.T[:64])]


# Of what else was measured.


def _relate_statistics(
    a: ComparedRows, b: ComparedRows, at: int, left: float, sizes: Iterable[int]
) -> Relation | None:
    one, other = (each.stats.take(np.array([at])) for each in (a, b))
    first, second = (
        np.array([float(getattr(each, name)[0]) for name in ("min", "max", "mean", "rms")])
        for each in (one, other)
    )
    if not (np.isfinite(first).all() and np.isfinite(second).all()) or not first[3] or first[0] == first[1]:
        return None
    sketches = [each.sketches(np.array([at]))[0] if each.has_sketch[at] else None for each in (a, b)]
    size = max(np.abs(first[:2]).max(), np.abs(second[:2]).max())

    def is_explained(expected: Numbers, factor: float, offset: float) -> bool:
        if np.abs(second - expected).max() > left * size:
            return False
        if sketches[0] is None or sketches[1] is None:
            return True
        made = factor * sketches[0] + offset * sketch_of_ones(int(a.numel[at]))
        return float(np.linalg.norm(sketches[1] - made)) <= left * max(norm_of(sketches[1]), norm_of(made))

    ratio = float(second[3] / first[3])
    if is_explained(ratio * first, ratio, 0.0) and abs(ratio - 1) > left:
        return _name_factor(ratio, left, sizes)
    if is_explained(ratio * np.array([-first[1], -first[0], -first[2], first[3]]), -ratio, 0.0):
        return _name_factor(-ratio, left, sizes)
    offset = float(second[2] - first[2])
    moved = first + offset
    moved[3] = np.sqrt(max(first[3] ** 2 + 2 * offset * first[2] + offset**2, 0.0))
    if abs(offset) > left * size and is_explained(moved, 1.0, offset):
        return _name_offset(offset)
    if (np.abs(second - first) <= _LEFT * size).all():
        return Relation("reordered", "the same numbers as the first run's in another order, maybe transposed")
    return None


def _name_offset(offset: float) -> Relation:
    return Relation("offset", f"the first run's {'+' if offset > 0 else '-'} {abs(offset):.6g}")


def _name_factor(factor: float, left: float, sizes: Iterable[int]) -> Relation:
    """Names a factor by the sizes that it may come from."""
    if abs(factor + 1) <= max(left, _OF_FACTORS):
        return Relation("sign", "the negative of the first run's")
    names = {2.0: ("2", ""), 0.5: ("1/2", "")}
    for size in (size for size in sizes if size > 1):
        hint = f": {size} is a size here; a sum where the other takes a mean?"
        names |= {
            number: named
            for number, named in {
                float(size): (f"{size}", hint),
                1 / size: (f"1/{size}", hint),
                size**0.5: (f"sqrt({size})", f": {size} is a size here"),
                size**-0.5: (f"1/sqrt({size})", f": {size} is a size here"),
            }.items()
            if number not in names
        }
    for number, (name, hint) in names.items():
        if abs(abs(factor) - number) <= max(left, _OF_FACTORS) * number:
            return Relation("scale", f"{'-' if factor < 0 else ''}{name} x the first run's{hint}")
    digits = max(2, math.ceil(1 - math.log10(left)))
    return Relation("scale", f"{factor:.{digits}g} x the first run's")
