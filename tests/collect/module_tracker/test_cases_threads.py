"""Several threads, in which PyTorch's trackers fail."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
import torch.utils.module_tracker
from torch import nn

from helpers.asked import GLOBAL
from helpers.tracker_runs import (
    BOTH_OF_TORCH,
    DISTRIBUTED,
    MARKS,
    TIMEOUT_S,
    TORCHS,
    in_threads,
    of_torch,
    train,
)
from modtrace import ModuleTracker

pytestmark = MARKS


class Meeting(nn.Module):
    """In its forward and in its backward it asks while another thread is at the same place."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        super().__init__()
        self.__dict__["ask"] = ask
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        self.ask("forward")
        return AskInBackward.apply(self.l(x), self.ask)


class Other(Meeting):
    """The same, with another name."""


class AskInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ask):
        ctx.ask = ask
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.ask("backward")
        return grad, None


def meetings(tracker: Any, *, backward: bool) -> list[list[tuple[str, set[str]]]]:
    """What two threads hear, each in a model of its own, at the same moments."""
    heard: list[list[tuple[str, set[str]]]] = [[], []]
    barrier = threading.Barrier(2)

    def asking(at: int) -> Callable[[str], None]:
        def ask(phase: str) -> None:
            if phase == ("backward" if backward else "forward"):
                barrier.wait(TIMEOUT_S)
                heard[at].append((phase, set(tracker.parents)))
                barrier.wait(TIMEOUT_S)

        return ask

    models = [Meeting(asking(0)), Other(asking(1))]
    run = train if backward else lambda model: model(torch.ones(2, 4))
    in_threads(*(lambda model=model: run(model) for model in models))
    return heard


def test_two_models_in_two_threads_have_their_own_stacks():
    """d09"""
    with ModuleTracker(strict=True) as tracker:
        assert meetings(tracker, backward=False) == [
            [("forward", {GLOBAL, "Meeting"})],
            [("forward", {GLOBAL, "Other"})],
        ]


@BOTH_OF_TORCH
def test_two_models_in_two_threads_see_each_other_with_torch(kind):
    """d09"""
    with of_torch(kind) as tracker:
        both = [("forward", {GLOBAL, "Meeting", "Other"})]
        assert meetings(tracker, backward=False) == [both, both]


def test_backwards_at_once_in_two_threads_have_their_own_stacks():
    """d22"""
    with ModuleTracker(strict=True) as tracker:
        assert meetings(tracker, backward=True) == [
            [("backward", {GLOBAL, "Meeting"})],
            [("backward", {GLOBAL, "Other"})],
        ]


@BOTH_OF_TORCH
def test_backwards_at_once_in_two_threads_see_each_other_with_torch(kind):
    """d22"""
    with of_torch(kind) as tracker:
        both = [("backward", {GLOBAL, "Meeting", "Other"})]
        assert meetings(tracker, backward=True) == [both, both]


class Slow(nn.Module):
    """Two threads are in its forward; one stays when the other has left."""

    def __init__(self, tracker: Any) -> None:
        super().__init__()
        self.__dict__.update(tracker=tracker, entered=threading.Event(), left=threading.Event(), heard={})
        self.l = nn.Linear(4, 4)

    def forward(self, x, stays: bool):
        if stays:
            self.entered.set()
            assert self.left.wait(TIMEOUT_S)
        self.heard[stays] = set(self.tracker.parents)
        return self.l(x)

    def run(self) -> dict[bool, set[str]]:
        def leave_first() -> None:
            assert self.entered.wait(TIMEOUT_S)
            self(torch.ones(2, 4), False)
            self.left.set()

        in_threads(lambda: self(torch.ones(2, 4), True), leave_first)
        return self.heard


def test_one_model_in_two_threads_is_on_both_stacks():
    """d09b"""
    with ModuleTracker(strict=True) as tracker:
        assert Slow(tracker).run() == {False: {GLOBAL, "Slow"}, True: {GLOBAL, "Slow"}}


def test_one_model_in_two_threads_is_lost_by_torch_for_the_one_that_stays():
    """d09b: ModTracker counts, and so is right."""
    with of_torch(TORCHS) as tracker:
        assert Slow(tracker).run() == {False: {GLOBAL, "Slow"}, True: {GLOBAL}}
    with of_torch(DISTRIBUTED) as tracker:
        assert Slow(tracker).run() == {False: {GLOBAL, "Slow"}, True: {GLOBAL, "Slow"}}
