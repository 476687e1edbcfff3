"""What made non-finite values inside of a compiled region is looked for inside of it."""

import torch
from torch import nn

import modtrace


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
    assert found.remedy == 'record(compiled="inside") names the module inside of this compiled one'
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
