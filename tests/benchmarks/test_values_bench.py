"""The benchmark of values runs and prints all of its rows; what the numbers are is nothing for a test."""

import pytest

from helpers.benchmark_runs import names_of, quick_lines


@pytest.mark.soak
def test_quick_run_prints_every_row() -> None:
    machine, *tables = quick_lines("values.py")
    assert machine.endswith(" kernel")
    names = names_of(tables)
    assert names[2:6] == ["float32", "bfloat16", "float16", "float64"]
    assert names[-7:] == [
        "plain",
        "modtrace, calls alone",
        "modtrace, outputs and gradients",
        "modtrace, parameters too",
        "hooks taking std()",
        "hooks keeping copies",
        "torch DebugMode with hashes",
    ]
