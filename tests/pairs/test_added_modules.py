"""The answer on two runs of which one has a module more says so first, and then what differs behind it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.analysis.divergence.answer import UnpairedModule

CAPTURES = {"ops": {"ops": True}, "modules": {"ops": False}}


class Net(nn.Module):
    """Calls its parts one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.norm: nn.Module | None = None
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.embed(x))
        return self.head(x if self.norm is None else self.norm(x))


class Scaled(nn.Module):
    """A norm of another name, of RMS."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt()


class Named(nn.Module):
    """A module with another one inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def add_norm(net: Net) -> None:
    net.norm = nn.LayerNorm(8)


def add_other_norm(net: Net) -> None:
    net.norm = Named(Scaled())


def append(net: Net) -> None:
    net.body.append(nn.Sequential(nn.Linear(8, 8), nn.GELU()))


def change_weight(net: Net) -> None:
    with torch.no_grad():
        net.body[2].weight[0, 0] += 1


def add_identity(net: Net) -> None:
    net.norm = nn.Identity()
    change_weight(net)


def record(change: Callable[[Net], None], **options: bool) -> modtrace.Recording:
    net, x = Net(), torch.linspace(-2, 2, 24).reshape(3, 8)
    change(net)
    with modtrace.record(net, **options) as rec:
        net(x).sum().backward()
    return rec


#: The two changes, the modules that one run has alone, and where the runs part behind them.
CASES: dict[str, tuple[Callable[[Net], None], Callable[[Net], None], list[UnpairedModule], str]] = {
    "added": (
        lambda net: None,
        add_norm,
        [UnpairedModule(name="norm (LayerNorm)", only_in="second")],
        "only the second run has norm (LayerNorm); {behind}the runs part at ",
    ),
    "removed": (
        add_norm,
        lambda net: None,
        [UnpairedModule(name="norm (LayerNorm)", only_in="first")],
        "only the first run has norm (LayerNorm); {behind}the runs part at ",
    ),
    "outermost": (
        lambda net: None,
        append,
        [UnpairedModule(name="body.3 (Sequential)", only_in="second")],
        "only the second run has body.3 (Sequential); ",
    ),
    "inside": (
        add_norm,
        add_other_norm,
        [UnpairedModule(name="norm.inside (Scaled)", only_in="second")],
        "only the second run has norm.inside (Scaled); ",
    ),
    "none": (lambda net: None, change_weight, [], "the runs part at "),
    "nothing computed": (lambda net: None, add_identity, [], "the runs part at "),
}


@pytest.mark.parametrize("captures", CAPTURES)
@pytest.mark.parametrize("name", CASES)
def test_the_answer_begins_with_the_module_that_one_run_has_alone(name: str, captures: str) -> None:
    one, other, unpaired, text = CASES[name]
    found = modtrace.compare(record(one, **CAPTURES[captures]), record(other, **CAPTURES[captures]))
    assert found.first is not None
    assert list(found.first.behind) == unpaired
    # Without ops nothing tells that it reads what the module has returned.
    assert str(found).startswith(text.format(behind="behind it " if captures == "ops" else ""))


@pytest.mark.parametrize("name", CASES)
def test_runs_of_which_one_has_no_ops_are_compared_by_modules(name: str) -> None:
    one, other, _, _ = CASES[name]
    expected = modtrace.compare(record(one), record(other)).first
    assert expected is not None
    for with_ops, lacks in ((True, "second"), (False, "first")):
        found = modtrace.compare(record(one, ops=with_ops), record(other, ops=not with_ops))
        assert found.first == expected
        assert f"modules were compared, not ops, which were not recorded in the {lacks} run" in str(found)


class Wrapped(nn.Module):
    """A net inside of a module that computes something itself, which a port does in the outermost one."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.act = Net(), act

    def forward(self, x: Tensor) -> Tensor:
        return self.net.head(self.act(self.net.body(self.net.embed(x))))


class Whole(nn.Module):
    """Returns what its model returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def test_a_wrapper_around_modules_of_both_runs_is_no_added_module() -> None:
    x = torch.linspace(-2, 2, 24).reshape(3, 8)
    rules = [r"model\.net=net"]
    same = modtrace.compare(
        Whole(Wrapped(torch.relu)), Wrapped(torch.relu), (x,), map=rules, allow_missing=True
    )
    assert same.ok
    found = modtrace.compare(Whole(Wrapped(torch.relu)), Wrapped(torch.tanh), (x,), map=rules)
    assert found.first is not None and not found.first.behind
    assert str(found).startswith("the runs part at relu in model")


def divide_by_rms(x: Tensor) -> Tensor:
    return x / (x.norm(dim=-1, keepdim=True) / 8**0.5)


class Squashed(nn.Module):
    """Normalises by a module or in a line, and then squashes by one op or another."""

    def __init__(self, is_port: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm: Callable[[Tensor], Tensor] = divide_by_rms if is_port else Scaled()
        self.squash: Callable[[Tensor], Tensor] = torch.erf if is_port else torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.squash(self.norm(self.a(x))))


def test_an_op_of_one_run_alone_is_not_said_to_be_inside_of_a_module_in_front_of_it() -> None:
    x = torch.linspace(-2, 2, 24).reshape(3, 8)
    found = modtrace.compare(Squashed(False), Squashed(True), (x,))
    assert found.first is not None and found.first.path == ""
    assert " there the runs part" not in str(found)


@pytest.mark.parametrize("is_first", [True, False])
def test_runs_part_in_the_added_module_and_not_where_its_parameters_were_made(is_first: bool) -> None:
    def record_making(has_more: bool) -> modtrace.Recording:
        x = torch.linspace(-2, 2, 24).reshape(3, 8)
        with modtrace.record(ops=True) as rec:
            net = Net()
            net.norm = nn.Linear(8, 8) if has_more else None
            if net.norm is not None:
                nn.init.trunc_normal_(net.norm.weight)
            net(x).sum().backward()
        return rec

    found = modtrace.compare(record_making(is_first), record_making(not is_first))
    has = "first" if is_first else "second"
    assert str(found).startswith(
        f"only the {has} run has norm (Linear); there the runs part at addmm in norm, step 0, forward"
    )


def test_an_op_that_makes_a_parameter_of_both_runs_too_is_where_they_part() -> None:
    def record_making(has_more: bool) -> modtrace.Recording:
        capture = modtrace.Capture(roles=["output", "op_output", "leaf", "parameter"], tensors=True)
        with modtrace.record(ops=True, values=capture) as rec:
            torch.manual_seed(0)
            net, weight = Net(), torch.arange(64.0).reshape(8, 8)
            weight = weight.sin() if has_more else weight
            net.body[0].weight = nn.Parameter(weight * 1.5)
            if has_more:
                net.norm = nn.Linear(8, 8)
                net.norm.weight = nn.Parameter(weight * 2.0)
            net(torch.ones(3, 8)).sum().backward()
        return rec

    assert str(modtrace.compare(record_making(False), record_making(True))).startswith(
        "the runs part at sin "
    )


def test_a_module_beside_the_way_is_not_said_to_be_in_front() -> None:
    class Beside(Net):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(self.embed(x))
            if self.norm is not None:
                self.norm(x)
            return self.head(x * self.factor)

    def run(*, has_more: bool, **options: bool) -> modtrace.Recording:
        net = Beside()
        if has_more:
            net.norm, net.factor = nn.Linear(8, 8), 1.1
        with modtrace.record(net, **options) as rec:
            net(torch.linspace(-2, 2, 24).reshape(3, 8))
        return rec

    for options in CAPTURES.values():
        found = modtrace.compare(run(has_more=False, **options), run(has_more=True, **options))
        assert "behind it" not in str(found)
    assert str(found).startswith("only the second run has norm (Linear); the runs part at output of head")


def test_a_module_that_may_have_drawn_the_random_numbers_of_others_is_told_with_unequal_weights() -> None:
    def make_head(net: Net) -> None:
        net.head = nn.Linear(8, 4)

    def make_norm_and_head(net: Net) -> None:
        net.norm = nn.Linear(8, 8)
        net.head = nn.Linear(8, 4)

    line = "the same seed is not enough if norm (Linear), which only the second run has, drew from it before"
    both = modtrace.compare(record(make_head, ops=True), record(make_norm_and_head, ops=True))
    assert str(both).startswith("the runs part at parameter head.weight")
    assert line in str(both)
    for other in (change_weight, add_identity):  # none of one run alone, and one that draws nothing
        assert "drew from it" not in str(
            modtrace.compare(record(make_head, ops=True), record(other, ops=True))
        )

    def seed_otherwise(net: Net) -> None:
        torch.manual_seed(1)
        make_norm_and_head(net)

    assert "drew from it" not in str(
        modtrace.compare(record(make_head, ops=True), record(seed_otherwise, ops=True))
    )


class Adapted(nn.Module):
    """Adds to a linear layer what begins as nothing, as an adapter of low rank."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def test_an_optimizer_that_made_a_difference_is_named_with_its_own_step() -> None:
    """The adapter is nothing in step 0, whose optimizer makes it something, which shows in step 1."""
    runs = []
    for has_adapter in (False, True):
        with modtrace.record(ops=True) as rec:
            net = Net()
            if has_adapter:
                net.body[0] = Adapted(net.body[0])
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.linspace(-2, 2, 24).reshape(1, 3, 8)).square().sum().backward()
                optimizer.step()
        runs.append(rec)
    found = modtrace.compare(*runs, allow_missing=True)
    assert found.first is not None
    assert (found.first.only_in, found.first.step, found.first.phase) == ("second", 0, "optimizer"), str(
        found
    )
    assert found.first.seen_at is not None and found.first.seen_at.endswith(", step 1")
    assert {point.step for point in found.growth} == {1}
