"""How bytes and floating point operations are written."""

import pytest

from modtrace.views.common.sizes import format_bytes, format_flops, format_gflops_rate, mark_unknown


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0B"),
        (789, "789B"),
        (999, "999B"),
        (1_000, "1.00kB"),
        (45_600, "45.6kB"),
        (999_499, "999kB"),
        (999_500, "1.00MB"),
        (1_230_000_000, "1.23GB"),
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
