"""The benchmark of fingerprints runs and prints all of its rows; what the numbers are is nothing for a test."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "fingerprints.py"


def test_quick_run_prints_every_row() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    machine, *tables = done.stdout.splitlines()
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
