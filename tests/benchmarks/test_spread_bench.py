"""The benchmark runs and prints all of its rows; what the numbers are is nothing for a test."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "spread.py"


def test_quick_run_prints_every_row() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    machine, header, _, *rows = done.stdout.splitlines()
    assert machine.startswith("torch ")
    assert header.split("  ")[-1].strip() == "ns an element"
    assert [row.split("  ")[0] for row in rows] == ["float32", "bfloat16", "float16", "float64"]
