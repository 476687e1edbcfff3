"""Trains a tiny GPT with everything captured, and counts what the process holds."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import modtrace
import zoo
from helpers.ours import objects_of_ours, settled
from modtrace import Capture, TensorOptions

KB, MB = 2**10, 2**20

#: A trigger fires in each step with such a number.
FIRES_EVERY = 40


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """A function of a user's."""
    return {"dim": tensor.dim(), "shape": list(tensor.shape)}


#: All roles in each step, and all there is of them in each fourth one (100 ms a step); some tensors whole, at once and
#: as late as they may be.
EVERYTHING = [
    Capture(roles="all", micro_batches=True),
    Capture(roles="all", stats=2, hash=True, sketch=True, sample=8, function=described, steps="::4"),
    Capture(roles=("input", "output", "grad_output"), include="blocks.0.fc", tensors=True),
    Capture(roles=("output", "parameter", "parameter_grad"), include="norm", tensors="lazy"),
]

#: `OutOfBand` keeps a window of each site, and does not fire.
TRIGGERS = [modtrace.NonFinite(), modtrace.Above("log.loss", 100.0), modtrace.OutOfBand("rms", factor=1e6)]

#: Of rows and of whole tensors: filled within 50 steps, so that old ones are dropped from early on.
FEW = {"max_bytes": 512 * KB, "tensors": TensorOptions(max_bytes=64 * KB)}


def _to(folder: Path) -> dict[str, Any]:
    return {"to": folder / "run.modtrace", "tensors": TensorOptions(max_bytes=MB)}


#: What runs beside the training, by what it does.
KINDS: dict[str, Callable[[Path], Any]] = {
    "to a folder": lambda folder: modtrace.record(strict=True, values=EVERYTHING, **_to(folder)),
    "in memory": lambda folder: modtrace.record(strict=True, values=EVERYTHING, **FEW),
    "in memory, with ops": lambda folder: modtrace.record(strict=True, values=EVERYTHING, ops=True, **FEW),
    "the last twenty": lambda folder: modtrace.record(
        strict=True, values=EVERYTHING, keep_last=20, triggers=TRIGGERS, **_to(folder)
    ),
    "as many of the last twenty as fit": lambda folder: modtrace.record(
        strict=True, values=EVERYTHING, keep_last=20, triggers=TRIGGERS, max_bytes=512 * KB, **_to(folder)
    ),
    "tracked": lambda folder: nullcontext(),
    "tracked anew in each step": lambda folder: nullcontext(),
}


class Training:
    """Steps of a small GPT with a buffer."""

    def __init__(self, rec: modtrace.LiveRecording | None, kind: str = "") -> None:
        torch.manual_seed(0)
        self.rec = rec
        self.model = zoo.TiedGPT(layers=1, width=8)
        self.model.register_buffer("scale", torch.ones(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.steps = 0
        self.is_tracked_anew = kind == "tracked anew in each step"
        self.tracker = modtrace.track(self.model, strict=True) if kind == "tracked" else None

    def run_to(self, step: int) -> None:
        """Runs until so many steps have ended."""
        while self.steps < step:
            with self._tracked():
                self._step()

    def close(self) -> None:
        if self.tracker is not None:
            self.tracker.unregister()

    def _step(self) -> None:
        tokens = torch.randint(0, 17, (1, 8))
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        if self.rec is not None:
            self.rec.log(loss=1000.0 if self.steps % FIRES_EVERY == 0 else loss)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        if self.is_tracked_anew:
            with modtrace.track(self.model, strict=True) as tracker:
                yield
            assert len(tracker) == STASHES_OF_A_STEP
            return
        yield
        if self.tracker is not None:
            assert len(self.tracker) == STASHES_OF_A_STEP
            self.tracker.clear()


#: An output and its gradient of each of 15 calls.
STASHES_OF_A_STEP = 30


class _NoRecording:
    """In the place of a recording, where nothing has to be written."""

    data = None


def counts_of(training: Training) -> Counter[str]:
    """What is alive of ours, and what the process has open, once all is written and nobody's garbage is left."""
    if training.is_tracked_anew:
        training.run_to(training.steps + 1)
        found = objects_of_ours()
    else:
        found = settled(training.rec or _NoRecording(), lambda: training.run_to(training.steps + 1))
    for name in BOUNDED_ELSEWHERE:
        found.pop(name, None)
    found["torch tensors"] = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    if sys.platform == "linux":
        found["threads"] = len(os.listdir("/proc/self/task"))
        found["open files"] = len(os.listdir("/proc/self/fd"))
    return found


#: Rows and whole tensors in memory, the names of those in the file that is written, those that wait for it, notes of
#: triggers, and what ops were given (AdamW gives them other numbers in each step): each has a test of its own.
BOUNDED_ELSEWHERE = (
    "_Sealed",
    "_Words",
    "_Kept",
    "RawTensor",
    "StoredTensor",
    "TensorPart",
    "Note",
    "Arguments",
)
