"""A process killed at any moment leaves a readable recording, which lacks the writer's last 100 ms alone."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.typed_rows import MS, calls_of
from modtrace.recording.arrow.batches import to_batch
from modtrace.store.reader import FolderReader

# Steps take 7 ms of the clock that the writer is given, and as little of the real one as they can.
WRITER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from helpers.typed_rows import MS, write_step
from modtrace.recording.meta import RunMeta
from modtrace.store.writer import FolderWriter

writer = FolderWriter(sys.argv[1], RunMeta(run_id="killed"))
for step in range(100_000):
    write_step(writer, step, step * 7 * MS)
    os.write(1, b"%d\\n" % step)
"""


def write_until_killed(path: Path, after_steps: int) -> int:
    """Returns the last step that had ended when the writer was killed."""
    command = [sys.executable, "-c", WRITER, path, Path(__file__).parent.parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(after_steps):
            assert writer.stdout.readline()
        writer.kill()
        rest = writer.stdout.read().split()
    assert writer.returncode == -signal.SIGKILL
    return int(rest[-1]) if rest else after_steps - 1


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))]
)
def test_no_step_that_ended_100_ms_before_the_kill_is_lost(tmp_path: Path, seed: int) -> None:
    last = write_until_killed(tmp_path / "run.modtrace", after_steps=random.Random(seed).randrange(1, 1500))
    reader = FolderReader(tmp_path / "run.modtrace")
    steps = reader.table("steps").column("step").to_pylist()
    assert steps == list(range(len(steps)))
    assert steps[-1] * 7 * MS >= last * 7 * MS - 100 * MS
    calls = reader.table("calls").to_pylist()
    assert calls[: 20 * len(steps)] == [
        row for step in steps for row in to_batch("calls", calls_of(step)).to_pylist()
    ]
    assert reader.table("scalars").num_rows >= len(steps)
    assert reader.meta.marks == (
        f"not closed: the process ended or is still running; complete to step {steps[-1]}",
    )
