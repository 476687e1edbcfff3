"""A training that is killed loses no step that ended long before. `make soak` kills hundreds; a sample runs always.

The figures of an idle machine and of one with two busy loops:

    .venv/bin/pytest -m soak tests/soak/test_soak_kills.py
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import modtrace
from helpers import killed_runs

IDLE_MS, LOADED_MS = 300, 1000


@contextmanager
def trainings() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, killed_runs.__file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def oldest_lost_ms(path: Path, killed_ns: int) -> float:
    """How long before the kill the first step that is not in the recording had ended; 0 if none is missing."""
    ends = [int(line) for line in path.with_name(path.name + ".ends").read_text().split("\n")[:-1]]
    kept = modtrace.open_recording(path).table("steps").column("step").to_pylist()
    assert kept == list(range(len(kept)))
    return max(0.0, (killed_ns - ends[len(kept)]) / 1e6) if len(kept) < len(ends) else 0.0


def kill(folder: Path, kinds: list[str], seed: int) -> list[float]:
    """Kills a training of each of those kinds; how old the oldest step was that each lost, in ms."""
    draw = random.Random(seed)
    lost = []
    with trainings() as process:
        for number, kind in enumerate(kinds):
            path = folder / f"{number}.modtrace"
            print(path, kind, draw.uniform(0.3, 1.5), file=process.stdin, flush=True)
            lost.append(oldest_lost_ms(path, int(process.stdout.readline())))
    return lost


def test_a_killed_training_has_all_steps_but_the_last(tmp_path: Path) -> None:
    kinds = ["python", "found", "triggers"]
    assert [each for each in kill(tmp_path, kinds, seed=0) if each > LOADED_MS] == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("loops", "bound_ms"), [(0, IDLE_MS), (2, LOADED_MS)], ids=["idle", "two busy loops"]
)
def test_a_hundred_killed_trainings_have_all_steps_but_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loops: int, bound_ms: int
) -> None:
    kinds = [list(killed_runs.KINDS)[each % len(killed_runs.KINDS)] for each in range(100)]
    with busy_loops(loops):
        lost = kill(tmp_path, kinds, seed=loops)
    kept = sum(each <= bound_ms for each in lost)
    worst, kind = max(zip(lost, kinds, strict=True))
    with capsys.disabled():
        print(
            f"\n{loops} busy loops: {kept} of {len(lost)} killed trainings lost no step that had ended {bound_ms} ms "
            f"before; the oldest lost step had ended {worst:.0f} ms before ({kind!r})"
        )
    assert kept == len(lost)
