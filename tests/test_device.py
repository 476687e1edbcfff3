"""A part of `make test-device`, in a process of its own: torch makes the threads of its engine once."""

import re
import subprocess
import sys
from pathlib import Path

from device.left_out import LEFT_OUT

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


def test_tests_that_are_left_out_there_are_in_tests_collect() -> None:
    files = [*(PROJECT / "tests" / "collect").rglob("test_*.py")]
    known = "".join(f"{file.name}\n{file.read_text(encoding='utf-8')}" for file in files)
    parts = [part for group in LEFT_OUT for part in group.parts]
    names = [name for part in parts for name in re.findall(r"test_\w+(?:\.py)?", part)]
    assert len(names) > 40
    assert [name for name in names if not re.search(rf"^(def )?{name}", known, re.MULTILINE)] == []
