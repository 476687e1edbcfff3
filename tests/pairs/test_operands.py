"""An op that got other arguments, or reads another tensor, is told with them: what it was given is the answer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import modtrace
from modtrace.analysis.divergence.answer import Comparison
from modtrace.collect.recorder.recorder import Recorder

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
        ("alpha (default) against 0.5",),
    ),
    "axis": (lambda _, y, x: y.softmax(-1), lambda _, y, x: y.softmax(0), "_softmax", ("dim -1 against 0",)),
    "text": (
        lambda _, y, x: functional.gelu(y),
        lambda _, y, x: functional.gelu(y, approximate="tanh"),
        "gelu",
        ("approximate (default) against tanh",),
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


def name_op(found: Comparison) -> str:
    assert found.first is not None
    return (found.first.op or "").split(".")[1]


@pytest.mark.parametrize("name", [*ARGUMENTS, *OPERANDS])
def test_what_an_op_is_given_otherwise_is_in_the_first_lines(name: str) -> None:
    one, other, op, given = (ARGUMENTS | OPERANDS)[name]
    arguments, operands = (given, ()) if name in ARGUMENTS else ((), (given,))
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    found = modtrace.compare(Net(one), Net(other), (x,))
    assert name_op(found) == op
    assert found.first is not None
    assert found.first.arguments == arguments and found.first.operands == operands
    assert f"{op} in Net, step 0, forward{': ' * bool(arguments)}{', '.join(arguments)}\n" in str(found)
    assert all(f"  it reads another tensor: {operand}\n" in str(found) for operand in operands)
    assert "its inputs are equal" not in str(found)


CASTS: dict[str, Compute] = {
    "there and back": lambda _, y, x: y.half().float().exp(),
    "behind a view": lambda _, y, x: y.bfloat16().view(-1).float().view(4, 8).exp(),
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", CASTS)
def test_cast_that_rounds_in_one_run_alone_is_where_they_part(name: str, is_first: bool) -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    nets = [Net(CASTS[name]), Net(lambda _, y, x: y.exp())]
    found = modtrace.compare(*(nets if is_first else nets[::-1]), (x,))
    assert name_op(found) == "_to_copy" and found.first is not None
    assert found.first.only_in == ("first" if is_first else "second")
    assert "its inputs are equal" in str(found)  # those of the cast


def test_cast_that_rounds_nothing_is_not_accused_of_what_the_op_behind_it_does() -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    found = modtrace.compare(Net(lambda _, y, x: y.double().float() * 2), Net(lambda _, y, x: y * 3), (x,))
    assert name_op(found) == "mul"


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"lr": 0.02}, "0.9999 against 0.9998"),
        ({"eps": 1e-3}, "1e-08 against 0.001"),
        ({"weight_decay": 0.5}, "0.9999 against 0.995"),
        ({"betas": (0.8, 0.999)}, "weight 0.09999999999999998 against 0.19999999999999996"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_the_ops_of_an_optimizer_are_given_otherwise_is_named(
    options: dict[str, Any], argument: str, foreach: bool
) -> None:
    def train(options: dict[str, Any]) -> Recorder:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach, **{"lr": 0.01} | options)
        values = modtrace.Capture(roles="all", hash=True, sketch=True)
        with modtrace.record(model, ops=True, values=values, strict=True) as rec:
            for _ in range(2):
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return rec

    found = modtrace.compare(train({}), train(options))
    assert found.first is not None
    assert found.first.phase == "optimizer" and found.first.step == 0
    assert len(found.first.arguments) == 1 and found.first.arguments[0].endswith(argument)
    assert found.first.arguments[0].startswith("_foreach_") == foreach
    assert "run has it" not in str(found) and "run lacks" not in str(found)


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


class Turned(nn.Module):
    """Heads in front of a layer, put back in the order in which they were, or not."""

    def __init__(self, is_wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_wrong, self.a, self.b = is_wrong, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.a(x).view(3, 8, 4, 4)
        heads = heads.reshape(3, 4, 8, 4) if self.is_wrong else heads.transpose(1, 2)
        return self.b(heads.transpose(1, 2).reshape(3, 8, 16))


class Scaled(nn.Module):
    """Two branches in either order, of which one has a factor."""

    def __init__(self, is_wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_wrong, self.a, self.b, self.c = is_wrong, *(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_wrong:
            gate = torch.sigmoid(self.b(x) * 1.02)
            return self.c(torch.relu(self.a(x)) * gate)
        return self.c(torch.relu(self.a(x)) * torch.sigmoid(self.b(x)))


class Activated(nn.Module):
    """A layer with an activation, or another one."""

    def __init__(self, is_wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_wrong, self.a, self.b = is_wrong, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(nn.functional.silu(x) if self.is_wrong else nn.functional.gelu(x))


@pytest.mark.parametrize(
    ("make", "op", "said"),
    [
        (
            Turned,
            "aten.addmm.default",
            "its axes were put in another order: mat1 behind transpose x2 against transpose x1",
        ),
        (
            Activated,
            "aten.gelu.default",
            "in its place the second run has silu in Activated, which the first lacks",
        ),
        (Scaled, "aten.mul.Tensor", "only the second run has it; its inputs are equal"),
    ],
)
def test_what_lies_between_equal_tensors_is_told(make: type, op: str, said: str) -> None:
    runs = []
    for is_wrong in (False, True):
        model, x = make(is_wrong), torch.linspace(-2, 2, 384).reshape(3, 8, 16).sin()
        capture = modtrace.Capture(roles="all", hash=True, sketch=True)
        with modtrace.record(model, ops=True, values=capture, strict=True) as rec:
            model(x)
        runs.append(rec)
    found = modtrace.compare(*runs, allow_missing=True)
    assert found.first is not None and found.first.op == op and said in str(found), str(found)
