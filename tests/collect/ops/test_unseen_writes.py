"""Ops that return nothing of what they write to, as those of foreach and fused optimizers, are writes like others."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import modtrace

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
}


@pytest.mark.parametrize(
    "capture", [modtrace.Capture(roles="all"), modtrace.Capture(roles="all", tensors=True)]
)
@pytest.mark.parametrize("ops", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_measured_as_the_step_leaves_them(name: str, ops: bool, capture: modtrace.Capture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = OPTIMIZERS[name](model.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    left: list[dict[str, tuple[float, float]]] = []
    with modtrace.record(model, ops=ops, values=capture, strict=True) as rec:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), step + 1.0)).square().mean().backward()
            optimizer.step()
            left.append(
                {
                    f"{names[parameter]}.{key}": (float(state.min()), float(state.max()))
                    for parameter, of in optimizer.state.items()
                    for key, state in of.items()
                    if isinstance(state, torch.Tensor)
                }
            )
    rows = [row for row in rec.table("values").to_pylist() if row["site_id"] is not None]
    sites = {site["site_id"]: site for site in rec.table("sites").to_pylist()}
    paths = {module["module_id"]: module["path"] for module in rec.table("modules").to_pylist()}
    found: list[dict[str, tuple[float, float]]] = [{} for _ in left]
    for row in rows:
        site = sites[row["site_id"]]
        if site["role"] == "optimizer_state":
            found[row["step"]][f"{paths[site['module_id']]}.{site['slot']}"] = row["min"], row["max"]
    assert found == left


WRITES: dict[str, Callable[[Sequence[torch.Tensor]], Any]] = {
    "mul": lambda tensors: torch._foreach_mul_(tensors, 2.0),
    "add": lambda tensors: torch._foreach_add_(tensors, tensors),
    "lerp": lambda tensors: torch._foreach_lerp_(tensors, tensors, 0.5),
    "zero": lambda tensors: torch._foreach_zero_(tensors),
}


@pytest.mark.parametrize("name", WRITES)
def test_autograd_refuses_what_was_written_to_as_without_a_recording(name: str) -> None:
    def run(recorded: bool) -> tuple[list[int], str]:
        x = torch.ones(3, requires_grad=True)
        saved = [x.exp(), x.tanh()]
        recording = modtrace.record(ops=True, strict=True) if recorded else nullcontext()
        with recording:
            loss = saved[0].sum() + saved[1].sum()
            with torch.no_grad():
                WRITES[name](saved)
            with pytest.raises(RuntimeError) as raised:
                loss.backward()
        return [each._version for each in saved], str(raised.value).partition(";")[0]

    assert run(True) == run(False)


def out_alone(tensors: Sequence[torch.Tensor]) -> None:
    torch.ops.aten._foreach_add.Scalar_out(tensors[:1], 1.0, out=tensors[1:2])


def by_name(tensors: Sequence[torch.Tensor]) -> None:
    torch.ops.aten._foreach_add_.Scalar(self=tensors, scalar=1.0)


COUNTED: dict[str, Callable[[Sequence[torch.Tensor]], Any]] = {
    **WRITES,
    "out alone": out_alone,
    "by name": by_name,
    "the same twice": lambda tensors: torch._foreach_add_([tensors[0], tensors[0]], 1.0),
    "views of one": lambda tensors: torch._foreach_add_([tensors[0][:1], tensors[0][1:]], 1.0),
    "no write": lambda tensors: torch._foreach_add(tensors, 1.0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_torch_counts_as_many_writes_as_without_a_recording(name: str) -> None:
    def run(recorded: bool) -> list[int]:
        tensors = [torch.ones(3), torch.ones(3)]
        with modtrace.record(ops=True, strict=True) if recorded else nullcontext(), torch.no_grad():
            COUNTED[name](tensors)
        return [each._version for each in tensors]

    assert run(True) == run(False)
