"""The benchmarks of opening recordings run; what the numbers are is nothing for a test."""

import pytest

from helpers.benchmark_runs import run_benchmark


def lines(script: str, *arguments: str) -> list[str]:
    done = run_benchmark(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.soak
def test_large_recording_of_modules_is_measured_twice() -> None:
    first, again = lines("open_large.py", "--rows", "100000", "--kind", "modules")
    assert first.startswith("modules, first: 100,000 value rows, 22 MB on disk: ")
    assert again.startswith("modules, again: 100,000 value rows, 22 MB on disk: ")


@pytest.mark.soak
def test_large_recording_of_ops_is_measured_twice() -> None:
    kind = "ops, masks in every step"
    written = lines("open_large.py", "--rows", "5000", "--kind", kind)
    assert [each.split(":")[0] for each in written] == [f"{kind}, first", f"{kind}, again"]


def test_small_steps_are_measured_open_and_closed() -> None:
    written = lines("open_small_steps.py", "--steps", "50")
    assert [each.split(":")[0] for each in written] == ["write", "open", "close", "closed", "show"]
    assert written[1].startswith("open: 10,000 calls in 50 batches read in ")
    assert written[3].startswith("closed: 10,000 calls in 1 batches read in ")
