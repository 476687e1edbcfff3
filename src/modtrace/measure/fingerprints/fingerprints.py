"""Computes the hash and the sketch of numbers in CPU memory, as recording/statistics/fingerprints.py defines them.

`array` always has raw elements, as `memory.logical_array` returns them, of any shape and strides; complex numbers have
a last axis of two parts. Elements are taken in row-major order, whatever the strides.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...recording.statistics import fingerprints as definition
from ...recording.statistics.fingerprints import SKETCH_SIZE, Sketch, fold_rows, place_chunks
from ..blocks import pieces_of
from ..dtypes import CHUNK, Floats, Format, Raw, address_of, kind_of, kind_of_floats, to_floats

try:
    from ._fingerprint import fingerprint as compiled
except ImportError:  # numpy takes 10 to 30 times as long, and gives the same hashes
    compiled = None  # type: ignore[assignment]


class Shard(NamedTuple):
    """The position of a block in a larger tensor. Hashes and sketches of blocks that cover it add up to its own."""

    global_shape: Sequence[int]  # both without the axis of parts
    starts: Sequence[int]


class Fingerprint(NamedTuple):
    """A hash and a sketch, computed in one pass."""

    hash: int
    sketch: Sketch


def fingerprint_array(
    array: Raw, form: Format | None, offset: int = 0, *, shard: Shard | None = None, is_hashed: bool = True
) -> Fingerprint:
    """Returns the hash and the sketch of all elements, in little more time than the slower of them.

    The hash is 0 if there are no elements, or if all bytes are 0. The sketch is 64 float64. Non-finite elements count
    as 0 in it. At most 64 numbers are added up in float32; float64 is used if a float32 would overflow or the numbers
    are float64. Sums beyond float64 make the sketch infinite or NaN.

    Args:
        array: raw elements.
        form: their format; None for no sketch, which is 0 then.
        offset: the index of its first element in a larger flat tensor, in raw elements (parts, for complex numbers).
        shard: its position in a larger tensor that is not flat; `offset` is added.
        is_hashed: False for no hash, which is 0 then.
    """
    runs = _runs_of(array, offset, shard)
    if not array.size:
        return Fingerprint(0, np.zeros(SKETCH_SIZE))
    kind = None if form is None else kind_of(form)
    if compiled is not None and (form is None or kind is not None):
        return _take_compiled(array, runs, kind, is_hashed)
    hashed = _hash(array, runs) if is_hashed else 0
    return Fingerprint(hashed, _NO_SKETCH if form is None else _sketch_in_pieces(array, form, runs))


class _Runs(NamedTuple):
    """The positions of elements in memory and in the flat tensor, as nested loops.

    The innermost loop is over neighbours in the flat tensor.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in memory, in bytes
    steps: tuple[int, ...]  # in the flat tensor, in raw elements; the last one is 1
    first: int

    @property
    def is_whole(self) -> bool:
        """True if the elements are consecutive in the flat tensor."""
        return self.steps == steps_in(self.sizes)


class _Dimension(NamedTuple):
    size: int
    stride: int
    step: int


def _runs_of(array: Raw, offset: int, shard: Shard | None) -> _Runs:
    """Returns the fewest loops that visit the elements in row-major order.

    Raises:
        ValueError: the array does not fit into the larger tensor of `shard`.
    """
    item = array.itemsize
    if shard is None and array.flags.c_contiguous:
        return _Runs((array.size,), (item,), (1,), offset)
    shape, steps = array.shape, steps_in(array.shape)
    if shard is not None:
        steps, start = place_of(shape, shard)
        offset += start
    dims: list[_Dimension] = []
    for dim in map(_Dimension, shape, array.strides, steps):
        if dim.size == 1:
            continue
        outer = dims[-1] if dims else None
        if outer and (outer.stride, outer.step) == (dim.stride * dim.size, dim.step * dim.size):
            dims[-1] = _Dimension(outer.size * dim.size, dim.stride, dim.step)
        else:
            dims.append(dim)
    if not dims or dims[-1].step != 1:
        dims.append(_Dimension(1, item, 1))
    sizes, strides, runs_steps = zip(*dims, strict=True)
    return _Runs(sizes, strides, runs_steps, offset)


def steps_in(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns, for each dimension, the distance of neighbours in the flat tensor."""
    return tuple(accumulate(shape[:0:-1], int.__mul__, initial=1))[::-1] if shape else ()


def place_of(shape: Sequence[int], shard: Shard) -> tuple[tuple[int, ...], int]:
    """Returns the steps of a block's dimensions in the larger tensor, and the index of its first element."""
    whole, starts = tuple(shard.global_shape), tuple(shard.starts)
    if len(shape) == len(whole) + 1 and shape[-1] == 2:
        whole, starts = (*whole, shape[-1]), (*starts, 0)  # complex: the axis of parts
    inside = len(shape) == len(whole) == len(starts) and all(
        0 <= start <= limit - size for start, size, limit in zip(starts, shape, whole, strict=True)
    )
    if not inside:
        raise ValueError(
            f"a block of shape {tuple(shape)!r} at {starts!r} does not lie inside of {whole!r}: "
            f"give the place of its first element, and the shape of the tensor that it is of"
        )
    steps = steps_in(whole)
    return steps, sum(start * step for start, step in zip(starts, steps, strict=True))


_NO_SKETCH = np.zeros(SKETCH_SIZE)
_NO_SKETCH.setflags(write=False)


def _take_compiled(array: Raw, runs: _Runs, kind: int | None, is_hashed: bool) -> Fingerprint:
    """Computes a fingerprint by the compiled kernel.

    Args:
        array: raw elements.
        runs: their positions.
        kind: the kind of the numbers for the sketch; None for no sketch.
        is_hashed: whether the hash is computed.
    """
    tables = _tables()
    sketch = _NO_SKETCH if kind is None else np.empty(SKETCH_SIZE)
    hashed = compiled(
        address_of(array),
        runs.sizes,
        runs.strides,
        runs.steps,
        runs.first,
        array.itemsize,
        -1 if kind is None else kind,
        tables.weights if is_hashed else 0,
        tables.signs,
        tables.swaps,
        0 if kind is None else address_of(sketch),
    )
    return Fingerprint(hashed, sketch)


class _Tables(NamedTuple):
    """The arrays that the compiled kernel looks up, and their addresses."""

    weights: int
    signs: int
    swaps: int
    arrays: tuple[Raw, ...]


@cache
def _tables() -> _Tables:
    weights = definition.word_weights()
    low = weights.astype(np.uint32).view(np.int32)
    high = (weights - low.astype(np.int64).view(np.uint64)) >> np.uint64(32)
    halves = np.stack([low, high.astype(np.uint32).view(np.int32)])
    arrays = (halves, definition.block_signs(), definition.block_swaps())
    weights_at, signs_at, swaps_at = map(address_of, arrays)
    return _Tables(weights_at, signs_at, swaps_at, arrays)


# For what the compiled kernel does not support, and for everything if it is missing.


def _pieces(array: Raw, runs: _Runs) -> Iterator[tuple[int, Raw]]:
    """Yields the elements in row-major order, at most CHUNK consecutive ones at a time, with the index of the first."""
    place = runs.first
    if not runs.is_whole:
        blocks = np.lib.stride_tricks.as_strided(array, runs.sizes, runs.strides, writeable=False)
        for outer in np.ndindex(runs.sizes[:-1]):
            start = place + sum(at * step for at, step in zip(outer, runs.steps[:-1], strict=True))
            for at in range(0, runs.sizes[-1], CHUNK):
                yield start + at, np.ascontiguousarray(blocks[outer][at : at + CHUNK])
        return
    for piece in pieces_of(array, "C"):
        yield place, piece
        place += len(piece)


def _hash(array: Raw, runs: _Runs) -> int:
    if compiled is not None:
        return _take_compiled(array, runs, None, True).hash
    return sum(_hash_piece(piece, place) for place, piece in _pieces(array, runs)) % 2**64


def _hash_piece(piece: Raw, place: int) -> int:
    content = np.asarray(piece, piece.dtype.newbyteorder("<")).view(np.uint8)
    word, lead = divmod(place * piece.itemsize, 4)
    if lead or len(content) % 4:
        content = np.pad(content, (lead, -(lead + len(content)) % 4))
    words = content.view("<i4").astype(np.int64).view(np.uint64)
    total = 0
    while len(words):
        row, at = divmod(word, definition.WORDS)
        some = words[: definition.WORDS - at]
        products = some * definition.word_weights()[at : at + len(some)]
        total += int(np.add.reduce(products)) * int(definition.row_weight(row))
        word, words = word + len(some), words[len(some) :]
    return total


def _sketch_in_pieces(array: Raw, form: Format, runs: _Runs) -> Sketch:
    with np.errstate(all="ignore"):  # the user's error handler does not receive our overflows
        sketch = _sum_pieces(array, form, runs, is_careful=False)
        return sketch if np.isfinite(sketch).all() else _sum_pieces(array, form, runs, is_careful=True)


def _sum_pieces(array: Raw, form: Format, runs: _Runs, *, is_careful: bool) -> Sketch:
    total = np.zeros(SKETCH_SIZE)
    for place, piece in _pieces(array, runs):
        numbers = to_floats(piece, form)
        if is_careful:
            numbers = np.where(np.isfinite(numbers), numbers.astype(np.float64), 0)
        if compiled is None:
            total += _sketch_piece(numbers, place)
        else:
            run = _Runs((len(numbers),), (numbers.itemsize,), (1,), place)
            total += _take_compiled(numbers, run, kind_of_floats(numbers), False).sketch
    return total


def _sketch_piece(numbers: Floats, place: int) -> Sketch:
    total = np.zeros(SKETCH_SIZE)
    lanes = definition.LANES
    while len(numbers):
        chunk, at = divmod(place, definition.CHUNK)
        some = numbers[: definition.CHUNK - at]
        padded = np.pad(some, (at % lanes, -(at + len(some)) % lanes)).reshape(-1, lanes)
        blocks = slice(at // lanes, at // lanes + len(padded))
        folded = fold_rows(_rows_of(padded * _signs(padded.dtype)[blocks], definition.block_swaps()[blocks]))
        total += place_chunks(folded, np.array([chunk]))[0]
        place, numbers = place + len(some), numbers[len(some) :]
    return total


def _rows_of(blocks: Floats, swaps: npt.NDArray[np.uint8]) -> Floats:
    """Returns the 64 rows that blocks are added to. It uses no matmul, which would start threads of the BLAS."""
    order = np.argsort(swaps, kind="stable")
    present, starts = np.unique(swaps[order], return_index=True)
    rows = np.zeros((definition.LANES, definition.LANES), blocks.dtype)
    rows[present] = np.add.reduceat(blocks[order], starts, axis=0)
    return rows


@cache
def _signs(dtype: npt.DTypeLike) -> Floats:
    return definition.signs_of_lanes().astype(dtype)
