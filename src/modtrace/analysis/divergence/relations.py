"""Finds a simple relation between two unequal tensors: a factor, an offset, another order, a mask."""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ...errors import RecordingError
from ...recording.statistics.fingerprints import sketch_of_ones
from ...recording.statistics.moments import Numbers, Stats
from ...recording.statistics.number_formats import to_float64
from ..tables.columns import Rows
from ..tables.measured import ComparedRows
from .tensor_metrics import distances, norm_of

#: A relation may leave this share of a tensor, or this multiple of the noise, unexplained.
_LEFT = 1e-5
_OF_NOISE = 4.0

#: The difference of two tensors must be at least this multiple of what a relation leaves unexplained.
_EXPLAINS = 5.0

#: The largest relative difference between a factor and the simple number by which it is named.
_OF_FACTORS = 1e-4

#: The largest number of rows by which a tensor is tested for a shift.
_MOST_ROWS = 2

#: The largest number of elements of a tensor that is tested for another order.
_LARGEST = 2**24


class Relation(NamedTuple):
    """How the second tensor follows from the first."""

    kind: str  # scale, sign, offset, masked, shifted, transposed, permuted, reordered, stale
    text: str  # an expression before the name of the first tensor: `1/8 x`, `the negative of`


def find_relation(
    a: ComparedRows, b: ComparedRows, pair: int, error: float, noise: float, sizes: Iterable[int]
) -> Relation | None:
    """Returns the relation of two tensors; None if none of the known relations explains their difference.

    Of a tensor that is in parts in one recording, as by micro-batches, all parts together are taken.

    Args:
        a: the measurements of one recording.
        b: the measurements of as many rows of another.
        pair: the position of the two tensors among these rows.
        error: the error of the two tensors.
        noise: the part of the error that is noise.
        sizes: sizes of axes by which a factor may be named, besides those of the tensor.
    """
    left = max(_LEFT, _OF_NOISE * noise)
    dtypes = a.dtypes[a.dtype[pair]], b.dtypes[b.dtype[pair]]
    at, at_b = _find_parts(a, b, pair)
    numel, parts = int(a.numel[at].sum()), max(len(at), len(at_b))
    if (
        not error > _EXPLAINS * left
        or numel != b.numel[at_b].sum()
        or numel < 2
        or "complex" in "".join(dtypes)
    ):
        return None
    sizes = dict.fromkeys([*a.shape(pair), numel, *sizes])
    if parts == 1 and a.has_tensor[pair] and b.has_tensor[pair]:
        with suppress(RecordingError):
            first, second = to_float64(a.tensor(pair)), to_float64(b.tensor(pair))
            if (
                first is not None
                and second is not None
                and np.isfinite(first).all()
                and np.isfinite(second).all()
            ):
                return _relate_tensors(first, second, left, sizes)
    if not (a.is_measured[at].all() and b.is_measured[at_b].all()):
        return None
    has_sketches = parts == 1 and a.has_sketch[pair] and b.has_sketch[pair]
    sketches = (a.sketches(at)[0], b.sketches(at_b)[0], sketch_of_ones(numel)) if has_sketches else None
    return _relate_statistics(a.stats.merge(at), b.stats.merge(at_b), sketches, left, sizes, parts)


def _find_parts(a: ComparedRows, b: ComparedRows, pair: int) -> tuple[Rows, Rows]:
    """Returns the positions of what a pair is a part of in each recording; only its own if it is no part."""
    own = np.array([pair])
    in_a, in_b = np.flatnonzero(b.rows == b.rows[pair]), np.flatnonzero(a.rows == a.rows[pair])
    if a.numel[pair] > b.numel[pair]:
        return own, in_b
    return (in_a, own) if a.numel[pair] < b.numel[pair] else (own, own)


# Relations that need whole tensors.


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
    for kept, masked, run in ((a, b, "the second run"), (b, a, "the first run")):
        is_masked = (masked == 0) & (kept != 0)
        if is_masked.any() and not is_masked[kept != 0].all() and norm_of((b - a)[~is_masked]) <= most:
            text = f"equal but for {is_masked.mean():.0%} of the elements, which {run} has as 0"
            return Relation("masked", text)
    return next(_find_orders(a, b, most), None) if a.size <= _LARGEST else None


def _find_orders(a: Numbers, b: Numbers, most: float) -> Iterator[Relation]:
    for axis, size in enumerate(a.shape):
        for rows in range(1, min(_MOST_ROWS, size // 4) + 1):  # enough rows must remain
            for before, behind, by in ((a, b, rows), (b, a, -rows)):
                ahead = np.take(before, range(size - rows), axis)
                if norm_of(np.take(behind, range(rows, size), axis) - ahead) <= most and norm_of(ahead):
                    yield Relation("shifted", f"the first run's, shifted by {by} along axis {axis}")
    for axis, axis_b in combinations(range(a.ndim), 2):
        is_turned = min(a.shape[axis], a.shape[axis_b]) > 1
        if is_turned and norm_of(distances(a.swapaxes(axis, axis_b).reshape(a.shape), b)) <= most:
            yield Relation("transposed", f"the first run's with axes {axis} and {axis_b} exchanged")
    for axis in range(a.ndim):
        if a.ndim > 1 and np.array_equal(_sort_rows(a, axis), _sort_rows(b, axis)):
            yield Relation("permuted", f"the first run's in another order along axis {axis}")
    if norm_of(np.sort(a, axis=None) - np.sort(b, axis=None)) <= most:
        yield Relation("reordered", "the same numbers as the first run's in another order")


def _sort_rows(numbers: Numbers, axis: int) -> Numbers:
    rows = np.moveaxis(numbers, axis, 0).reshape(numbers.shape[axis], -1)
    return rows[np.lexsort(rows.T[:64])]


# Relations that statistics and sketches can show, where whole tensors are missing.


def _relate_statistics(
    stats: Stats,
    stats_b: Stats,
    sketches: tuple[Numbers, Numbers, Numbers] | None,
    left: float,
    sizes: Iterable[int],
    parts: int,
) -> Relation | None:
    """Returns the relation of two tensors; `sketches` are theirs and that of as many ones."""
    first, second = (np.array([of.min, of.max, of.mean, of.rms], np.float64) for of in (stats, stats_b))
    if not (np.isfinite(first).all() and np.isfinite(second).all()) or not first[3] or first[0] == first[1]:
        return None
    size = max(np.abs(first[:2]).max(), np.abs(second[:2]).max())

    def is_explained(expected: Numbers, factor: float, offset: float) -> bool:
        if np.abs(second - expected).max() > left * size:
            return False
        if sketches is None:
            return True
        sketch, sketch_b, ones = sketches
        related = factor * sketch + offset * ones
        return float(np.linalg.norm(sketch_b - related)) <= left * max(norm_of(sketch_b), norm_of(related))

    ratio = float(second[3] / first[3])
    if is_explained(ratio * first, ratio, 0.0) and abs(ratio - 1) > left:
        return _name_factor(ratio, left, sizes, parts)
    if is_explained(ratio * np.array([-first[1], -first[0], -first[2], first[3]]), -ratio, 0.0):
        return _name_factor(-ratio, left, sizes, parts)
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


def _name_factor(factor: float, left: float, sizes: Iterable[int], parts: int = 1) -> Relation:
    """Returns a factor as a relation, named by the size or the number of parts from which it may come."""
    if abs(factor + 1) <= max(left, _OF_FACTORS):
        return Relation("sign", "the negative of the first run's")
    asks = f": {parts} is the number of its parts; a sum where the other takes a mean?"
    names = {float(parts): (f"{parts}", asks), 1 / parts: (f"1/{parts}", asks)} if parts > 1 else {}
    names |= {number: (name, "") for number, name in ((2.0, "2"), (0.5, "1/2")) if number not in names}
    for size in (size for size in sizes if size > 1):
        hint = f": {size} is a size here"
        asks = f"{hint}; a sum where the other takes a mean?"
        names.setdefault(float(size), (f"{size}", asks))
        names.setdefault(1 / size, (f"1/{size}", asks))
        names.setdefault(size**0.5, (f"sqrt({size})", hint))
        names.setdefault(size**-0.5, (f"1/sqrt({size})", hint))
    for number, (name, hint) in names.items():
        if abs(abs(factor) - number) <= max(left, _OF_FACTORS) * number:
            return Relation("scale", f"{'-' if factor < 0 else ''}{name} x the first run's{hint}")
    digits = max(2, math.ceil(1 - math.log10(left)))
    return Relation("scale", f"{factor:.{digits}g} x the first run's")
