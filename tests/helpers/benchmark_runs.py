"""Runs of the benchmarks, as short as they can be."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs python with these arguments in the folder of the benchmarks."""
    return subprocess.run([sys.executable, *arguments], cwd=_BENCHMARKS, capture_output=True, text=True)


def quick_lines(script: str, *options: str) -> list[str]:
    """What a quick run of the script prints."""
    done = run_benchmark(script, "--quick", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def names_of(rows: Iterable[str]) -> list[str]:
    """The first column."""
    return [row.split("  ")[0] for row in rows]
