"""What is asked of raw statistics: how they merge, and what is derived from them."""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from builders import raw_statistics
from modtrace.recording.arrow.batches import to_batch
from modtrace.recording.schema import schema
from modtrace.recording.statistics.moments import (
    Stats,
    merge,
    nonfinite_rows,
    read_statistics,
)

nan, inf = math.nan, math.inf

moderate = st.floats(-1e100, 1e100)
any_number = st.one_of(moderate, st.sampled_from([nan, inf, -inf]))
split_numbers = st.lists(st.lists(any_number, max_size=5), max_size=6)
split_moderate_numbers = st.lists(st.lists(moderate, max_size=5), max_size=6)
raw_stats = st.builds(
    lambda numbers, sums: measure(numbers, **sums),
    st.lists(any_number, max_size=4),
    st.fixed_dictionaries({}, optional={"sum": st.floats(), "sumsq": st.floats(min_value=0)}),
)


def measure(numbers: Sequence[float], **raw: Any) -> Stats:
    """The statistics of these numbers, computed in float64."""
    return Stats(**(raw_statistics(numbers) | raw))


def is_same(one: float | None, other: float | None) -> bool:
    return one == other or (one != one and other != other)


def stat_rows(*rows: tuple[int, int, int, int]) -> pa.RecordBatch:
    step, order, nan_count, inf_count = zip(*rows, strict=True)
    columns = {"step": step, "order": order, "nan_count": nan_count, "inf_count": inf_count}
    return to_batch("values", columns)


@given(split_numbers)
def test_merged_parts_are_the_whole(parts: list[list[float]]) -> None:
    numbers = [number for part in parts for number in part]
    merged, whole = merge(measure(part) for part in parts), measure(numbers)

    assert (merged.count, merged.nan_count, merged.inf_count) == (
        whole.count,
        whole.nan_count,
        whole.inf_count,
    )
    assert is_same(merged.min, whole.min) and is_same(merged.max, whole.max)
    if not whole.nonfinite:
        assert merged.sum == pytest.approx(whole.sum, abs=1e-12 * sum(map(abs, numbers)))
        assert merged.sumsq == pytest.approx(whole.sumsq, rel=1e-12, abs=0)
    else:
        assert not math.isfinite(merged.sum) and not math.isfinite(merged.sumsq)


@given(st.lists(raw_stats, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_merging_does_not_matter(many: list[Stats], chance: random.Random) -> None:
    shuffled = chance.sample(many, len(many))
    one, other = merge(many), merge(shuffled)
    for name in ("count", "min", "max", "sum", "sumsq", "nan_count", "inf_count"):
        assert is_same(getattr(one, name), getattr(other, name)), name


@given(split_moderate_numbers, st.data())
def test_the_grouping_does_not_matter(parts: list[list[float]], data: st.DataObject) -> None:
    many = [measure(part) for part in parts]
    cut = data.draw(st.integers(0, len(many)))
    grouped = merge([merge(many[:cut]), merge([merge(many[cut:]), merge([])])])
    at_once = merge(many)
    magnitude = sum(abs(each.sum) for each in many)

    assert (grouped.count, grouped.min, grouped.max) == (at_once.count, at_once.min, at_once.max)
    assert grouped.sum == pytest.approx(at_once.sum, rel=0, abs=1e-12 * magnitude)
    assert grouped.sumsq == pytest.approx(at_once.sumsq, rel=1e-12, abs=0)


@given(st.lists(moderate, min_size=2, max_size=30))
def test_derived_statistics_are_those_of_a_float64_reference(numbers: list[float]) -> None:
    found, array = measure(numbers), np.array(numbers)
    largest = float(np.abs(array).max())

    assert found.mean == pytest.approx(array.mean(), abs=1e-12 * largest)
    assert found.abs_max == largest
    assert found.nonfinite == 0
    if largest == 0 or largest > 1e-100:  # squares of smaller numbers are rounded to nothing
        assert found.rms == pytest.approx(math.sqrt(np.square(array).mean()), rel=1e-12, abs=0)
        assert found.l2 == pytest.approx(np.linalg.norm(array), rel=1e-12, abs=0)
        # sumsq / n - mean**2 cancels to the square root of the precision
        assert found.std == pytest.approx(array.std(ddof=1), abs=1e-7 * largest)


@given(st.floats(-1e6, 1e6), st.lists(st.floats(-1e-6, 1e-6), min_size=2, max_size=30))
def test_standard_deviation_of_nearly_constant_numbers_keeps_its_size(
    offset: float, noise: list[float]
) -> None:
    array = offset + np.array(noise)
    wrong = measure(array.tolist(), sumsq=float(np.square(array).sum()) * (1 + 1e-6))  # a kernel's own error
    extent = float(array.max() - array.min())
    assume(extent == 0 or extent > 1e-100)  # squares of smaller numbers are rounded to nothing

    assert wrong.std <= extent * 0.7072
    assert wrong.std >= extent / math.sqrt(2 * len(noise)) * 0.999


@pytest.mark.parametrize("number", [0.1, 1e6 + 0.1, -3e-9, 0.0, 1e300])
@pytest.mark.parametrize("count", [2, 3, 1000])
def test_constant_numbers_have_a_standard_deviation_of_exactly_0(number: float, count: int) -> None:
    assert measure([number] * count).std == 0


def test_standard_deviation_is_corrected_as_that_of_torch() -> None:
    assert measure([1.0, 2.0, 3.0, 4.0]).std == pytest.approx(1.2909944487358056)
    assert measure([1.0, 2.0]).std == pytest.approx(math.sqrt(0.5))
    assert math.isnan(measure([1.0]).std)
    assert math.isnan(measure([]).std)


def test_no_numbers_have_no_mean() -> None:
    empty = measure([])
    assert (empty.count, empty.min, empty.max) == (0, None, None)
    assert math.isnan(empty.mean) and math.isnan(empty.rms) and math.isnan(empty.abs_max)
    assert empty.l2 == 0


def test_merging_nothing_gives_no_numbers() -> None:
    assert merge([]) == Stats()
    assert merge([Stats(), measure([])]) == Stats()


def test_empty_tensors_change_nothing() -> None:
    assert merge([measure([]), measure([2.0, -3.0]), Stats()]) == measure([2.0, -3.0])


def test_nan_and_infinities_pass_through() -> None:
    assert merge([measure([1.0]), measure([inf])]) == Stats(
        count=2, min=1.0, max=inf, sum=inf, sumsq=inf, inf_count=1
    )
    both = merge([measure([inf]), measure([-inf])])
    assert (both.min, both.max, both.sumsq, both.inf_count) == (-inf, inf, inf, 2)
    assert math.isnan(both.sum) and math.isnan(both.mean) and math.isnan(both.std)
    poisoned = merge([measure([1.0, 2.0]), measure([nan])])
    assert (poisoned.count, poisoned.nan_count, poisoned.nonfinite) == (3, 1, 1)
    for name in ("min", "max", "sum", "sumsq", "mean", "rms", "std", "abs_max"):
        assert math.isnan(getattr(poisoned, name)), name


def test_sums_that_overflow_on_the_way_are_right_in_every_order() -> None:
    large = [Stats(count=1, min=0, max=0, sum=each) for each in (1.7e308, 1.7e308, -1.7e308, -1.7e308, 1.0)]
    for at in range(5):
        assert merge(large[at:] + large[:at]).sum == 1.0
    assert merge(large[:2]).sum == inf
    assert merge(large[2:4]).sum == -inf


def test_standard_deviation_without_sums_is_not_known() -> None:
    assert math.isnan(Stats(count=3, min=-1e200, max=1e200, sum=0.0, sumsq=inf).std)


def test_columns_are_read_from_rows_with_nulls() -> None:
    rows = [raw_statistics(None), raw_statistics([]), raw_statistics([3.0, -4.0])]
    batch = to_batch("values", {name: [row[name] for row in rows] for name in rows[0]})
    columns = read_statistics(pa.Table.from_batches([batch]))

    assert columns.count.tolist() == [0, 0, 2]
    np.testing.assert_array_equal(columns.l2, [nan, 0, 5])
    np.testing.assert_array_equal(columns.mean, [nan, nan, -0.5])
    np.testing.assert_array_equal(columns.abs_max, [nan, nan, 4])
    assert columns.merge() == measure([3.0, -4.0])
    assert columns.merge(np.array([1])) == Stats()


@given(st.lists(raw_stats, min_size=1, max_size=5))
def test_columns_give_what_each_row_gives(many: list[Stats]) -> None:
    names = ("count", "min", "max", "sum", "sumsq", "nan_count", "inf_count")
    batch = to_batch("values", {name: [getattr(each, name) for each in many] for name in names})
    columns = read_statistics(pa.Table.from_batches([batch]))
    for name in ("mean", "rms", "std", "l2", "abs_max", "nonfinite"):
        filled = [each if each.count else Stats() for each in many]
        np.testing.assert_array_equal(getattr(columns, name), [getattr(each, name) for each in filled])


def test_nonfinite_rows_are_those_of_all_batches_and_of_modules() -> None:
    one = stat_rows((3, 5, 1, 0), (3, 4, 0, 0), (2, 7, 0, 1))
    other = stat_rows((3, 9, 1, 1), (4, 6, 0, 0))
    assert nonfinite_rows(pa.Table.from_batches([one, other])).tolist() == [0, 2, 3]
    assert nonfinite_rows(pa.Table.from_batches([stat_rows((0, 0, 0, 0))])).tolist() == []
    assert nonfinite_rows(schema("values").empty_table()).tolist() == []
