"""Trains under the recorder, one fork after the other, each killed at some moment: run as a program.

It reads lines, `PATH KIND DELAY_S`, forks a training that records to PATH, kills it by SIGKILL so long after its first
step, and answers when that was. The training writes the moment at which each step ended beside the recording: what a
process has given to the kernel survives it.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import modtrace

BUSY_S = 0.4


class Net(nn.Module):
    """Three layers, whose steps take about 1 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def busy(until_s: float) -> None:
    """Python that lets another thread run every 5 ms only."""
    while time.perf_counter() < until_s:
        pass


def short_steps(rec: modtrace.LiveRecording, train: Callable[[], None]) -> Iterator[None]:
    while True:
        train()
        yield
        rec.step()


def found_steps(rec: modtrace.LiveRecording, train: Callable[[], None]) -> Iterator[None]:
    """Each ends when the next begins."""
    while True:
        train()
        time.sleep(0.03)
        yield


def long_steps(rec: modtrace.LiveRecording, train: Callable[[], None]) -> Iterator[None]:
    while True:
        train()
        time.sleep(0.15)
        yield
        rec.step()


def steps_and_a_pause(rec: modtrace.LiveRecording, train: Callable[[], None]) -> Iterator[None]:
    """What ended last waits for the timer."""
    while True:
        for _ in range(5):
            train()
            yield
            rec.step()
        time.sleep(0.5)


def steps_and_python(rec: modtrace.LiveRecording, train: Callable[[], None]) -> Iterator[None]:
    """The same, and the timer has to ask for the interpreter."""
    while True:
        for _ in range(5):
            train()
            yield
            rec.step()
        busy(time.perf_counter() + BUSY_S)


#: What is trained, and recorded with which options.
KINDS: dict[str, tuple[Callable[..., Iterator[None]], dict[str, Any]]] = {
    "pause": (steps_and_a_pause, {}),
    "python": (steps_and_python, {}),
    "long": (long_steps, {}),
    "found": (found_steps, {"values": None}),
    "short": (short_steps, {}),
    "ops": (short_steps, {"ops": True}),
    "triggers": (steps_and_a_pause, {"triggers": modtrace.NonFinite()}),
}


def train_until_killed(path: str, kind: str) -> None:
    """Says the end of each step, as the training knows it: before `rec.step()`, or before the next one's forward."""
    ends = os.open(path + ".ends", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    steps, options = KINDS[kind]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

    with modtrace.record(model, to=path, **options) as rec:
        for _ in steps(rec, train):
            os.write(ends, b"%d\n" % time.perf_counter_ns())


def kill_later(path: str, kind: str, delay_s: float) -> int:
    """Returns when."""
    child = os.fork()
    if not child:
        train_until_killed(path, kind)
        os._exit(1)
    while not (os.path.exists(path + ".ends") and os.path.getsize(path + ".ends")):
        time.sleep(0.002)
    time.sleep(delay_s)
    killed_ns = time.perf_counter_ns()
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return killed_ns


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        path, kind, delay_s = line.split()
        print(kill_later(path, kind, float(delay_s)), flush=True)


if __name__ == "__main__":
    main()
