"""Runs a model eagerly, compiled, and compiled with what is inside of it measured."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import modtrace

#: Makes a model with the keyword arguments of its call.
Make = Callable[[], tuple[nn.Module, dict[str, Any]]]

#: A measured row: what it is of, and its statistics.
Site = tuple[int, str, int, str, str, str]
Rows = dict[Site, tuple[Any, ...]]


class Run(NamedTuple):
    """What a run has computed, and what was recorded of it."""

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    graphs: int
    rec: modtrace.Recording | None


def run(
    make: Make,
    backend: str | None = None,
    *,
    compiled: str | None = "boundary",
    steps: int = 2,
    calls: int = 1,
    call: Callable[..., Any] | None = None,
    values: Any = "stats",
    ops: bool = False,
) -> Run:
    """Trains a model for some steps.

    Args:
        make: makes the model.
        backend: of torch.compile; None runs eagerly.
        compiled: what is recorded; None records nothing.
        steps: how many steps.
        calls: forwards in a step, before one backward of all.
        call: calls the model instead of its own forward: `call(model, **inputs)`.
        values: what is measured.
        ops: whether ops are recorded.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = make()
    counter = CompileCounterWithBackend(backend or "eager")
    called = model if backend is None else torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []

    def train() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = sum(loss_of((call or _call)(called, **inputs)) for _ in range(calls))
            loss.backward()
            losses.append(loss.detach().clone())
            optimizer.step()

    if compiled is None:
        train()
        rec = None
    else:
        with modtrace.record(model, strict=True, compiled=compiled, values=values, ops=ops) as rec:
            train()
    gradients = [each.grad for each in model.parameters()]
    return Run(losses, gradients, counter.frame_count, rec)


def _call(model: nn.Module, **inputs: Any) -> Any:
    return model(**inputs)


def loss_of(output: Any) -> torch.Tensor:
    """Returns the sum of squares of all floating tensors of an output that have a gradient."""
    found = modtrace_tensors(output)
    return sum(each.float().pow(2).mean() for each in found if each.requires_grad)


def modtrace_tensors(output: Any) -> list[torch.Tensor]:
    """Returns the tensors in tuples, lists, dictionaries and outputs of transformers."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return (
        [each for part in output for each in modtrace_tensors(part)]
        if isinstance(output, (list, tuple))
        else []
    )


def rows_of(rec: modtrace.Recording, *roles: str) -> Rows:
    """Returns the measured rows by step, path, n-th call, role, slot and phase.

    What a compiled model returns is measured at the model, or else at its wrapper.
    """
    sites = {row["site_id"]: row for row in rec.table("sites").to_pylist()}
    modules = {row["module_id"]: row for row in rec.table("modules").to_pylist()}
    found: Rows = {}
    of_wrappers: Rows = {}
    for row in rec.table("values").to_pylist():
        site = sites[row["site_id"]]
        if site["role"] not in roles:
            continue
        module = modules[site["module_id"]]
        rows = of_wrappers if module["type"] == "OptimizedModule" else found
        key = (row["step"], module["path"], site["nth"], site["role"], site["slot"], row["phase"])
        assert key not in rows
        names = ("shape", "dtype", "count", "sum", "sumsq", "min", "max", "nan_count", "inf_count")
        rows[key] = tuple(row[name] for name in names)
    return of_wrappers | found


def same_bits(these: Run, those: Run) -> bool:
    """Returns whether both runs have computed the same losses and gradients."""
    a, b = (*these.losses, *these.gradients), (*those.losses, *those.gradients)
    return len(a) == len(b) and all(
        one is other is None or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(a, b, strict=True)
    )
