"""The benchmark runs and prints all of its rows; what the numbers are is nothing for a test."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "captures.py"


def test_quick_run_prints_every_row() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    machine, header, _, *rows = done.stdout.splitlines()
    assert machine.startswith("torch ")
    assert header.split("  ")[-1].strip() == "95 %"
    assert [row.split("  ")[0] for row in rows] == [
        "plain",
        "tier 1 of all module, parameter and optimizer roles",
        "tier 1 of all those but updates",
        "tier 1 of op outputs",
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
