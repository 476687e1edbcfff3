"""Memory does not grow with the number of steps. `make soak` runs 10,000 of them; a sample of 100 runs always."""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.ours import assert_bounded, settled

MB = 2**20

#: Recordings of each kind. In memory so few rows are kept that old ones are dropped from early on.
KINDS: dict[str, Callable[[Path], modtrace.LiveRecording]] = {
    "to a folder": lambda folder: modtrace.record(
        to=folder / "run.modtrace", strict=True, backward_times=True
    ),
    "in memory": lambda folder: modtrace.record(strict=True, backward_times=True, max_bytes=MB // 4),
    "steps that are not kept": lambda folder: modtrace.record(strict=True, steps="1::1000"),
}
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads the size of the process from /proc")

#: Rows for two steps (57 kB), what waits to be written or is kept, and what Arrow makes of it while it writes.
BUFFERS = 1 * MB

#: Values as well, calls alone, or nothing is recorded.
WHAT = ("plain", "calls", "values")


class Training:
    """Steps of a tiny model, with a scalar logged in each."""

    def __init__(self, rec: modtrace.LiveRecording | None) -> None:
        self.rec = rec
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inputs = torch.ones(2, 4)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(self.inputs).square().sum()
            loss.backward()
            self.optimizer.step()
            if self.rec is not None:
                self.rec.log(loss=loss)


def without_huge_pages() -> None:
    """Has the kernel hand out small pages: Arrow asks for huge ones, and each it gets or loses is 2 MB of noise."""
    set_thp_disable = 41  # of <linux/prctl.h>
    ctypes.CDLL(None).prctl(set_thp_disable, 1, 0, 0, 0)


def resident_bytes() -> int:
    """What the process takes, without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counts_of(training: Training) -> Counter[str]:
    assert training.rec is not None
    found = settled(training.rec, lambda: training.run(1))
    for name in ("_Sealed", "_Words"):  # of the rows in memory, which max_bytes bounds
        found.pop(name, None)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_steps_leave_as_many_objects_as_fifty(tmp_path, kind):
    counts = []
    with KINDS[kind](tmp_path) as rec:
        training = Training(rec)
        for _ in range(3):
            training.run(33)
            counts.append(counts_of(training))
    assert_bounded(counts[1:])


@pytest.mark.soak
@ON_LINUX
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_steps_take_as_much_memory_as_two_thousand(tmp_path, kind, capsys):
    found = in_a_process("values", kind, tmp_path)
    with capsys.disabled():
        sizes = ", ".join(f"{each / MB:.2f}" for each in found["resident"])
        print(f"\n{kind}: resident MB after each 2,000 steps: {sizes}; rows {found['rows']:,}")
    assert_bounded([Counter(each) for each in found["counts"]])
    assert found["resident"][-1] - found["resident"][0] < 1.5 * MB


@pytest.mark.soak
@ON_LINUX
@pytest.mark.parametrize("kind", ["to a folder", "in memory"])
def test_measuring_takes_little_more_than_not_recording_at_all(tmp_path, kind, capsys):
    """A recording of calls alone, and of nothing, beside it. What the first recording imports is there before."""
    found = {what: in_a_process(what, kind, tmp_path, steps=200)["grown"] for what in WHAT}
    with capsys.disabled():
        print(f"\n{kind}: MB more than before: " + ", ".join(f"{w} {g / MB:.2f}" for w, g in found.items()))
    assert found["values"] - found["plain"] < BUFFERS + 1 * MB


# In a process of its own: what other tests left in malloc's lists is no part of it.


def in_a_process(what: str, kind: str, folder: Path, steps: int = 2000) -> Any:
    folder = folder / what
    folder.mkdir()
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, what, kind, str(folder), str(steps)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(what: str, kind: str, folder: Path, steps: int) -> dict[str, Any]:
    without_huge_pages()
    warm_up(kind, folder / "first")
    before = resident_bytes()
    counts, resident = [], []
    with recording_of(what, kind, folder) as rec:
        training = Training(rec)
        for _ in range(5):
            training.run(steps)
            if rec is not None:
                counts.append(counts_of(training))
            resident.append(resident_bytes())
        rows = 0 if rec is None else rec.progress.rows
    return {"counts": counts, "resident": resident, "grown": resident[-1] - before, "rows": rows}


def warm_up(kind: str, folder: Path) -> None:
    """What is imported, compiled and set up once in a process is no part of what is measured."""
    folder.mkdir()
    with KINDS[kind](folder) as rec:
        Training(rec).run(50)
        rec.data  # noqa: B018 (writes what has ended)


def recording_of(what: str, kind: str, folder: Path) -> Any:
    if what == "plain":
        return nullcontext()
    return (
        KINDS[kind](folder)
        if what == "values"
        else modtrace.record(strict=True, values=None, max_bytes=MB // 4)
    )


if __name__ == "__main__":
    what, kind, folder, steps = sys.argv[1:]
    print(json.dumps(measure(what, kind, Path(folder), int(steps))))
