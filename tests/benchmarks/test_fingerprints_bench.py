"""The benchmark of fingerprints runs and prints all of its rows; what the numbers are is nothing for a test."""

from helpers.benchmark_runs import quick_lines


def test_quick_run_prints_every_row() -> None:
    machine, *tables = quick_lines("fingerprints.py")
    assert machine.endswith(" kernel")
    assert [line.split("  ")[0] for line in tables if line and "us" not in line and "--" not in line] == [
        "float32, 1,000",
        "bfloat16, 1,000",
        "dense",
        "slice of columns",
        "every second",
        "transposed",
        "columns of 4 x as many",
        "columns, not aligned",
    ]
