"""Measures how time and memory grow with recordings: of many calls, modules, ops, writes, and kept steps.

    python benchmarks/growth.py [--quick] [--only calls,ops] [--folder DIR]

Each kind is recorded in two sizes, the larger ten times the smaller, and each command answers in a process of its own.
Times are CPU seconds, with the start of Python and its imports; memory is the peak of the process, with the pages of
the recording that it has mapped.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import modtrace

COMMANDS = ("show", "ops", "memory", "nonfinite", "view")


#: A small process in between: a child begins with the peak of the process that starts it.
MEASURED = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""


class Kind(NamedTuple):
    """What grows, how it is recorded, and the smaller of two sizes."""

    unit: str
    record: Callable[[Path, int], None]
    size: int
    commands: Sequence[str] = COMMANDS


class Usage(NamedTuple):
    cpu_s: float
    peak_mb: float


class Calls(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.inner = count, nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            self.inner(x)
        return x


class Ops(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = x + 1
        return x / torch.zeros(())


class Writes(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = torch.empty(self.count, 4)
        bad = x / torch.zeros(())
        for row in range(self.count):
            cache[row] = bad
        return cache.sum()


def record_calls(path: Path, count: int) -> None:
    record_one_step(path, Calls(count))


def record_modules(path: Path, count: int) -> None:
    blocks = [nn.Sequential(*[nn.Identity() for _ in range(9)]) for _ in range(count // 10)]
    record_one_step(path, nn.Sequential(*blocks))


def record_ops(path: Path, count: int) -> None:
    record_one_step(path, Ops(count), ops=True)


def record_writes(path: Path, count: int) -> None:
    record_one_step(path, Writes(count), ops=True)


def record_one_step(path: Path, model: nn.Module, **options: bool) -> None:
    with modtrace.record(model, to=path, **options):
        model(torch.ones(4))


def record_kept_steps(path: Path, count: int) -> None:
    """Trains for twice as many steps as are kept, which a trigger writes at the end."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with modtrace.record(model, to=path, keep_last=count, ops=True) as recording:
        for _ in range(2 * count):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        recording.dump()


KINDS = {
    "calls": Kind("calls of one module", record_calls, 100_000, ("show", "nonfinite", "view")),
    "modules": Kind("modules", record_modules, 5_000, ("show", "nonfinite", "view")),
    "ops": Kind("ops in one step", record_ops, 100_000),
    "writes": Kind("writes into one buffer", record_writes, 2_000),
    "kept": Kind("kept steps", record_kept_steps, 1_000),
}


def main() -> None:
    """Prints a table for each kind: the recording and each command, at both sizes."""
    options = parse_arguments()
    if options.record:
        kind, count, path = options.record
        torch.set_num_threads(1)
        KINDS[kind].record(Path(path), int(count))
        return
    for name in options.only.split(",") if options.only else KINDS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print_growth(name, KINDS[name], 20 if options.quick else KINDS[name].size, Path(folder))


def print_growth(name: str, kind: Kind, size: int, folder: Path) -> None:
    """Prints what recording this kind and asking each command takes at a size, and at ten times that size."""
    sizes = (size, 10 * size)
    print(
        f"\n{kind.unit:<22}" + "".join(f"{number:>20,}" for number in sizes) + f"{'growth':>18}", flush=True
    )
    for command in ("record", *kind.commands):
        small, large = (measure(name, number, command, folder / f"{number}.modtrace") for number in sizes)
        figures = "".join(f"{usage.cpu_s:>10.2f} s {usage.peak_mb:>5,.0f} MB" for usage in (small, large))
        growth = f"{large.cpu_s / small.cpu_s:>9.1f}x {large.peak_mb / small.peak_mb:>6.1f}x"
        print(f"{command:<22}{figures}{growth}", flush=True)


def measure(kind: str, size: int, command: str, path: Path) -> Usage:
    """Returns what a command takes in a process of its own; `record` makes the recording."""
    own = ["-m", "modtrace", command, str(path)]
    if command == "record":
        own = [__file__, "--record", kind, str(size), str(path)]
    if command == "view":
        own += ["--output", str(path.with_suffix(".html"))]
    asked = [sys.executable, "-c", MEASURED, sys.executable, *own]
    code, cpu_s, peak_mb = json.loads(
        subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    )
    if code not in (0, 1):  # `nonfinite` ends with 1 where it has found something
        sys.exit(f"{' '.join(own)} ended with {code}")
    return Usage(cpu_s, peak_mb)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--only", default="", metavar="KINDS", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--folder", type=Path, help="where to put the recordings while they are measured")
    parser.add_argument("--record", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
