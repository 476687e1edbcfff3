"""Defines the hash and the sketch of a tensor, and what can be computed from them.

Both are sums over the elements, with definitions that never change. They are linear, and depend only on an element's
value and its position in the flat tensor, so the values of parts add up.

The hash is a sum of little-endian 32-bit words, each times the weight of its position, modulo 2^64. Equal bytes at
equal positions give equal hashes; other bytes give other hashes, except with a probability of 2^-32 at the worst.

The sketch adds each number, with the sign of its position, to one of 64 buckets (M. Charikar, K. Chen, M.
Farach-Colton, Finding Frequent Items in Data Streams, 2002). The distance of two sketches is about that of the tensors.
"""

from collections.abc import Iterable
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

HASH_SIZE = 8  # bytes
SKETCH_SIZE = 64

LANES = 64  # consecutive elements that form a block
BLOCKS = 4096  # consecutive blocks that form a chunk
CHUNK = LANES * BLOCKS
_BLOCKS_PER_GROUP = 16  # blocks with the same signs of lanes, distributed over the chunk

WORDS = 65536  # words in a row: the weight of a word is that of its position, times the row's

#: A distance below this share of a tensor's norm is mostly rounding of float32 sums, and too large: report "less than
#: that", and let the hashes show whether there is any difference.
SKETCH_FLOOR = 5e-7

#: Differences of means below this share of the distance change its estimate by a thousandth at most.
_LEAST_OF_MEANS = 0.05

Bits = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Sketch = npt.NDArray[np.float64]

#: Tags for `mix`, named after what its bits decide.
BLOCK_ORDER, BLOCK_SIGN, LANE_SIGNS, CHUNK_SIGNS, CHUNK_SWAP, WORD_WEIGHT, ROW_WEIGHT = range(1, 8)
MIX_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix(tag: int, numbers: npt.ArrayLike) -> Bits:
    """Returns 64 pseudo-random bits for each number; those for different tags are independent.

    It is the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, Fast Splittable Pseudorandom Number Generators,
    2014).
    """
    first, second, third = map(np.uint64, MIX_FACTORS)
    with np.errstate(over="ignore"):  # it computes modulo 2^64, of which numpy warns for single numbers
        bits = np.asarray(numbers).astype(np.uint64) * first + np.uint64(mix_start(tag))
        bits = (bits ^ bits >> np.uint64(30)) * second
        bits = (bits ^ bits >> np.uint64(27)) * third
    return np.asarray(bits ^ bits >> np.uint64(31))


def mix_start(tag: int) -> int:
    """Returns the start value of `mix` for a tag."""
    return (tag * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2**64


def bucket_and_sign(places: npt.ArrayLike) -> tuple[Integers, Integers]:
    """Returns the bucket (of 64) to which each element is added in a sketch, and the sign of the element.

    This function is the definition; all others compute the same faster.

    Args:
        places: indices into the flat tensor, in row-major order.
    """
    place = np.asarray(places, np.int64)
    chunk, block, lane = place // CHUNK, place // LANES % BLOCKS, place % LANES
    group = block_groups()[block]
    bucket = lane ^ group % LANES ^ chunk_swap(chunk)
    signs = mix(BLOCK_SIGN, block) ^ _bit(mix(LANE_SIGNS, group), lane) ^ _bit(chunk_signs(chunk), bucket)
    return bucket, 1 - 2 * (signs & np.uint64(1)).astype(np.int64)


def hash_weight(places: npt.ArrayLike) -> Bits:
    """Returns the factors of the words in the sum that makes the hash; this function is the definition.

    Words are signed 32-bit integers, little-endian: two for an element of 8 bytes, one for 2 elements of 2 bytes or 4
    of 1.

    Args:
        places: indices of words in the flat tensor.
    """
    place = np.asarray(places, np.int64)
    with np.errstate(over="ignore"):
        return np.asarray(word_weights()[place % WORDS] * row_weight(place // WORDS))


def merge_hashes(hashes: Iterable[int]) -> int:
    """Returns the hash of a tensor from those of its parts in any order, each computed at the part's offset."""
    return sum(hashes) % 2**64


def merge_sketches(sketches: Iterable[npt.ArrayLike]) -> Sketch:
    """Returns the sketch of a tensor from those of its parts, each computed at the part's offset."""
    return sum((np.asarray(sketch, np.float64) for sketch in sketches), np.zeros(SKETCH_SIZE))


def hash_to_bytes(value: int) -> bytes:
    """Returns a hash as bytes, as the `values` table holds it."""
    return value.to_bytes(HASH_SIZE, "little")


def hash_from_bytes(content: bytes) -> int:
    """Returns a hash from its bytes in the `values` table."""
    return int.from_bytes(content, "little")


def sketch_distance(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    *,
    count: int,
    mean_a: float | None = None,
    mean_b: float | None = None,
) -> float:
    """Estimates the L2 distance of two tensors of one shape, mostly within a factor of 1.2 (docs/fingerprints.md).

    The means, if given, improve the estimate, and make it exact if the tensors differ by a constant. The distance is
    NaN if a sketch has NaN or infinities. A distance below `SKETCH_FLOOR` times the norm of the tensors is noise.

    Args:
        a: the sketch of one tensor, computed at offset 0.
        b: the sketch of the other tensor.
        count: how many numbers each tensor has; a complex element is two.
        mean_a: the mean of the first tensor's numbers; None if it is not finite.
        mean_b: the mean of the second tensor's numbers, likewise.
    """
    gap = 0.0 if mean_a is None or mean_b is None else mean_b - mean_a
    one, other = (np.asarray(sketch, np.float64)[None] for sketch in (a, b))
    return float(sketch_distances(one, other, np.array([count]), np.array([gap]))[0])


def sketch_distances(a: Sketch, b: Sketch, counts: Integers, gaps: Sketch) -> Sketch:
    """Estimates the L2 distances of many pairs of tensors; see `sketch_distance`.

    Args:
        a: the sketches of the first tensors, one a row.
        b: the sketches of the second tensors.
        counts: how many numbers each tensor has.
        gaps: how much larger the means of the second tensors are; not finite where unknown.
    """
    with np.errstate(all="ignore"):
        apart = b - a
        distances: Sketch = np.linalg.norm(apart, axis=1)
        of_means = np.sqrt(counts) * np.abs(gaps)
        gives_more = np.isfinite(gaps) & (of_means > _LEAST_OF_MEANS * distances)
        for count in np.unique(counts[gives_more]).tolist():
            rows = np.flatnonzero(gives_more & (counts == count))
            rest = apart[rows] - gaps[rows, None] * sketch_of_ones(count)
            distances[rows] = np.hypot(of_means[rows], np.linalg.norm(rest, axis=1))
    return distances


@lru_cache(1024)
def sketch_of_ones(count: int) -> Sketch:
    """Returns the sketch of `count` ones, which is the same for every tensor of that size. The array is read-only."""
    whole, rest = divmod(count, CHUNK)
    total = np.zeros(SKETCH_SIZE)
    sums = _sums_of_ones(BLOCKS * LANES)
    for start in range(0, whole, BLOCKS):  # taking a bounded number of chunks at a time bounds the memory
        total += place_chunks(sums, np.arange(start, min(start + BLOCKS, whole))).sum(axis=0)
    if rest:
        total += place_chunks(_sums_of_ones(rest), np.array([whole]))[0]
    total.setflags(write=False)
    return total


def _sums_of_ones(count: int) -> Sketch:
    numbers = np.zeros((BLOCKS, LANES), np.int64)
    numbers.reshape(-1)[:count] = 1
    rows = np.zeros((LANES, LANES), np.int64)
    np.add.at(rows, block_swaps(), numbers * signs_of_lanes())
    return fold_rows(rows.astype(np.float64))


# The definition as tables. A number in lane l of block q is added, with its sign, at position l of row
# `block_swaps()[q]`. These rows are folded into 64 sums for the chunk, to which the chunk's signs and buckets are
# applied.


@cache
def block_groups() -> Integers:
    """Returns the group of each block of a chunk. 16 blocks belong to each of 256 groups, in a pseudo-random order."""
    keys = mix(BLOCK_ORDER, np.arange(BLOCKS)) >> np.uint64(1) & np.uint64(2**62 - 1)
    groups = np.empty(BLOCKS, np.int64)
    groups[np.argsort(keys, stable=True)] = np.arange(BLOCKS) // _BLOCKS_PER_GROUP
    return groups


@cache
def block_swaps() -> npt.NDArray[np.uint8]:
    """Returns the number that swaps the lanes of each block of a chunk: lane l is added to bucket `l ^ swap`."""
    return (block_groups() % LANES).astype(np.uint8)


@cache
def block_signs() -> Bits:
    """Returns the signs of the lanes of each block of a chunk: bit l is 1 if lane l is negative."""
    flipped = mix(BLOCK_SIGN, np.arange(BLOCKS)) & np.uint64(1)
    signs: Bits = mix(LANE_SIGNS, block_groups()) ^ flipped * np.uint64(2**64 - 1)
    return signs


def signs_of_lanes() -> Integers:
    """Returns the signs of the lanes of each block as +1 and -1: `[4096, 64]`."""
    return 1 - 2 * _bit(block_signs()[:, None], np.arange(LANES)).astype(np.int64)


def chunk_signs(chunks: npt.ArrayLike) -> Bits:
    """Returns the signs of the buckets in each of the given chunks: bit b is 1 if bucket b is negative."""
    return mix(CHUNK_SIGNS, chunks)


def chunk_swap(chunks: npt.ArrayLike) -> Integers:
    """Returns the number that swaps the buckets of each chunk."""
    swaps: Integers = (mix(CHUNK_SWAP, chunks) % np.uint64(LANES)).astype(np.int64)
    return swaps


def fold_rows(rows: npt.NDArray[np.floating]) -> Sketch:
    """Returns the 64 sums of a chunk from its 64 rows: element l of row h is added to sum `l ^ h`."""
    lanes = np.arange(LANES)
    sums: Sketch = rows[lanes[:, None], lanes ^ lanes[:, None]].sum(axis=0, dtype=np.float64)
    return sums


def place_chunks(sums: Sketch, chunks: Integers) -> Sketch:
    """Returns the contribution of a chunk's 64 sums to the sketch, for each of several chunks: `[len(chunks), 64]`."""
    lanes = np.arange(LANES)
    negative = _bit(chunk_signs(chunks)[:, None], lanes).astype(bool)
    placed: Sketch = sums[lanes ^ chunk_swap(chunks)[:, None]]
    placed[negative] *= -1
    return placed


@cache
def word_weights() -> Bits:
    """Returns the weights of the positions in a row of words."""
    weights: Bits = mix(WORD_WEIGHT, np.arange(WORDS)) | np.uint64(1)
    return weights


def row_weight(rows: npt.ArrayLike) -> Bits:
    """Returns the weights of rows of words."""
    weights: Bits = mix(ROW_WEIGHT, rows) | np.uint64(1)
    return weights


def _bit(bits: Bits, at: npt.ArrayLike) -> Bits:
    return np.asarray(bits >> np.asarray(at).astype(np.uint64) & np.uint64(1))
