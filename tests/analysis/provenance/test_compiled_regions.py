"""What made non-finite values inside of a compiled region is looked for inside of it."""

import pytest
import torch
import torch._dynamo
from torch import nn

import modtrace

REMEDY = 'record(compiled="inside") (modtrace record --compiled inside) names the module inside of this compiled one'


class LogOf(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(torch.log(x))


def first_of(model: nn.Module, called: nn.Module, **options: str) -> modtrace.NonFinite:
    with modtrace.record(model, **options) as rec:
        called(-torch.ones(2, 4))
    found = rec.first_nonfinite()
    assert found is not None
    return found


def test_compiled_module_is_to_be_measured_inside() -> None:
    model = LogOf()
    found = first_of(model, torch.compile(model, backend="aot_eager"))
    assert found.remedy == REMEDY
    inside = first_of(model, torch.compile(model, backend="aot_eager"), compiled="inside")
    assert inside.path == "inner"
    assert "ops=True" in (inside.remedy or "")


def test_eager_module_is_not_said_to_be_compiled() -> None:
    model = LogOf()
    assert "ops=True" in (first_of(model, model).remedy or "")


class Uncompiled(LogOf):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


def test_module_behind_a_graph_break_is_not_said_to_be_compiled() -> None:
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.eager = Uncompiled()

        def forward(self, x):
            return self.eager(x - 1)

    model = Broken()
    found = first_of(model, torch.compile(model, backend="aot_eager"))
    assert found.path == "eager.inner"
    assert "ops=True" in (found.remedy or "")


def test_op_that_ran_inside_is_named_with_its_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), LogOf())
    with modtrace.record(model, ops=True) as rec:
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(2, 4))
    found = rec.first_nonfinite()
    assert found is not None
    assert (found.path, found.call, found.op) == ("1", 0, "aten.log.default")


def test_buffer_that_an_op_only_writes_to_is_not_measured() -> None:
    class Into(nn.Module):
        def forward(self, x):
            return torch.mm(x, x, out=buffer)

    buffer = torch.full((3, 3), torch.nan)
    model = Into()
    with modtrace.record(model, ops=True, strict=True) as rec, torch.no_grad():
        model(torch.ones(3, 3))
    assert rec.first_nonfinite() is None
    notes = {row["note"] for row in rec.table("values").to_pylist() if row["count"] is None}
    assert notes == {"not measured: nothing has been written to it yet"}


class LogInside(nn.Module):
    """Takes the logarithm of numbers that are below zero if `x` has such."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.log(self.first(x) * 0 + x))


@pytest.mark.compile
@pytest.mark.parametrize("values", [-1.0, 2.0])
def test_kernels_that_are_not_seen_are_not_taken_for_ops(values: float) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(LogInside(), nn.Linear(8, 8))
    found = []
    for options in ({}, {"compiled": "inside"}):
        with modtrace.record(model, ops=True, strict=True, **options) as rec:
            torch.compile(model, fullgraph=True)(torch.full((4, 8), values)).sum().backward()
        found.append(rec.first_nonfinite())
    if values > 0:
        assert found == [None, None]
        return
    whole, inside = found
    assert whole is not None and inside is not None
    assert (whole.path, whole.role, whole.op) == ("", "output", None)
    assert whole.remedy == REMEDY
    assert (inside.path, inside.role, inside.op) == ("0.second", "output", None)
    assert "aot_eager" in (inside.remedy or "")
