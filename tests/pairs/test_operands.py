"""An op that got other arguments, or reads another tensor, is told with them: what it was given is the answer."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import modtrace

Compute = Callable[["Net", torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.compute(self, self.a(x), x))


ARGUMENTS: dict[str, tuple[Compute, Compute, str, tuple[str, ...]]] = {
    "eps": (
        lambda _, y, x: functional.layer_norm(y, (8,), eps=1e-3),
        lambda _, y, x: functional.layer_norm(y, (8,)),
        "native_layer_norm",
        ("eps 0.001 against 1e-05",),
    ),
    "factor": (lambda _, y, x: y * 2, lambda _, y, x: y * 3, "mul", ("other 2 against 3",)),
    "default": (
        lambda _, y, x: torch.add(y, x),
        lambda _, y, x: torch.add(y, x, alpha=0.5),
        "add",
        ("alpha by default against 0.5",),
    ),
    "axis": (lambda _, y, x: y.softmax(-1), lambda _, y, x: y.softmax(0), "_softmax", ("dim -1 against 0",)),
    "text": (
        lambda _, y, x: functional.gelu(y),
        lambda _, y, x: functional.gelu(y, approximate="tanh"),
        "gelu",
        ("approximate by default against tanh",),
    ),
    "two": (
        lambda _, y, x: y.clamp(-0.1, 0.1),
        lambda _, y, x: y.clamp(-0.2, 0.3),
        "clamp",
        ("min -0.1 against -0.2", "max 0.1 against 0.3"),
    ),
    "tensor or none": (
        lambda net, y, x: functional.layer_norm(y, (8,), net.a.bias),
        lambda _, y, x: functional.layer_norm(y, (8,)),
        "native_layer_norm",
        ("weight a tensor against null",),
    ),
}


def shared(net: Net, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(y, net.a.weight)


def another(net: Net, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(y, net.b.weight)


def of_the_input(_: Net, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    z = y.relu()
    return z * 2 + x


def of_an_op(_: Net, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    z = y.relu()
    return z * 2 + z


OPERANDS: dict[str, tuple[Compute, Compute, str, str]] = {
    "weight": (shared, another, "mm", "mat2 parameter a.weight against parameter b.weight"),
    "residual": (of_the_input, of_an_op, "add", "other input[0] of a against relu in Net"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_differ_are_in_the_first_line(name: str) -> None:
    one, other, op, arguments = ARGUMENTS[name]
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    found = modtrace.compare(Net(one), Net(other), (x,))
    assert found.first is not None
    assert (found.first.op or "").split(".")[1] == op
    assert found.first.arguments == arguments and found.first.operands == ()
    assert f"{op} in Net, step 0, forward: {', '.join(arguments)}\n" in str(found)
    assert "its inputs are equal" not in str(found)


@pytest.mark.parametrize("name", OPERANDS)
def test_tensors_that_are_others_are_named(name: str) -> None:
    one, other, op, operand = OPERANDS[name]
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    found = modtrace.compare(Net(one), Net(other), (x,))
    assert found.first is not None
    assert (found.first.op or "").split(".")[1] == op
    assert found.first.operands == (operand,) and found.first.arguments == ()
    assert f"  it reads another tensor: {operand}\n" in str(found)


class Tied(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(tokens))


def test_weight_that_is_tied_in_one_run_alone_is_what_the_head_reads() -> None:
    found = modtrace.compare(Tied(True), Tied(False), (torch.arange(10),), allow_missing=True)
    assert found.first is not None
    assert found.first.operands == ("mat2 parameter tokens.weight against parameter head.weight",)
    one = Tied(False)
    one.head.weight.data.copy_(one.tokens.weight)
    assert modtrace.compare(Tied(True), one, (torch.arange(10),), allow_missing=True).ok
