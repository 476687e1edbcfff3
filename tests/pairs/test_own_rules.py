"""The rules that `map="auto"` makes are rules that it accepts, whatever stands for indices in paths."""

import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import modtrace


def make_layers(count: int) -> nn.Module:
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(count))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Numbered(nn.Module):
    """Indices of layers, and indices inside of these."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = make_layers(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Port(nn.Module):
    """Names inside of numbered layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Named() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Lists(nn.Module):
    """Each kind of module in a list of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(count))
        self.acts = nn.ModuleList(nn.GELU() for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(16, 8) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, act, down in zip(self.up, self.acts, self.down, strict=True):
            x = x + down(act(up(x)))
        return x


class Renamed(nn.Module):
    """Layers whose three modules are called in one order under names in another."""

    def __init__(self, names: Sequence[Sequence[str]], layers: str) -> None:
        super().__init__()
        self.names, self.held = names, layers
        setattr(
            self,
            layers,
            nn.ModuleList(nn.ModuleDict({name: nn.Linear(8, 8) for name in own}) for own in names),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, names in zip(getattr(self, self.held), self.names, strict=True):
            for name in names:
                x = layer[name](x).tanh()
        return x


def copy_linears(one: nn.Module, other: nn.Module, count: int) -> None:
    def linears(model: nn.Module) -> list[nn.Linear]:
        if isinstance(model, Lists):
            return [each for pair in zip(model.up, model.down, strict=True) for each in pair]
        return [each for each in model.modules() if isinstance(each, nn.Linear)]

    pairs = [*zip(linears(one), linears(other), strict=True)]
    assert len(pairs) == 2 * count
    for first, second in pairs:
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize(
    ("make", "make_other"), [(Numbered, Port), (Port, Numbered), (Lists, Port), (Numbered, Lists)]
)
def test_automatic_rules_pair_all_layers(make: type, make_other: type, count: int) -> None:
    torch.manual_seed(0)
    model, port = make(count), make_other(count)
    copy_linears(model, port, count)
    found = modtrace.compare(model, port, (torch.randn(3, 8),), map="auto", allow_missing=True)
    assert found.first is None
    assert not [name for name in found.missing.modules if "Linear" in name or "GELU" in name]
    again = modtrace.compare(model, port, (torch.randn(3, 8),), map=list(found.rules), allow_missing=True)
    assert (again.missing, again.extra) == (found.missing, found.extra)


class Gated(nn.Module):
    """Multiplies two layers, which it calls in the order of their names."""

    def __init__(self, gate: str, up: str, down: str) -> None:
        super().__init__()
        for name, (size, size_out) in {gate: (8, 16), up: (8, 16), down: (16, 8)}.items():
            self.add_module(name, nn.Linear(size, size_out, bias=False))
        self.names = gate, up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {name: self._modules[name](x) for name in sorted(self.names[:2])}
        return self._modules[self.names[2]](nn.functional.silu(made[self.names[0]]) * made[self.names[1]])


@pytest.mark.parametrize("roles", ["all", ["output", "op_output", "leaf"]])
def test_equal_weights_speak_before_the_order_of_calls(roles: str | list[str]) -> None:
    torch.manual_seed(0)
    one = nn.Sequential(Gated("a_gate", "b_up", "down"), Gated("a_gate", "b_up", "down"))
    other = nn.Sequential(Gated("w3", "w1", "w2"), Gated("w3", "w1", "w2"))
    for parameter, source in zip(other.parameters(), one.parameters(), strict=True):
        parameter.data.copy_(source)
    runs = []
    for model in (one, other):
        capture = modtrace.Capture(roles=roles)
        with modtrace.record(model, ops=True, values=capture, strict=True) as rec, torch.no_grad():
            model(torch.linspace(-1, 1, 24).reshape(3, 8))
        runs.append(rec)
    found = modtrace.compare(*runs, map="auto")
    assert found.ok, str(found)
    assert set(found.rules) == {r"(\d+)\.a_gate=\1.w3", r"(\d+)\.b_up=\1.w1", r"(\d+)\.down=\1.w2"}
    assert f"names: {', '.join(found.rules)}" in str(found).splitlines()


class Fused(nn.Module):
    """Gated, with one layer for two, and a module that changes nothing."""

    def __init__(self, model: Gated) -> None:
        super().__init__()
        one, two, self.down = (model.get_submodule(name) for name in model.names)
        self.both, self.drop = nn.Linear(8, 32, bias=False), nn.Dropout(0.0)
        self.both.weight.data.copy_(torch.cat([one.weight, two.weight]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.both(x).chunk(2, -1)
        return self.drop(self.down(nn.functional.silu(one) * two))


class Unfused(Gated):
    """Gated, with a module between the two layers."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self._modules[name] for name in self.names)
        return down(self.act(gate(x)) * up(x))


@pytest.mark.parametrize("kind", [Gated, Unfused])
@pytest.mark.parametrize("is_swapped", [False, True], ids=["into one", "into two"])
def test_fused_layer_is_joined_of_its_parts_and_of_no_other_layer(kind: type, *, is_swapped: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind("gate", "up", "out") for _ in range(3)))
    pair = [model, nn.Sequential(*map(Fused, model))]
    x = torch.randn(3, 8)
    found = modtrace.compare(*pair[:: -1 if is_swapped else 1], (x,), map="auto", allow_missing=True)
    assert found.ok, str(found)
    assert not [name for name in (*found.missing.modules, *found.extra.modules) if "Linear" in name]
    pair[1][1].down = nn.Linear(16, 8, bias=False)
    pair[1][1].down.weight.data.copy_(model[1].out.weight * 1.01)
    found = modtrace.compare(*pair[:: -1 if is_swapped else 1], (x,), map="auto", allow_missing=True)
    assert found.first is not None
    assert found.first.path == ("1.down" if is_swapped else "1.out"), str(found)


def make_linears() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8) for _ in range(4)]


class Keyed(nn.Module):
    """Layers in a dictionary under names of any kind."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(dict(zip(names, make_linears(), strict=False)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.relu(layer(x)) + x
        return x


class Shared(nn.Module):
    """A block that is called three times."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        layers = make_linears()
        self.add_module(name, nn.Sequential(layers[0], nn.Tanh(), layers[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self._modules[self.name](x)
        return x


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def make_sequential(*between: nn.Module) -> nn.Module:
    first, *others = make_linears()
    return nn.Sequential(first, *between, *others[:2], nn.ReLU(), others[2])


@pytest.mark.parametrize(
    ("model", "port"),
    [
        (Keyed("p", "q"), Keyed("x", r"\1y")),
        (Keyed("a", "c"), Keyed("x=", "y")),
        (Keyed("0", "1", "2", "3"), Keyed("1", "2", "3", "4")),
        (Shared("shared"), Wrapped(Shared("layer"))),
        (make_sequential(), make_sequential(nn.Dropout(0.0))),
        (make_sequential(nn.Identity(), nn.Dropout(0.0)), make_sequential()),
    ],
    ids=["backslash", "equals sign", "moved by one", "wrapped", "a layer more", "two layers less"],
)
def test_no_name_keeps_equal_weights_apart(model: nn.Module, port: nn.Module) -> None:
    x = torch.linspace(-1, 1, 24).reshape(3, 8)
    found = modtrace.compare(model, port, (x,), map="auto", gradients=True, allow_missing=True)
    assert found.ok, str(found)
    unsaid = {name for name, _ in port.named_modules() if "=" in name}
    assert len([name for name in found.missing.modules if "Linear" in name]) == len(unsaid), str(found)
    again = modtrace.compare(model, port, (x,), map=list(found.rules), gradients=True, allow_missing=True)
    assert (again.missing, again.extra) == (found.missing, found.extra)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.permutations("xyz"), min_size=1, max_size=4),
    st.sampled_from(["blocks", "layers"]),
    st.booleans(),
)
@example([("x", "y", "z"), ("y", "x", "z"), ("x", "y", "z")], "blocks", True)
@example([("y", "x", "z"), ("x", "y", "z"), ("y", "x", "z")], "blocks", True)
@example([("y", "x", "z"), ("z", "x", "y"), ("y", "z", "x"), ("x", "y", "z")], "layers", True)
def test_rules_say_which_layers_have_exchanged_names(
    names: Sequence[Sequence[str]], layers: str, have_equal_weights: bool
) -> None:
    torch.manual_seed(0)
    model = Renamed(["xyz"] * len(names), "blocks")
    torch.manual_seed(int(not have_equal_weights))
    pair, args = (model, Renamed(names, layers)), (torch.linspace(-1, 1, 16).reshape(2, 8),)
    automatic = modtrace.compare(*pair, args, map="auto")
    by_rules = modtrace.compare(*pair, args, map=modtrace.compare(*pair, args).proposed)
    assert (by_rules.rules, by_rules.table) == (automatic.rules, automatic.table)
    assert automatic.ok == have_equal_weights, automatic.rules


@pytest.mark.parametrize(
    ("rule", "meant"),
    [
        ("blocks.*=layers.*", r"blocks\.([^.]*)=layers.\1"),
        ("*.0=**.0", r"([^.]*)\.0=\1.0"),
        ("blocks.*.0=layers.*.fc1", r"blocks\.([^.]*)\.0=layers.\1.fc1"),
        (r"blocks\.(\d+)=layers.*", r"blocks\.(\d+)=layers.\1"),
        ("re:blocks=layers", "blocks=layers"),
        ("blocks.?=layers.?", r"blocks\.([^.])=layers.\1"),
    ],
)
def test_rule_that_is_written_as_a_glob_is_rewritten(rule: str, meant: str) -> None:
    torch.manual_seed(0)
    models = Numbered(2), Port(2)
    copy_linears(*models, 2)
    with pytest.raises(
        ValueError, match=rf"; a rule is a regular expression .*: write '{re.escape(meant)}'$"
    ):
        modtrace.compare(*models, (torch.ones(3, 8),), map=rule)
    if rule.startswith(("blocks.*=", "blocks.?", "re:")):
        modtrace.compare(*models, (torch.ones(3, 8),), map=meant)


@pytest.mark.parametrize("rule", ["blks=layers", "blocks=lyers", r"blocks\.(\d+)=layers.\2"])
def test_rule_that_is_a_regular_expression_is_not_called_a_glob(rule: str) -> None:
    with pytest.raises(ValueError, match="map=") as error:
        modtrace.compare(Numbered(2), Port(2), (torch.ones(3, 8),), map=rule)
    assert "glob" not in str(error.value)
