"""The benchmark of values runs and prints all of its rows; what the numbers are is nothing for a test."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "values.py"


def test_quick_run_prints_every_row() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    machine, *tables = done.stdout.splitlines()
    assert machine.endswith(" kernel")
    names = [line.split("  ")[0] for line in tables]
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
