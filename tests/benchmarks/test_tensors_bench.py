"""The benchmark of whole tensors runs and prints all of its rows; what the numbers are is nothing for a test."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "tensors.py"


def test_quick_run_prints_every_row() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [line.split("  ")[0] for line in done.stdout.splitlines()[1:]]
    assert [name for name in names if not name.startswith("--")] == [
        "the training's thread, us a MiB",
        "numpy's copy",
        "put_tensor, alone",
        "put_tensor, while others are written",
        "to the disk, MB/s",
        "os.write",
        "whole tensors",
        "ratio",
        "memory, MiB",
        "32 tensors of 1 MiB",
    ]
