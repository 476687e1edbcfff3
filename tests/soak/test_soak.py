"""Memory does not grow with the number of steps. `make soak` runs 10,000 of them; a sample of 200 runs always."""

import ctypes
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from helpers.ours import assert_bounded, settled

MB = 2**20

#: Recordings of either kind. In memory so few rows are kept that old ones are dropped from early on.
KINDS: dict[str, Callable[[Path], modtrace.LiveRecording]] = {
    "to a folder": lambda folder: modtrace.record(
        to=folder / "run.modtrace", strict=True, backward_times=True
    ),
    "in memory": lambda folder: modtrace.record(strict=True, backward_times=True, max_bytes=MB // 4),
}
BOTH = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


class Training:
    """Steps of a tiny model, with a scalar logged in each."""

    def __init__(self, rec: modtrace.LiveRecording) -> None:
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
    found = settled(training.rec, lambda: training.run(1))
    for name in ("_Sealed", "_Words"):  # of the rows in memory, which max_bytes bounds
        found.pop(name, None)
    return found


@BOTH
def test_two_hundred_steps_leave_as_many_objects_as_a_hundred(tmp_path, make):
    counts = []
    with make(tmp_path) as rec:
        training = Training(rec)
        for _ in range(4):
            training.run(50)
            counts.append(counts_of(training))
    assert_bounded(counts[1:])


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of the process from /proc")
@BOTH
def test_ten_thousand_steps_take_as_much_memory_as_two_thousand(tmp_path, make, capsys):
    without_huge_pages()
    counts, resident = [], []
    with make(tmp_path) as rec:
        training = Training(rec)
        for _ in range(5):
            training.run(2000)
            counts.append(counts_of(training))
            resident.append(resident_bytes())
    with capsys.disabled():
        sizes = ", ".join(f"{each / MB:.2f}" for each in resident)
        print(f"\nresident MB after each 2,000 steps: {sizes}; rows {rec.progress.rows:,}")
    assert_bounded(counts)
    assert rec.meta.marks == () or "dropped" in rec.meta.marks[0]
    assert resident[-1] - resident[0] < 1.5 * MB
