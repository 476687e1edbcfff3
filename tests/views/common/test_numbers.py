"""How numbers are written."""

import pytest

from modtrace.views.common.numbers import (
    format_bytes,
    format_count,
    format_flops,
    format_gflops_rate,
    format_number,
    format_share,
    format_time,
    mark_unknown,
)


@pytest.mark.parametrize(
    ("time_ns", "expected"),
    [
        (0, "0us"),
        (999, "999ns"),
        (1_000, "1.00us"),
        (9_994, "9.99us"),
        (9_996, "10.0us"),
        (999_400, "999us"),
        (999_600, "1.00ms"),
        (1_234_567, "1.23ms"),
        (3_600_000_000_000, "3600s"),
    ],
)
def test_time_has_three_digits_and_its_unit(time_ns: int, expected: str) -> None:
    assert format_time(time_ns) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1.00K"),
        (999_999, "1.00M"),
        (7_000_000_000, "7.00B"),
        (1_800_000_000_000, "1.80T"),
    ],
)
def test_count_has_three_digits_and_its_unit(count: int, expected: str) -> None:
    assert format_count(count) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (-12.34, "-12.3"),
        (9999.4, "9999"),
        (9999.6, "1.0e+04"),
        (0.99949, "0.999"),
        (0.99951, "1.00"),
        (0.0999951, "0.100"),
        (0.001, "0.00100"),
        (0.00099, "9.9e-04"),
        (-2e300, "-2.0e+300"),
        (float("nan"), "NaN"),
        (float("inf"), "inf"),
    ],
)
def test_number_has_three_digits_or_an_exponent(value: float, expected: str) -> None:
    assert format_number(value) == expected


def test_share_is_a_percentage() -> None:
    assert [format_share(each) for each in (0.0, 0.1234, 1.0)] == ["0.0%", "12.3%", "100.0%"]


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0B"),
        (999, "999B"),
        (1_000, "1.00kB"),
        (999_499, "999kB"),
        (999_500, "1.00MB"),
        (4_500_000_000_000, "4.50TB"),
        (2 * 10**18, "2000PB"),
    ],
)
def test_sizes_have_three_digits_in_powers_of_1000(size_bytes: int, expected: str) -> None:
    assert format_bytes(size_bytes) == expected


@pytest.mark.parametrize(
    ("flops", "expected"), [(0, "0"), (789, "789"), (1_230_000_000, "1.23G"), (7 * 10**15, "7.00P")]
)
def test_floating_point_operations_are_written_with_prefixes(flops: int, expected: str) -> None:
    assert format_flops(flops) == expected


def test_rate_is_in_billions_per_second() -> None:
    assert format_gflops_rate(1_230_000_000, 100_000_000) == "12.3"
    assert format_gflops_rate(0, 100) == ""
    assert format_gflops_rate(100, 0) == ""


def test_sums_that_leave_something_out_are_marked() -> None:
    assert mark_unknown("1.23G", 0) == "1.23G"
    assert mark_unknown("1.23G", 3) == "1.23G+"
    assert mark_unknown("", 3) == "?"
    assert mark_unknown("", 0) == ""
