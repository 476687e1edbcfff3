"""When two runs of several ranks count as laid out otherwise: their missing and further ops are then the layout's."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace.analysis.tables.meshes import _have_other_meshes, find_ops_without_gradient
from modtrace.analysis.tables.ranks import RanksData

WHOLE, FIRST, SECOND = (None, None), ("mesh", "S(0)"), ("mesh", "S(1)")


class Run(RanksData):
    """A run of two ranks that divide the batch, with the layout of each parameter."""

    degree: Any = 2
    groups: Any = frozenset()
    parameters: Any = None
    meta: Any = SimpleNamespace(world_size=2)

    def __init__(self, degree: int = 2, groups: Iterable[str] = (), size: int = 8, **layout: Any) -> None:
        self.degree, self.groups = degree, frozenset(groups)
        self.parameters = {name: (placed, size) for name, placed in layout.items()}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Run(up=FIRST, down=SECOND), Run(up=FIRST, down=SECOND), False),
        (Run(up=FIRST, down=SECOND), Run(up=SECOND, down=FIRST), True),
        (Run(up=FIRST), Run(up=FIRST, bias=WHOLE), False),  # a parameter more is a difference to tell
        (Run(up=FIRST), Run(up=WHOLE), True),
        (Run(up=FIRST), Run(other=WHOLE), True),
        (Run(up=FIRST), Run(other=FIRST), False),
        (Run(up=FIRST), Run(), False),
        # The number of unequal outputs is no layout: a lost sampler, or dropout that differs from rank to rank.
        (Run(up=FIRST), Run(up=FIRST, degree=1), False),
        (Run(up=WHOLE, groups=["0-1"]), Run(up=WHOLE, groups=["0-1"], degree=1), False),
        (Run(groups=["0-1"]), Run(groups=["0-1"], degree=1), False),
        (Run(up=WHOLE, groups=["0-1"]), Run(up=WHOLE, groups=["0-1", "0", "1"]), True),
        (Run(up=WHOLE, groups=["0-1"]), Run(up=WHOLE, groups=["0-1"], degree=1, size=4), True),
        (Run(up=WHOLE, groups=["0-1"]), Run(up=WHOLE, groups=["0-1"], size=4), False),
        (Run(up=FIRST, groups=["0-3"]), Run(up=FIRST, groups=["0-3", "0-1", "2-3"], degree=1), True),
        (Run(up=WHOLE), Run(up=WHOLE, degree=1), True),
        (Run(up=WHOLE, groups=["0-1"]), Run(up=WHOLE, degree=1), True),
    ],
    ids=[
        "equal",
        "exchanged",
        "one more",
        "not sharded",
        "other names",
        "other names, same layout",
        "not measured",
        "other outputs of shards",
        "other outputs of replicas",
        "other outputs, parameters not measured",
        "other groups",
        "cut by hand",
        "narrower",
        "same shards, other groups",
        "other outputs, nothing tells",
        "other outputs, one has no groups",
    ],
)
def test_layouts_are_compared_parameter_by_parameter(a: Run, b: Run, expected: bool) -> None:
    assert (_have_other_meshes(a, b), _have_other_meshes(b, a)) == (expected, expected)


class Weighted(torch.autograd.Function):
    """Its backward computes a factor of its own, from what forward has kept and from nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sin(x)
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Tensor:
        x, y = ctx.saved_tensors
        factor = (torch.cos(x) * x + y) * torch.full(x.shape, 2.0)
        return gradient * factor


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "custom": Weighted.apply,
    "custom twice": lambda x: Weighted.apply(Weighted.apply(x)),
    "power": lambda x: x**3,
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1).log(),
    "std": lambda x: x / x.std(0),
    "product": lambda x: x.prod(0) + x.cumprod(0).sum(0),
    "layer norm": lambda x: nn.functional.layer_norm(x, (8,)),
    "divided": lambda x: (x + 3) / (x.square() + 1),
    "gelu": nn.functional.gelu,
    "checkpoint": lambda x: checkpoint(lambda y: Weighted.apply(y.tanh()), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ops_without_gradient_are_those_whose_outputs_stay_if_the_loss_is_doubled(name: str) -> None:
    def record(scale: float) -> modtrace.Recording:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), Applied(FUNCTIONS[name]))
        with modtrace.record(net, ops=True) as rec:
            for _ in range(2):
                (net(torch.randn(4, 8)).sum() * scale).backward()
        return rec

    once, twice = record(1.0), record(2.0)
    outputs, outputs_of_twice = (
        rec.frame("values")
        .query("role == 'op_output' and phase == 'backward' and numel > 1")
        .groupby("op_id")["sum"]
        .first()
        for rec in (once, twice)
    )
    ratio = (outputs_of_twice / outputs)[outputs != 0]
    assert {*ratio} <= {1.0, 2.0}
    free = {*find_ops_without_gradient(once.data).tolist()}
    assert {*ratio.index[ratio == 1].tolist()} == free & {*ratio.index.tolist()}
