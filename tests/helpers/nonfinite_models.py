"""Models with one planted mistake each that makes NaN or infinite values, and training of them under a recording."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import modtrace

#: What the answer by op takes: outputs of ops and what they read first, beside the usual.
BY_OP = modtrace.Capture(
    roles=("output", "grad_output", "parameter", "parameter_grad", "buffer", "op_output", "leaf")
)

Step = Callable[[int], Any]


class Applied(nn.Module):
    """A linear layer, and a function behind it: the planted one."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x))


def record_training(
    model: nn.Module, inputs: Step, *, loss: Callable[[Any], torch.Tensor], steps: int = 2, **options: Any
) -> modtrace.Recording:
    """Returns the recording of some training steps with ops and their values."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with modtrace.record(model, **{"ops": True, "values": BY_OP, **options}) as rec:
        for step in range(steps):
            given = inputs(step)
            found = loss(model(**given) if isinstance(given, dict) else model(given))
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
    return rec


def record_planted(
    function: Callable[[torch.Tensor], torch.Tensor], steps: int = 2, **options: Any
) -> modtrace.Recording:
    """Returns the recording of a model in whose second layer a function is planted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Applied(function), nn.Linear(8, 2))
    return record_training(
        model, lambda step: torch.randn(4, 8), loss=lambda y: y.square().mean(), steps=steps, **options
    )
