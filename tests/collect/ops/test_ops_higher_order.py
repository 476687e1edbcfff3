"""Higher-order ops, which trace before they run, and transforms: nothing is missing, and no mark says so."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_op
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import modtrace

pytestmark = pytest.mark.usefixtures("seeded")


class Counts(TorchDispatchMode):
    """Counts ops, and is left alone by torch's compiler."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self, function: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _cond(net: Net, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: net.a(x).sin(), lambda x: net.b(x).cos(), (x,))


def _while(net: Net, x: Tensor) -> Tensor:
    start = (torch.tensor(0), net.a(x).detach())
    _, y = while_loop(lambda at, _: at < 3, lambda at, x: (at + 1, x.sin()), start)
    return net.b(y)


def _map(net: Net, x: Tensor) -> Tensor:
    return map_op(lambda row: row.sin() + 1, net.a(x))


def _flex(net: Net, x: Tensor) -> Tensor:
    query = net.a(x).detach().view(1, 1, -1, 16)
    return net.b(flex_attention(query, query, query))


def _transforms(net: Net, x: Tensor) -> Tensor:
    gradient = torch.func.grad(lambda x: x.sin().sum())(x)
    return net.a(x) + gradient + torch.vmap(torch.cos)(x) + torch.func.jacrev(torch.square)(x[0]).sum()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("function", [_cond, _while, _map, _flex, _transforms])
def test_ops_are_all_recorded_and_no_mode_of_the_users_is_blamed(function):
    model, x = Net(function), torch.randn(3, 16)

    def step() -> None:
        model(x).sum().backward()

    step()  # compiles what it will
    with Counts() as counts:
        step()
    torch.compiler.reset()  # torch traces again, while we look
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        step()
    rows = rec.table("ops").to_pylist()
    assert Counter(row["name"] for row in rows) == counts.seen
    assert rec.meta.marks == ()
    inside = [row for row in rows if row["phase"] in ("forward", "recompute")]
    assert inside and all(row["call_id"] is not None for row in inside)


@pytest.mark.parametrize("function", [_cond, _map])
def test_what_torch_traces_is_no_call(function):
    model = Net(function)
    with modtrace.record(model, strict=True) as rec:
        model(torch.randn(3, 16)).sum().backward()
    paths = {row["path"] for row in rec.table("modules").to_pylist()}
    assert paths <= {"", "a", "b"}
    [root] = [
        row
        for row in rec.table("calls").to_pylist()
        if row["parent_call_id"] is None and row["phase"] == "forward"
    ]
    assert root["nth"] == 0
