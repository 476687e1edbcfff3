"""What the columns of tier 2 tell: every number against the numbers that were measured."""

import math
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from helpers.tier2_reference import tier2_of, value_rows
from modtrace.recording.schema import schema
from modtrace.recording.statistics.number_formats import FORMATS, to_format
from modtrace.recording.statistics.tier2 import LOWER_EDGES, UPPER_EDGES, Tier2Columns, read_tier2

nan, inf = math.nan, math.inf

moderate = st.floats(-1e60, 1e60).filter(lambda number: number == 0 or abs(number) > 1e-60)
near_one = st.builds(lambda sign, power: sign * 2.0**power, st.sampled_from([-1, 1]), st.floats(-20, 20))
any_number = st.one_of(
    moderate,
    near_one,
    st.floats(width=16),
    st.floats(width=32),
    st.sampled_from(
        [nan, inf, -inf, 0.0, -0.0, 65504.0, 65520.0, 448.0, 449.0, 57344.0, 2.0**-24, 2.0**-127, 1e300]
    ),
)
some_numbers = st.lists(any_number, min_size=1, max_size=12)


def tier2_rows(*rows: list[float] | None) -> Tier2Columns:
    return read_tier2(value_rows(rows))


# By hand.


def test_derived_numbers_of_a_few_numbers() -> None:
    found = tier2_rows([0.0, 1.0, -3.0, 4.0])
    assert found.mean_abs.tolist() == [2.0]
    assert found.zero_fraction.tolist() == [0.25]
    assert found.stats.nan_fraction.tolist() == found.stats.inf_fraction.tolist() == [0.0]
    assert found.kurtosis.tolist() == [pytest.approx(4 * (1 + 81 + 256) / 26**2)]
    assert found.stats.crest.tolist() == [pytest.approx(4 / math.sqrt(6.5))]
    assert [bound.tolist() for bound in found.dynamic_range] == [[2.0], [2.0]]  # 1 and 4
    assert found.argmax.tolist() == [3]
    assert [bound.tolist() for bound in found.quantile(0.5)] == [[1.0], [2.0]]
    assert [bound.tolist() for bound in found.quantile(0.75)] == [[2.0], [4.0]]
    assert [bound.tolist() for bound in found.quantile(1)] == [[4.0], [4.0]]  # abs_max is nearer than 8
    assert [bound.tolist() for bound in found.quantile(0)] == [[0.0], [0.0]]


def test_a_row_without_tier_2_has_nothing_of_it() -> None:
    columns = value_rows([[1.0, 2.0, nan]]).drop_columns(
        ["sumabs", "zero_count", "sum4", "argmax", "histogram"]
    )
    for name in ("sumabs", "zero_count", "sum4", "argmax", "histogram"):
        columns = columns.append_column(
            schema("values").field(name), pa.nulls(1, schema("values").field(name).type)
        )
    found = read_tier2(columns)
    unknown = [
        found.mean_abs,
        found.zero_fraction,
        found.kurtosis,
        *found.dynamic_range,
        *found.quantile(0.5),
        found.underflow_fraction("fp16"),
        found.flushed_fraction("fp16"),
        *found.overflow_fraction("fp16"),
    ]
    assert [math.isnan(each[0]) for each in unknown] == [True] * len(unknown)
    assert not found.is_measured[0]
    assert (found.argmax.tolist(), found.histogram_row.tolist()) == ([-1], [-1])
    assert found.stats.nan_fraction.tolist() == [pytest.approx(1 / 3)]


def test_measured_and_unmeasured_rows_stand_beside_each_other() -> None:
    found = tier2_rows(None, [1.0], [], None, [3.0, 0.0])
    assert found.is_measured.tolist() == [False, True, True, False, True]
    np.testing.assert_array_equal(found.mean_abs, [nan, 1.0, nan, nan, 1.5])
    np.testing.assert_array_equal(found.zero_fraction, [nan, 0.0, nan, nan, 0.5])
    np.testing.assert_array_equal(found.quantile(1).high, [nan, 1.0, nan, nan, 3.0])
    np.testing.assert_array_equal(found.underflow_fraction("fp16"), [nan, 0.0, nan, nan, 0.0])


def test_a_table_of_several_batches_is_read_as_one() -> None:
    parts = [value_rows([None, [1.0]]), value_rows([[2.0, 5.0], None])]
    found = read_tier2(pa.concat_tables(parts).slice(1))
    np.testing.assert_array_equal(found.mean_abs, [1.0, 3.5, nan])
    np.testing.assert_array_equal(found.dynamic_range.low, [0, 1, nan])


def test_histograms_are_read_whatever_lies_between_them() -> None:
    table = value_rows([[1.0], [2.0], [3.0], [8.0]])
    at = table.column_names.index("histogram")
    whole = table["histogram"].combine_chunks()
    flat, nulls = whole.flatten(), pa.array([False, False, True, False])
    odd = pa.concat_arrays([flat[:256], pa.array([7, 7, 7]), flat[256:]])
    offsets = pa.array([0, 256, 259, 515, 515], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, odd, mask=nulls)  # 256, 3 of something else, null, none
    found = read_tier2(table.set_column(at, table.field(at), lists))
    np.testing.assert_array_equal(found.quantile(1).high, [1.0, nan, nan, nan])
    moved = pa.ListArray.from_arrays(pa.array([0, 256, 259, 515, 771], pa.int32()), odd)
    found = read_tier2(table.set_column(at, table.field(at), moved).slice(1))
    np.testing.assert_array_equal(found.quantile(1).high, [nan, 3.0, 4.0])  # that of 2.0, that of 3.0
    assert [found.histogram[row].argmax() for row in found.histogram_row[1:]] == [128, 128]


def test_no_rows_have_no_numbers() -> None:
    found = read_tier2(value_rows([[1.0]]).slice(1))
    assert len(found.mean_abs) == len(found.kurtosis) == len(found.quantile(0.5).low) == 0


@pytest.mark.parametrize(
    ("format", "underflow", "flushed", "overflow"),
    [
        ("float32", 0.0, 0.0, 1 / 8),  # inf alone
        ("bf16", 0.0, 0.0, 1 / 8),
        ("fp16", 2 / 8, 1 / 8, 2 / 8),
        ("e4m3", 3 / 8, 2 / 8, 2 / 8),
        ("e5m2", 2 / 8, 2 / 8, 2 / 8),
    ],
)
def test_what_would_become_of_numbers_in_a_format(format, underflow, flushed, overflow) -> None:
    found = tier2_rows([0.0, 2.0**-25, -(2.0**-20), 2.0**-8, 1.0, -100.0, 1e6, inf])
    assert found.underflow_fraction(format).tolist() == [underflow]
    assert found.flushed_fraction(format).tolist() == [flushed]
    assert found.overflow_fraction(format).low.tolist() == [overflow]
    assert found.overflow_fraction(format).high.tolist() == [overflow]


def test_what_rounding_keeps_as_the_smallest_subnormal_is_flushed_all_the_same() -> None:
    """Rounding to nearest makes zero of what is up to half of 2^-9, the smallest subnormal of e4m3."""
    import torch

    numbers = [0.75 * 2.0**-9, 0.5 * 2.0**-9, -0.625 * 2.0**-9, 0.25 * 2.0**-9, 2.0**-9, 0.0, 1.0, 2.0]
    assert tier2_rows(numbers).flushed_fraction("e4m3").tolist() == [4 / 8]

    rounded = torch.tensor(numbers).to(torch.float8_e4m3fn).double().tolist()
    assert rounded == [2.0**-9, 0, -(2.0**-9), 0, 2.0**-9, 0, 1, 2]


def test_what_one_bin_cannot_tell_is_unknown() -> None:
    found = tier2_rows([1.0, 2.0**-130])
    np.testing.assert_array_equal(found.flushed_fraction("bf16"), [nan])
    assert found.underflow_fraction("bf16").tolist() == [0.5]
    assert (found.dynamic_range.low[0], found.dynamic_range.high[0]) == (127, 127 + 947)


def test_overflow_beside_the_largest_number_is_told_as_far_as_it_is_known() -> None:
    def bounds(*numbers: float) -> tuple[float, float]:
        low, high = tier2_rows(list(numbers)).overflow_fraction("fp16")
        return float(low[0]), float(high[0])

    assert bounds(65504.0, -65504.0, 1.0, 1.0) == (0, 0)  # nothing is larger than the largest
    assert bounds(65535.0, 40000.0, 40000.0, 1.0) == (0.25, 0.75)
    assert bounds(65535.0, -65535.0, 1.0, 1.0) == (0.5, 0.5)
    assert bounds(1e9, 40000.0, 1.0, 1.0) == (0.25, 0.5)
    assert bounds(nan, 40000.0, 1.0, 1.0) == (0, 0.25)


def test_numbers_that_no_float64_can_hold_the_powers_of_are_not_guessed() -> None:
    found = tier2_rows([1e-90, 2e-90], [1e90, 2e90], [0.0, 0.0], [1e-200, 3e-200])
    np.testing.assert_array_equal(found.kurtosis, [nan, nan, nan, nan])
    assert found.stats.crest[0] == pytest.approx(2 / math.sqrt(2.5))
    assert found.stats.crest[1] == pytest.approx(2 / math.sqrt(2.5))
    np.testing.assert_array_equal(found.stats.crest[2:], [nan, nan])


def test_squares_beyond_float64_have_no_crest_and_a_product_of_sums_beyond_it_has_its_kurtosis() -> None:
    found = tier2_rows([1e200, 2e200], [4.5e76] * 10 + [0.0] * 10)
    assert found.kurtosis.tolist() == [pytest.approx(nan, nan_ok=True), pytest.approx(2)]
    assert found.stats.crest.tolist() == [pytest.approx(nan, nan_ok=True), pytest.approx(math.sqrt(2))]


def test_errors_of_the_kernels_do_not_make_an_impossible_shape() -> None:
    columns = value_rows([[1.1] * 100])
    at = columns.column_names.index("sumsq")
    columns = columns.set_column(at, "sumsq", pa.array([121.0 * (1 + 2e-6)]))
    found = read_tier2(columns)
    assert (found.kurtosis.tolist(), found.stats.crest.tolist()) == ([1.0], [1.0])


def test_a_quantile_of_an_impossible_part_is_refused() -> None:
    for p in (-0.1, 1.1, nan):
        with pytest.raises(ValueError, match="a quantile is asked for by a number from 0 to 1"):
            tier2_rows([1.0]).quantile(p)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no number format 'e4m4'\. Did you mean 'e4m3'\? There are: float32"
    ):
        tier2_rows([1.0]).underflow_fraction("e4m4")


def test_nan_are_left_out_of_a_quantile() -> None:
    found = tier2_rows([nan, nan, nan, 1.0, 4.0, inf]).quantile(0.5)
    assert (found.low.tolist(), found.high.tolist()) == ([4.0], [8.0])


# Against the numbers themselves.


@given(some_numbers, st.floats(0, 1))
def test_a_quantile_lies_between_its_bounds(numbers: list[float], p: float) -> None:
    magnitudes = sorted(abs(number) for number in numbers if number == number)
    assume(magnitudes)
    rank = min(max(math.ceil(p * len(magnitudes)), 1), len(magnitudes))
    low, high = tier2_rows(numbers).quantile(p)
    exact = magnitudes[rank - 1]
    assert low[0] <= exact <= high[0]
    if 2.0**-126 <= exact < 2.0**128:
        assert high[0] <= 2 * low[0]


@given(some_numbers, st.sampled_from(sorted(FORMATS)))
def test_fractions_are_those_of_counting(numbers: list[float], name: str) -> None:
    of, n = to_format(name), len(numbers)
    found = tier2_rows(numbers)
    below = [abs(number) for number in numbers if number and abs(number) < of.smallest_normal]
    above = sum(abs(number) > of.largest for number in numbers)
    low, high = found.overflow_fraction(name)

    assert found.underflow_fraction(name)[0] == len(below) / n
    flushed = found.flushed_fraction(name)[0]
    if math.isnan(flushed):
        assert name in ("float32", "bf16") and min(below) < 2.0**-126
    else:
        assert flushed == sum(magnitude < of.smallest_subnormal for magnitude in below) / n
    assert low[0] <= above / n <= high[0]
    power = math.frexp(of.largest)[1]
    near = sum(math.isfinite(number) and math.frexp(number)[1] == power for number in numbers)
    assert round((high[0] - low[0]) * n) <= near


@given(st.lists(moderate, min_size=1, max_size=12))
def test_moments_are_those_of_exact_arithmetic(numbers: list[float]) -> None:
    found, n = tier2_rows(numbers), len(numbers)
    exact = [Fraction(number) for number in numbers]
    assert found.mean_abs[0] == pytest.approx(float(sum(map(abs, exact)) / n), rel=1e-12)
    assert found.zero_fraction[0] == numbers.count(0) / n
    if any(exact):
        squares = sum(each**2 for each in exact)
        assert found.kurtosis[0] == pytest.approx(
            float(n * sum(each**4 for each in exact) / squares**2), rel=1e-9
        )
        assert found.stats.crest[0] ** 2 == pytest.approx(
            float(max(map(abs, exact)) ** 2 * n / squares), rel=1e-9
        )
        assert 1 <= found.kurtosis[0] <= n


@given(some_numbers)
def test_the_dynamic_range_is_that_of_the_exponents(numbers: list[float]) -> None:
    exponents = [math.frexp(number)[1] for number in numbers if number and math.isfinite(number)]
    low, high = tier2_rows(numbers).dynamic_range
    if not exponents:
        assert math.isnan(low[0]) and math.isnan(high[0])
        return
    exact = max(exponents) - min(exponents)
    assert low[0] <= exact <= high[0]
    if min(exponents) >= -125 and max(exponents) <= 128:
        assert low[0] == high[0]


@given(some_numbers)
def test_every_number_is_counted_once(numbers: list[float]) -> None:
    found = tier2_rows(numbers)
    stats = found.stats
    total = found.histogram.sum() + found.zero_count[0] + stats.nan_count[0] + stats.inf_count[0]
    assert total == stats.count[0] == len(numbers)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_is_between_the_edges_of_its_bin(number: float) -> None:
    [bins] = np.nonzero(tier2_of([number])["histogram"])
    for k in bins.tolist():
        assert LOWER_EDGES[k] <= abs(number) < UPPER_EDGES[k]
    assert len(bins) == (number != 0)


def test_many_rows_are_asked_in_pieces() -> None:
    table = pa.concat_tables([value_rows([[1.0, 3.0], None])] * 3000).combine_chunks()
    found = read_tier2(table)
    np.testing.assert_array_equal(found.quantile(1).high, [3.0, nan] * 3000)


def test_formats_are_those_of_torch() -> None:
    import torch

    dtypes = {
        "float32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }
    for name, dtype in dtypes.items():
        of, limits = FORMATS[name], torch.finfo(dtype)
        assert (of.largest, of.smallest_normal) == (limits.max, limits.smallest_normal)
        smallest = torch.ones(1, dtype={1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(
            dtype
        )
        assert of.smallest_subnormal == smallest.double().item()
