"""Alignments of two sequences, as diff makes them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modtrace.analysis.alignment.sequences import align_sequences


def _align(one: str, other: str) -> list[str]:
    left, right = (np.array([ord(each) for each in text], np.int64) for text in (one, other))
    return [f"{one[at]}{at}-{there}" for at, there in align_sequences((left, right)).tolist()]


def test_inserted_and_deleted_elements_have_no_partner() -> None:
    assert _align("abcde", "abxce") == ["a0-0", "b1-1", "c2-3", "e4-4"]


def test_repeated_elements_are_paired_with_those_of_the_same_layer() -> None:
    layers, with_casts = "mrs" * 200, "mcrs" * 200
    left, right = (np.array([ord(each) for each in text], np.int64) for text in (layers, with_casts))
    found = align_sequences((left, right))
    assert len(found) == 600
    assert (found[:, 0] // 3 == found[:, 1] // 4).all()


def test_missing_layer_of_many_leaves_all_others_paired() -> None:
    layer = np.arange(300) % 40
    found = align_sequences((np.tile(layer, 50), np.tile(layer, 49)))
    assert len(found) == 49 * 300


def test_what_the_strict_numbers_leave_is_paired_by_the_next() -> None:
    strict = np.array([1, 2, 3]), np.array([1, 9, 3])
    loose = np.array([5, 6, 7]), np.array([5, 6, 7])
    assert align_sequences(strict).tolist() == [[0, 0], [2, 2]]
    assert align_sequences(strict, loose).tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("kinds", [1, 2, 40])
def test_long_sequences_without_any_order_in_common_are_aligned(kinds: int) -> None:
    """A quadratic alignment of these would not end within the time of a test."""
    random = np.random.default_rng(0)
    one, other = random.integers(0, kinds, 20_000), random.integers(0, kinds, 19_000)
    found = align_sequences((one, other))
    assert (one[found[:, 0]] == other[found[:, 1]]).all()
    assert (np.diff(found, axis=0) > 0).all()


_SEQUENCES = st.lists(st.integers(0, 5), max_size=30)


@given(_SEQUENCES, _SEQUENCES)
def test_pairs_ascend_in_both_and_are_of_equal_elements(one: list[int], other: list[int]) -> None:
    left, right = np.array(one, np.int64), np.array(other, np.int64)
    found = align_sequences((left, right))
    assert (left[found[:, 0]] == right[found[:, 1]]).all()
    assert (np.diff(found, axis=0) > 0).all()


@given(_SEQUENCES)
def test_sequence_is_aligned_with_itself(one: list[int]) -> None:
    numbers = np.array(one, np.int64)
    assert align_sequences((numbers, numbers)).tolist() == [[at, at] for at in range(len(one))]
