"""What recording adds to a collective that Python code calls: `make bench ONLY=collectives`.

One process on gloo, so that no rank waits for another. A step is many all-reduces of 16 bytes in one module; the times
are microseconds of the wall, as a collective waits, of one all-reduce. Beside it runs what patches the calls alone.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import modtrace
from measure import begin, machine, render_table
from modtrace.torch_internals.collectives import unwatch_collectives, watch_collectives

CALLS = 50


class Reducer(nn.Module):
    """Calls the collective, as often as a step of a large model does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(CALLS):
            dist.all_reduce(x)
        return x


class Nobody:
    """A listener that notes nothing."""

    def began(self, *_: Any) -> None: ...

    def issued(self, *_: Any) -> None: ...

    def waited(self, *_: Any) -> None: ...


@contextmanager
def watched() -> Any:
    nobody = Nobody()
    watch_collectives(nobody)
    yield
    unwatch_collectives(nobody)


def time_steps(model: nn.Module, steps: int) -> list[float]:
    """Returns the microseconds of an all-reduce, in each of some steps."""
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        model(torch.ones(4))
        taken.append((time.perf_counter() - start) / CALLS * 1e6)
    return taken


def time_variants(model: nn.Module, *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Returns the times of all steps by variant; these take turns."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        found.setdefault("plain", []).extend(time_steps(model, steps))
        with watched():
            found.setdefault("calls patched, nothing noted", []).extend(time_steps(model, steps))
        with modtrace.record(model, values=None) as recording:
            found.setdefault("recorded", []).extend(time_steps(model, steps))
        if recording.table("collectives").num_rows != CALLS * steps + 1:  # and the last number
            raise RuntimeError("not all collectives were recorded: the benchmark times something else")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    quick = begin(__doc__, argv)
    print(machine(), flush=True)
    excepthook = sys.excepthook  # torch puts its own there
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = time_variants(Reducer(), rounds=2 if quick else 20, steps=2 if quick else 10)
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
    plain = median(found["plain"])
    rows = [[name, f"{median(taken):.1f}", f"{median(taken) - plain:+.1f}"] for name, taken in found.items()]
    print(render_table(["an all-reduce on gloo", "us", "added"], rows))


if __name__ == "__main__":
    main()
