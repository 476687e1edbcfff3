"""The benchmark runs and prints all of its rows; what the numbers are is nothing for a test."""

import pytest

from helpers.benchmark_runs import names_of, quick_lines


@pytest.mark.soak
def test_quick_run_prints_every_row() -> None:
    machine, header, _, *rows = quick_lines("captures.py")
    assert machine.startswith("torch ")
    assert header.split("  ")[-1].strip() == "95 %"
    assert names_of(rows) == [
        "plain",
        "tier 1 of all module, parameter and optimizer roles",
        "tier 1 of all those but updates",
        "tier 1 of op outputs",
        "what naming the op of a NaN needs: tier 1 of op outputs, no saved memory",
        "ops, no values",
        "tier 2 every 10th step",
        "tier 1, and tier 2 every 10th step",
        "hash and sketch of outputs, no statistics",
        "hash and sketch of outputs, tier 1",
        "idle",
        "calls alone",
        "whole tensors of one block, to disk",
        "hooks taking std()",
        "hooks keeping copies",
        "torch DebugMode with hashes",
    ]
