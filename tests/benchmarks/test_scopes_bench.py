"""The benchmark runs and prints all of its rows; what the numbers are is nothing for a test."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "scopes.py"


def test_quick_run_prints_every_row() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    machine, header, _, *rows = done.stdout.splitlines()
    assert machine.startswith("torch ")
    assert header.split("  ")[-1].strip() == "95 %"
    assert [row.split("  ")[0] for row in rows] == [
        "plain",
        "two empty global hooks",
        "modtrace ModuleTracker",
        "modtrace ModuleTracker, 4 hooks",
        "torch ModuleTracker",
        "torch ModTracker",
        "torch ModTracker, 4 hooks",
        "modtrace.record",
        "modtrace.record and a tracker",
        "modtrace.record, backward times",
    ]
