"""Counts the floating-point operations of what runs, from the shapes that are left of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modtrace.collect.flops.lookup import count_flops


class FlopMode(TorchDispatchMode):
    """Lists the operators that do not count as nothing, with their flops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[str, int | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        flops = count_flops(func, shapes(args), shapes(kwargs or {}), shapes(outputs))
        if flops != 0:
            self.counts.append((func.name(), flops))
        return outputs


def shapes(value: Any) -> Any:
    """The same with a `torch.Size` for each tensor."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, list | tuple):
        return [shapes(each) for each in value]
    if isinstance(value, dict):
        return {key: shapes(each) for key, each in value.items()}
    return value


def flops_of(run: Callable[[], Any]) -> list[tuple[str, int | None]]:
    """Each operator of a run that counts, in order."""
    with FlopMode() as mode:
        run()
    return mode.counts


def total_flops(run: Callable[[], Any]) -> int:
    """The sum over the operators of a run; each must be known."""
    counts = flops_of(run)
    assert [name for name, flops in counts if flops is None] == []
    return sum(flops for _, flops in counts if flops is not None)


def forward_and_backward(model: nn.Module, *inputs: Tensor) -> tuple[int, int]:
    """What a forward takes, and the backward of the sum of its first output."""
    kept = []

    def forward() -> None:
        outputs = model(*inputs)
        kept.append((outputs[0] if isinstance(outputs, tuple) else outputs).sum())

    return total_flops(forward), total_flops(lambda: kept[0].backward())
