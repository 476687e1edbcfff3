"""Compares variants of the same work within one process, by CPU time.

Two shared cores make wall time useless and let even CPU time drift by several per cent within minutes.
So every round runs each variant once, in random order, and only differences within a round are looked at.
"""

import argparse
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

#: Runs a round: several steps, and whatever the variant costs once per round. All of it is timed.
Round = Callable[[], None]


class Estimate(NamedTuple):
    """A median with the interval that holds it in 95 of 100 repetitions."""

    median: float
    low: float
    high: float


def time_rounds(variants: Mapping[str, Round], *, rounds: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the CPU seconds of every round by variant; the n-th ones ran next to each other."""
    for run in variants.values():
        run()  # warm-up: first calls allocate, compile and import
    rng = np.random.default_rng(seed)
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for number in range(rounds):
            _say_progress(number, rounds, len(names))
            for name in rng.permutation(names).tolist():
                seconds[name].append(_time(variants[name]))
    finally:
        gc.unfreeze()
    return {name: np.array(values) for name, values in seconds.items()}


def _say_progress(number: int, rounds: int, variants: int) -> None:
    """Says on standard error, apart from the tables, that a round of all variants begins."""
    print(f"bench: round {number + 1} of {rounds}, {variants} variants", file=sys.stderr, flush=True)


def _time(run: Round) -> float:
    """Times one round. It starts without the garbage of the last one and pays for collecting its own.

    What earlier rounds left behind for good is frozen, so that nobody else's collections walk it: torch's
    ModTracker (2.13) leaves 34 objects for each module call, and within some rounds all variants were slower.
    """
    gc.collect()
    gc.freeze()
    start = time.process_time()
    run()
    return time.process_time() - start


def estimate(samples: np.ndarray, *, resamples: int = 4000, seed: int = 0) -> Estimate:
    """Returns the median of `samples` with its 95 % bootstrap interval (percentile method)."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(samples), size=(resamples, len(samples)))
    low, high = np.percentile(np.median(samples[drawn], axis=1), [2.5, 97.5])
    return Estimate(float(np.median(samples)), float(low), float(high))


def begin(about: str, argv: Sequence[str] | None) -> bool:
    """Sets torch to one thread and a seed. Returns whether the command line asks for a quick run.

    Args:
        about: the docstring of the benchmark, whose first line is its help.
        argv: the command line; None takes that of the process.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few rounds: shows only that it runs"
    )
    quick: bool = parser.parse_args(argv).quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return quick


def machine() -> str:
    """Returns what the numbers depend on, in one line."""
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {_processor()}, "
        f"{os.cpu_count()} CPUs, {torch.get_num_threads()} thread(s) used"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows in columns, the first one flush left and the others right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(_fit(line, widths)).rstrip() for line in lines)


def _fit(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(line, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
