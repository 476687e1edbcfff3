"""What recording adds to a collective that Python code calls: `make bench ONLY=collectives`.

One process on gloo, so that no rank waits for another. A step is many all-reduces of 16 bytes in one module. After each
of them the caches are cold, because the thread has slept: code takes five times as long there as in a loop. So there
are lines for an empty function of Python around both methods of torch, and for ours that note nothing. The columns are
microseconds of one all-reduce: of the wall where it is called, and of the processor with the end of the step, when rows
are made. "added" is the median of the differences to what a variant is compared with, each within one round.
"""

import functools
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import ProcessGroup, Work

import modtrace
from measure import begin, machine, render_table
from modtrace.collect.collectives._called import CompiledMethod
from modtrace.collect.collectives.recorder import CollectiveRecorder
from modtrace.torch_internals.collectives import unwatch_collectives, watch_collectives
from modtrace.torch_internals.patches import replace

CALLS = 50


class Reducer(nn.Module):
    """Calls the collective, as often as a step of a large model does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(CALLS):
            dist.all_reduce(x)
        return x


@contextmanager
def empty_functions() -> Iterator[None]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        return call

    with ExitStack() as patches:
        replace(ProcessGroup, "allreduce", wrap(ProcessGroup.allreduce), patches)
        replace(Work, "wait", wrap(Work.wait), patches)
        yield


@contextmanager
def replaced() -> Iterator[None]:
    nobody = object()
    watch_collectives(nobody, CompiledMethod)
    yield
    unwatch_collectives(nobody)


@contextmanager
def recorded(model: nn.Module, *, collectives: bool) -> Iterator[Callable[[], None]]:
    with ExitStack() as patches:
        if not collectives:
            for name in ("start", "settle"):
                replace(CollectiveRecorder, name, lambda *_, **__: None, patches)
        with modtrace.record(model, values=None) as recording:
            yield recording.step
    found = sum(row["thread"] is not None for row in recording.table("collectives").to_pylist())
    if bool(found) != collectives or found % CALLS:
        raise RuntimeError("not all collectives were recorded: the benchmark times something else")


class Variant(NamedTuple):
    compared_with: str
    enter: Callable[[], AbstractContextManager[Any]]


class Times(NamedTuple):
    wall_us: float
    cpu_us: float


def time_steps(model: nn.Module, end_step: Callable[[], None] | None, steps: int) -> Times:
    """Returns the times of an all-reduce: the median of all steps, and the mean."""
    taken = []
    cpu = time.process_time()
    for _ in range(steps):
        start = time.perf_counter()
        model(torch.ones(4))
        taken.append((time.perf_counter() - start) / CALLS * 1e6)
        if end_step is not None:
            end_step()
    return Times(median(taken), (time.process_time() - cpu) / steps / CALLS * 1e6)


def time_variants(
    model: nn.Module, variants: Mapping[str, Variant], *, rounds: int, steps: int
) -> list[dict[str, Times]]:
    """Returns the times of each round by variant; the variants of a round come in random order."""
    found = []
    for _ in range(rounds):
        of_round = {}
        for name in random.sample([*variants], len(variants)):
            with variants[name].enter() as end_step:
                time_steps(model, end_step, 2)
                of_round[name] = time_steps(model, end_step, steps)
        found.append(of_round)
    return found


def describe(name: str, variant: Variant, rounds: Sequence[Mapping[str, Times]]) -> list[str]:
    pairs = [(times[name], times[variant.compared_with]) for times in rounds]
    return [
        name,
        f"{median(own.wall_us for own, _ in pairs):.1f}",
        f"{median(own.wall_us - other.wall_us for own, other in pairs):+.1f}",
        f"{median(own.cpu_us for own, _ in pairs):.1f}",
        f"{median(own.cpu_us - other.cpu_us for own, other in pairs):+.1f}",
        variant.compared_with,
    ]


def main(argv: Sequence[str] | None = None) -> None:
    quick = begin(__doc__, argv)
    print(machine(), flush=True)
    model = Reducer()
    variants = {
        "plain": Variant("plain", nullcontext),
        "plain again": Variant("plain", nullcontext),
        "empty functions of Python": Variant("plain", empty_functions),
        "methods replaced": Variant("plain", replaced),
        "recorded without collectives": Variant("plain", lambda: recorded(model, collectives=False)),
        "recorded": Variant("recorded without collectives", lambda: recorded(model, collectives=True)),
    }
    excepthook = sys.excepthook  # torch puts its own there
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rounds = time_variants(model, variants, rounds=2 if quick else 40, steps=2 if quick else 20)
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
    rows = [describe(name, variant, rounds) for name, variant in variants.items()]
    print(
        render_table(["an all-reduce on gloo", "wall us", "added", "CPU us", "added", "compared with"], rows)
    )


if __name__ == "__main__":
    main()
