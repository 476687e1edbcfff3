"""What a hash and a sketch are, and what is told from them, without torch."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import fingerprint_reference as reference
from modtrace.recording.statistics.fingerprints import (
    CHUNK,
    HASH_SIZE,
    LANES,
    SKETCH_SIZE,
    block_signs,
    block_swaps,
    bucket_and_sign,
    chunk_signs,
    chunk_swap,
    hash_from_bytes,
    hash_to_bytes,
    merge_hashes,
    merge_sketches,
    mix,
    place_chunks,
    sketch_distance,
    sketch_of_ones,
)


def sketch_by_definition(numbers: np.ndarray) -> np.ndarray:
    buckets, signs = bucket_and_sign(np.arange(len(numbers)))
    return np.bincount(buckets, signs * numbers, minlength=SKETCH_SIZE)


def test_sizes_are_those_of_the_columns():
    assert (HASH_SIZE, SKETCH_SIZE) == (8, 64)


@given(st.integers(1, 7), st.integers(0, 2**63 - 1))
def test_mixing_is_that_of_plain_python(tag, number):
    assert int(mix(tag, number)) == reference.mix(tag, number)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**45))
def test_tables_say_what_the_definition_says(place):
    bucket, sign = bucket_and_sign(place)
    chunk, block, lane = place // CHUNK, place // LANES % 4096, place % LANES
    assert int(bucket) == lane ^ int(block_swaps()[block]) ^ int(chunk_swap(chunk))
    negative = int(block_signs()[block]) >> lane & 1 ^ int(chunk_signs(chunk)) >> int(bucket) & 1
    assert int(sign) == 1 - 2 * negative


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 5000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
def test_the_sketch_of_ones_is_that_of_the_definition(count):
    assert sketch_of_ones(count).tolist() == sketch_by_definition(np.ones(count)).tolist()


def test_the_sketch_of_ones_of_a_huge_tensor_takes_no_memory_and_cannot_be_written():
    sketch = sketch_of_ones(3 * 2**32 + 5)
    assert 0 < np.linalg.norm(sketch) < 4 * math.sqrt(3 * 2**32)
    with pytest.raises(ValueError, match="read-only"):
        sketch[0] = 1


def test_the_sketch_of_ones_goes_on_behind_the_chunks_that_are_placed_at_once():
    chunk, swap, negative = sketch_of_ones(CHUNK), int(chunk_swap(0)), int(chunk_signs(0))
    sums = np.empty(LANES)
    for bucket in range(LANES):  # as if the chunk had no place yet
        sums[bucket ^ swap] = -chunk[bucket] if negative >> bucket & 1 else chunk[bucket]
    added = place_chunks(sums, np.arange(4096, 5000)).sum(axis=0)
    assert (sketch_of_ones(5000 * CHUNK) - sketch_of_ones(4096 * CHUNK)).tolist() == added.tolist()
    assert sketch_of_ones(5000 * CHUNK)[:4].tolist() == [-2152.0, 2652.0, -148.0, 740.0]


@given(st.integers(0, 2**64 - 1))
def test_a_hash_comes_back_from_its_bytes(value):
    assert len(hash_to_bytes(value)) == HASH_SIZE
    assert hash_from_bytes(hash_to_bytes(value)) == value


def test_bytes_of_a_hash_are_little_endian():
    assert hash_to_bytes(0x0102) == b"\2\1\0\0\0\0\0\0"


@given(st.lists(st.integers(0, 2**64 - 1), max_size=5), st.randoms())
def test_hashes_merge_in_any_order(hashes, random):
    shuffled = random.sample(hashes, len(hashes))
    assert merge_hashes(shuffled) == merge_hashes(hashes) == sum(hashes) % 2**64


def test_sketches_merge_by_adding():
    one, other = np.arange(64.0), np.full(64, 0.5, np.float32)
    assert merge_sketches([one, other]).tolist() == (one + 0.5).tolist()
    assert merge_sketches([]).tolist() == [0.0] * 64


def test_distance_of_equal_sketches_is_zero():
    sketch = np.arange(64.0)
    assert sketch_distance(sketch, sketch, count=100) == 0
    assert sketch_distance(sketch, sketch, count=100, mean_a=2.5, mean_b=2.5) == 0


def test_distance_is_the_norm_of_the_difference():
    a, b = np.zeros(64), np.zeros(64)
    b[[3, 7]] = 3, -4
    assert sketch_distance(a, b, count=10) == 5
    assert sketch_distance(b.tolist(), a.tolist(), count=10) == 5


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3000), st.floats(-9, 9), st.floats(-9, 9))
def test_with_means_the_distance_of_constants_is_exact(count, low, high):
    a, b = sketch_of_ones(count) * low, sketch_of_ones(count) * high
    found = sketch_distance(a, b, count=count, mean_a=low, mean_b=high)
    assert found == pytest.approx(math.sqrt(count) * abs(high - low), rel=1e-9, abs=1e-12)


def test_with_means_the_constant_part_is_taken_out_of_the_estimate():
    rest = np.zeros(1000)
    rest[[5, 9]] = 3.0, -3.0  # its mean is 0
    a, b = np.zeros(64), sketch_by_definition(rest + 2)
    expected = math.sqrt(1000 * 2**2 + float(np.square(sketch_by_definition(rest)).sum()))
    assert sketch_distance(a, b, count=1000, mean_a=0.0, mean_b=2.0) == pytest.approx(expected)


@pytest.mark.parametrize("mean", [None, math.nan, math.inf])
def test_means_that_are_not_known_correct_nothing(mean):
    a, b = np.zeros(64), np.eye(64)[3] * 2
    assert sketch_distance(a, b, count=10, mean_a=1.0, mean_b=mean) == 2
    assert sketch_distance(a, b, count=10, mean_a=mean, mean_b=1.0) == 2


def test_the_distance_of_what_no_sketch_holds_is_nan():
    huge = np.full(64, math.inf, np.float32)
    with np.errstate(all="raise"):
        assert math.isnan(sketch_distance(huge, huge, count=10))
