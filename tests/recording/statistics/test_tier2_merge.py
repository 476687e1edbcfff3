"""Merged rows of tier 2 say what the whole would have said."""

import math
import random
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tier2_reference import tier2_of, value_rows
from modtrace.recording.statistics.tier2 import Tier2Columns, read_tier2
from modtrace.recording.statistics.tier2_merge import merge_groups, merge_tier2, take

nan, inf = math.nan, math.inf

moderate = st.floats(-1e60, 1e60)
any_number = st.one_of(moderate, st.sampled_from([nan, inf, -inf, 0.0, -0.0, 1e-300, 1e300]))
parts_of_numbers = st.lists(st.lists(any_number, max_size=6), max_size=6)


def tier2_rows(rows, **columns) -> Tier2Columns:
    return read_tier2(value_rows(rows, **columns))


def said(columns: Tier2Columns, row: int = 0) -> dict:
    """What one row says, as plain values."""
    at = columns.histogram_row[row]
    return {
        "count": columns.stats.count[row],
        "min": columns.stats.min[row],
        "max": columns.stats.max[row],
        "sumabs": columns.sumabs[row],
        "zero_count": columns.zero_count[row],
        "sum4": columns.sum4[row],
        "argmax": columns.argmax[row],
        "histogram": None if at < 0 else columns.histogram[at].tolist(),
        "channel_max": columns.channel_max[row].as_py(),
    }


@given(parts_of_numbers.filter(len))
def test_merged_parts_say_what_the_whole_says(parts: list[list[float]]) -> None:
    whole = [number for part in parts for number in part]
    offsets = [0, *accumulate(map(len, parts))][:-1]
    merged, expected = said(merge_tier2(tier2_rows(parts), offsets=offsets)), tier2_of(whole)

    assert merged["count"] == len(whole)
    assert merged["zero_count"] == expected["zero_count"]
    assert merged["histogram"] == expected["histogram"]
    assert merged["argmax"] == (-1 if expected["argmax"] is None else expected["argmax"])
    np.testing.assert_allclose(merged["sumabs"], expected["sumabs"], rtol=1e-15)
    np.testing.assert_allclose(merged["sum4"], expected["sum4"], rtol=1e-14)


@given(parts_of_numbers.filter(len), st.randoms(use_true_random=False))
def test_the_order_of_parts_does_not_matter(parts: list[list[float]], chance: random.Random) -> None:
    offsets = [0, *accumulate(map(len, parts))][:-1]
    order = chance.sample(range(len(parts)), len(parts))
    one = merge_tier2(tier2_rows(parts), offsets=offsets)
    other = merge_tier2(tier2_rows([parts[at] for at in order]), offsets=[offsets[at] for at in order])
    np.testing.assert_equal(said(one), said(other))


def test_without_places_of_the_parts_the_largest_has_none() -> None:
    assert merge_tier2(tier2_rows([[1.0], [5.0]])).argmax.tolist() == [-1]
    assert merge_tier2(tier2_rows([[1.0], [5.0]]), offsets=[10, 20]).argmax.tolist() == [20]
    assert merge_tier2(tier2_rows([[5.0], [1.0, 5.0]]), offsets=[10, 2]).argmax.tolist() == [3]


def test_what_one_part_does_not_have_the_whole_does_not_have() -> None:
    measured, unmeasured = value_rows([[1.0, -2.0, 0.0, 0.0]]), value_rows([[4.0]])
    for name in ("sumabs", "zero_count", "sum4", "argmax", "histogram"):
        at = unmeasured.column_names.index(name)
        unmeasured = unmeasured.set_column(at, unmeasured.field(at), pa.nulls(1, unmeasured.field(at).type))
    merged = merge_tier2(read_tier2(pa.concat_tables([measured, unmeasured])), offsets=[0, 4])
    expected = {"count": 5, "min": -2, "max": 4, "sumabs": nan, "zero_count": -1, "sum4": nan}
    np.testing.assert_equal(said(merged), expected | {"argmax": -1, "histogram": None, "channel_max": None})
    assert np.isnan(merged.mean_abs).all() and np.isnan(merged.quantile(0.5).low).all()


def test_tensors_without_numbers_change_nothing() -> None:
    merged = merge_tier2(tier2_rows([[], [3.0], None]), offsets=[0, 0, 1])
    assert said(merged)["sumabs"] == 3
    assert (merged.argmax.tolist(), merged.mean_abs.tolist(), merged.stats.crest.tolist()) == (
        [0],
        [3.0],
        [1.0],
    )


def test_of_nothing_measured_nothing_is_known() -> None:
    for rows in ([], [None], [None, None]):
        merged = merge_tier2(tier2_rows([[1.0], *rows]), np.arange(1, 1 + len(rows)))
        assert (merged.stats.count.tolist(), merged.zero_count.tolist()) == ([0], [-1])
        assert np.isnan(merged.mean_abs).all()


def test_channel_maxima_are_compared_one_by_one() -> None:
    rows = [[1.0], [2.0], []]
    merged = merge_tier2(tier2_rows(rows, channel_max=[[1.0, nan, 3.0], [2.0, 1.0, 0.5], None]))
    np.testing.assert_equal(said(merged)["channel_max"], [2.0, nan, 3.0])
    others = ([[1.0, 2.0], [2.0], None], [[1.0], None, None], [None, None, [1.0]])
    for channel_max in others:
        assert said(merge_tier2(tier2_rows(rows, channel_max=channel_max)))["channel_max"] is None


@given(st.lists(st.lists(any_number, max_size=4) | st.none(), min_size=1, max_size=8), st.data())
def test_each_group_is_merged_as_if_it_were_alone(
    rows: list[list[float] | None], data: st.DataObject
) -> None:
    columns = tier2_rows(rows, channel_max=[each and [abs(each[0])] for each in rows])
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)), max_size=3)) | {0, len(rows)})
    groups = [np.array(order[start:end]) for start, end in pairwise(cuts)]
    merged = merge_groups(columns, groups)
    assert len(merged.zero_count) == len(groups)
    for at, group in enumerate(groups):
        expected = said(merge_tier2(columns, group) if len(group) > 1 else take(columns, group))
        np.testing.assert_equal(said(merged, at), expected)


def test_groups_of_one_row_are_only_picked() -> None:
    columns = tier2_rows([[1.0], [2.0, 4.0]])
    groups = list(np.tile(np.array([[1], [0]]), (1000, 1)))
    assert merge_groups(columns, groups).mean_abs.tolist() == [3.0, 1.0] * 1000


def test_histograms_of_rows_that_no_group_has_are_not_kept() -> None:
    columns = tier2_rows([[float(number)] for number in range(50)])
    merged = merge_groups(columns, [np.array([3]), np.array([1, 2])])
    assert len(merged.histogram) == 2
    assert merged.mean_abs.tolist() == [3.0, 1.5]


@pytest.mark.parametrize("rows", [slice(None), np.array([0, 1]), slice(0, 2)])
def test_rows_are_given_as_numbers_or_as_a_slice(rows) -> None:
    assert merge_tier2(tier2_rows([[1.0], [3.0]]), rows).mean_abs.tolist() == [2.0]
