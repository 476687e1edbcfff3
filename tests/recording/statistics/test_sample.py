"""Which elements are in a sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modtrace.recording.statistics.sample import sample_positions


@given(st.integers(0, 2**50), st.integers(1, 300))
def test_positions_are_ascending_distinct_and_one_in_each_part(numel, k):
    positions = sample_positions(numel, k)
    assert positions.dtype == np.int64
    assert len(positions) == min(numel, k)
    assert (np.diff(positions) > 0).all()
    for part, position in enumerate(positions.tolist()):
        assert part * numel // len(positions) <= position < (part + 1) * numel // len(positions)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_all_elements_are_taken_of_a_small_tensor(k):
    for numel in range(k + 1):
        assert sample_positions(numel, k).tolist() == list(range(numel))


def test_positions_are_the_same_for_ever():
    assert sample_positions(1000, 8).tolist() == [113, 143, 367, 455, 543, 733, 770, 924]
    assert sample_positions(2**40, 3).tolist() == [60935876513, 664099730543, 1034248767579]


def test_every_element_of_a_part_can_be_drawn():
    found = {int(position) % 7 for position in sample_positions(7 * 500, 500)}
    assert found == set(range(7))


def test_nothing_is_drawn_from_the_users_generator():
    before = np.random.get_state()[1].copy()
    sample_positions(10_000, 100)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
