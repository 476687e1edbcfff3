"""The benchmark runs and prints all of its rows; what the numbers are is nothing for a test."""

import pytest

from helpers.benchmark_runs import names_of, quick_lines


@pytest.mark.soak
def test_quick_run_prints_every_row() -> None:
    machine, header, _, *rows = quick_lines("tier2.py")
    assert machine.startswith("torch ")
    assert header.split("  ")[-1].strip() == "ns an element"
    assert names_of(rows) == ["float32", "bfloat16", "float16", "float64"]
