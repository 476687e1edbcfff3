"""The benchmarks of opening recordings run; what the numbers are is nothing for a test."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def lines(script: str, *arguments: str) -> list[str]:
    command = [sys.executable, BENCHMARKS / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_large_recording_is_measured_twice() -> None:
    first, again = lines("open_large.py", "--rows", "100000")
    assert first.startswith("first: 100,000 value rows, 19 MB on disk: ")
    assert again.startswith("again: 100,000 value rows, 19 MB on disk: ")


def test_small_steps_are_measured_open_and_closed() -> None:
    written = lines("open_small_steps.py", "--steps", "50")
    assert [each.split(":")[0] for each in written] == ["write", "open", "close", "closed"]
    assert written[1].startswith("open: 10,000 calls in 50 batches read in ")
    assert written[3].startswith("closed: 10,000 calls in 1 batches read in ")
