"""What trainings by a framework do: four steps of the optimizer, whatever the case."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Case(NamedTuple):
    """What a training does besides four plain steps."""

    accumulate: int = 1  # batches to a step of the optimizer
    evaluate: bool = False  # on two batches, after every second step
    resume: bool = False  # from a checkpoint that another training has written after two steps
    fail: type[BaseException] | None = None  # what the model's output layer raises in the third batch


class Outcome(NamedTuple):
    """What must be equal with and without a callback."""

    losses: Sequence[float]
    parameters: Sequence[torch.Tensor]


def failing_at(nth: int, error: type[BaseException]) -> Any:
    """A hook for a module that raises in its nth forward, and only there."""
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise error("mine")

    return fail
