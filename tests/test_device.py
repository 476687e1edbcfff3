"""A part of `make test-device`, in a process of its own: torch makes the threads of its engine once."""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def test_smallest_tests_on_the_simulated_device_pass():
    asked = (
        "-m",
        "device",
        "-k",
        "not test_run_has_the_same",
        "-p",
        "no:cacheprovider",
        "-q",
        "tests/device",
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *asked], cwd=PROJECT, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
