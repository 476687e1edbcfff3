"""Whatever is inserted, deleted, renamed, repeated or reordered: a difference is found, or its site is listed."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

import modtrace

WIDTH = 4
BRANCHES, LAYERS = 3, 3


class Layer(nn.Module):
    """A linear layer, an op that a fault changes, and ops without an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.idle = nn.Linear(WIDTH, WIDTH), 1.5, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.idle):
            x.cos()
        return (self.linear(x) * self.factor).tanh()


class Branch(nn.Module):
    """Layers with names, some of which are called once more for nothing."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names, self.repeated = list(names), -1
        for name in names:
            self.add_module(name, Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, name in enumerate(self.names):
            given, x = x, getattr(self, name)(x)
            if number == self.repeated:
                getattr(self, name)(given)
        return x


class Net(nn.Module):
    """Branches that do not depend on each other, and a sum of them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict(
            {f"b{n}": Branch([f"l{k}" for k in range(size)]) for n, size in enumerate(sizes)}
        )
        self.order = list(self.branches)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {name: self.branches[name](x) for name in self.order}
        return self.head(sum(made[name] for name in sorted(made)))


class Change(NamedTuple):
    kind: str  # insert, rename, repeat, reorder, idle
    branch: int
    layer: int


CHANGES = st.builds(
    Change,
    st.sampled_from(["insert", "rename", "repeat", "reorder", "idle"]),
    st.integers(0, BRANCHES - 1),
    st.integers(0, LAYERS - 1),
)
NETS = st.lists(st.integers(1, LAYERS), min_size=1, max_size=BRANCHES)


def apply(net: Net, change: Change) -> None:
    """Changes the structure and not what is computed."""
    branch = net.branches[f"b{change.branch % len(net.branches)}"]
    at = change.layer % len(branch.names)
    if change.kind == "insert":
        name = f"extra{len(branch.names)}"
        branch.add_module(name, nn.Identity())
        branch.names.insert(at, name)
    elif change.kind == "rename":
        old = branch.names[at]
        branch.names[at] = f"{old}_renamed"
        branch.add_module(branch.names[at], branch._modules.pop(old))
    elif change.kind == "repeat":
        branch.repeated = at
    elif change.kind == "reorder":
        net.order.reverse()
    elif isinstance(getattr(branch, branch.names[at]), Layer):
        getattr(branch, branch.names[at]).idle += 1


def make(sizes: Sequence[int]) -> Net:
    torch.manual_seed(0)
    return Net(sizes)


def record(net: Net) -> modtrace.Recording:
    captured = modtrace.Capture(roles="all", tensors=True)
    torch.manual_seed(1)
    with modtrace.record(net, ops=True, values=captured, strict=True) as rec:
        net(torch.randn(3, WIDTH)).sum().backward()
    return rec


def layers_of(net: Net) -> list[Layer]:
    return [each for each in net.modules() if isinstance(each, Layer)]


def path_of(net: Net, layer: nn.Module) -> str:
    return next(name for name, module in net.named_modules() if module is layer)


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(NETS, st.lists(CHANGES, max_size=4), st.lists(CHANGES, max_size=2), st.integers(0, 8))
@example([3], [Change("insert", 0, 2), Change("insert", 0, 2)], [Change("insert", 0, 1)], 2)
@example(
    [3],
    [Change("rename", 0, 1), Change("rename", 0, 2), Change("idle", 0, 2)],
    [Change("repeat", 0, 2), Change("insert", 0, 0)],
    2,
)
@example(
    [3],
    [Change("rename", 0, 1), Change("insert", 0, 2), Change("idle", 0, 2)],
    [Change("insert", 0, 0), Change("repeat", 0, 2)],
    2,
)
@example(
    [2],
    [Change("reorder", 0, 2), Change("rename", 0, 0), Change("rename", 0, 1), Change("repeat", 0, 1)],
    [Change("repeat", 0, 0)],
    0,
)
def test_planted_difference_is_found_or_its_site_is_listed(
    sizes: list[int], changes: list[Change], others: list[Change], at: int
) -> None:
    first, second = make(sizes), make(sizes)
    for change in others:
        apply(first, change)
    for change in changes:
        apply(second, change)
    whole = record(first)
    found = modtrace.compare(whole, record(second))
    assert found.first is None, str(found)
    assert found.divergences == ()

    number = at % len(layers_of(first))
    site = path_of(first, sites_in_order(first)[number]), path_of(second, sites_in_order(second)[number])
    sites_in_order(second)[number].factor = 2.0
    found = modtrace.compare(whole, record(second))
    assert not found.ok
    if site[0] == site[1]:
        assert found.first is not None
        assert found.first.path == site[0]
    else:
        assert f"{site[0]} (Layer)" in found.missing.modules
        assert f"{site[1]} (Layer)" in found.extra.modules


def sites_in_order(net: Net) -> list[Layer]:
    """The layers in the order in which the net was made with them."""
    found = layers_of(net)
    return sorted(found, key=lambda each: path_of(net, each).replace("_renamed", ""))
