"""Whatever names modules have, and in which order and groups they run: a changed op is named, and nothing else."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import modtrace

WIDTH, ROWS = 6, 3
CAPTURES = {
    "whole": modtrace.Capture(roles="all", tensors=True),
    "sketches": modtrace.Capture(roles="all", hash=True, sketch=True),
}


class Linear(nn.Module):
    """A linear layer, an activation, and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.act = nn.Linear(WIDTH, WIDTH), 1.5, torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) * self.factor


class Norm(nn.Module):
    """A normalization with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x)


class Gate(nn.Module):
    """Two linear layers, one of which gates the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act = torch.sigmoid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.gate(x)) * self.up(x)


LAYERS = {"linear": Linear, "norm": Norm, "gate": Gate}


class Net(nn.Module):
    """Branches that do not depend on each other, and a head over their sum."""

    def __init__(
        self, branches: Sequence[nn.Module], names: Sequence[str], order: Sequence[int], head: nn.Module
    ) -> None:
        super().__init__()
        self.names, self.order = list(names), list(order)
        for name, branch in zip(names, branches, strict=True):
            self.add_module(name, branch)
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {at: self._modules[self.names[at]](x) for at in self.order}
        return self.head(torch.stack([made[at] for at in sorted(made)]).sum(0))


class Structure(NamedTuple):
    """How a model is written."""

    names: Sequence[str]  # of layers and groups, as many as there may be
    order: Sequence[int]  # in which branches are called
    sizes: Sequence[int]  # of the groups of layers in a branch, again and again


class Fault(NamedTuple):
    kind: str
    at: int  # which of the layers that can have it


NAMES = st.lists(
    st.text("abcdefghijklmnop", min_size=1, max_size=3).map("n{}".format),
    min_size=24,
    max_size=24,
    unique=True,
)
KINDS = st.lists(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3), min_size=1, max_size=3)
STRUCTURES = st.builds(
    Structure, NAMES, st.permutations(range(3)), st.lists(st.integers(1, 3), min_size=1, max_size=3)
)
FAULTS = st.builds(Fault, st.sampled_from(["factor", "activation", "epsilon", "weight"]), st.integers(0, 8))


def make_layers(kinds: Sequence[Sequence[str]]) -> list[list[nn.Module]]:
    torch.manual_seed(0)
    return [[LAYERS[kind]() for kind in each] for each in kinds]


def build(layers: Sequence[Sequence[nn.Module]], structure: Structure) -> Net:
    """Writes a model of these layers, those of each branch in groups."""
    names = iter(structure.names)
    branches = []
    for branch in layers:
        left, groups = [*branch], []
        while left:
            size = structure.sizes[len(groups) % len(structure.sizes)]
            group = nn.Sequential()
            for layer in left[:size]:
                group.add_module(next(names), layer)
            groups.append(group)
            del left[:size]
        outer = nn.Sequential()
        for group in groups:
            outer.add_module(next(names), group)
        branches.append(outer)
    order = [at for at in structure.order if at < len(branches)]
    torch.manual_seed(1)
    return Net(branches, [next(names) for _ in branches], order, nn.Linear(WIDTH, 2))


def plant(layers: Sequence[Sequence[nn.Module]], fault: Fault) -> nn.Module | None:
    """Changes one op, and returns the layer in which it is; None if no layer has such an op."""
    wanted = {"factor": Linear, "activation": Linear | Gate, "epsilon": Norm, "weight": Linear}[fault.kind]
    able = [each for branch in layers for each in branch if isinstance(each, wanted)]
    if not able:
        return None
    layer = able[fault.at % len(able)]
    if fault.kind == "factor":
        layer.factor = 1.75
    elif fault.kind == "activation":
        layer.act = torch.relu
    elif fault.kind == "epsilon":
        layer.norm.eps = 0.5
    else:
        with torch.no_grad():
            layer.linear.weight[0].neg_()
    return layer


def record(net: Net, capture: modtrace.Capture) -> modtrace.Recording:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    with modtrace.record(net, ops=True, values=capture, strict=True) as rec:
        net(x).square().sum().backward()
    return rec


def path_of(net: Net, layer: nn.Module) -> str:
    return next(name for name, module in net.named_modules() if module is layer)


OPS = {
    "factor": ("aten.mul.Tensor",),
    "activation": ("aten.tanh.default", "aten.sigmoid.default", "aten.relu.default"),
    "epsilon": ("aten.native_layer_norm.default",),
    "weight": ("aten.addmm.default", None),
}


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(KINDS, STRUCTURES, STRUCTURES, FAULTS, st.sampled_from(sorted(CAPTURES)))
def test_equal_runs_are_equal_and_a_changed_op_is_named(
    kinds: list[list[str]], structure: Structure, other: Structure, fault: Fault, capture: str
) -> None:
    layers, layers_b = make_layers(kinds), make_layers(kinds)
    first, second = build(layers, structure), build(layers_b, other)
    whole = record(first, CAPTURES[capture])
    found = modtrace.compare(whole, record(second, CAPTURES[capture]), map="auto", allow_missing=True)
    assert found.ok, str(found)

    changed = plant(layers_b, fault)
    if changed is None:
        return
    number = [each for branch in layers_b for each in branch].index(changed)
    path = path_of(first, [each for branch in layers for each in branch][number])
    found = modtrace.compare(whole, record(second, CAPTURES[capture]), map="auto", allow_missing=True)
    assert not found.ok and found.first is not None
    assert found.first.path is not None and f"{found.first.path}.".startswith(f"{path}."), (path, str(found))
    assert found.first.op in OPS[fault.kind], str(found)
