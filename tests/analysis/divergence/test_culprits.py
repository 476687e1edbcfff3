"""Who made a difference, who has inherited it, and how many tensors there are of each."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import modtrace
from modtrace.analysis.divergence.answer import Comparison

STATISTICS = modtrace.Capture(roles=["output", "op_output", "leaf", "parameter_grad", "update"])
EVERYTHING = modtrace.Capture(roles="all", tensors=True)


class FeedForward(nn.Module):
    """Multiplies what its first layer gives by a factor, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        self.factor: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.up(x))
        return x + self.down(hidden if self.factor is None else hidden * self.factor)


def trained(
    *, factor: float | None = None, seed: int = 0, capture: modtrace.Capture = STATISTICS
) -> modtrace.Recording:
    """Three steps of AdamW, whose weights, batches and dropout are drawn from a seed."""
    with modtrace.record(ops=True, values=capture, strict=True) as recording:
        torch.manual_seed(seed)
        net = nn.Sequential(FeedForward(), nn.Dropout(0.1), FeedForward(), nn.LayerNorm(16), nn.Linear(16, 4))
        net[0].factor = factor
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 16)).logsumexp(-1).sum().backward()
            optimizer.step()
    return recording


@pytest.fixture(scope="module", params=["statistics", "everything"])
def multiplied(request: pytest.FixtureRequest) -> Comparison:
    capture = STATISTICS if request.param == "statistics" else EVERYTHING
    return modtrace.compare(trained(capture=capture), trained(factor=1.001, capture=capture))


def test_op_that_only_the_second_run_has_is_named(multiplied: Comparison) -> None:
    first = multiplied.first
    assert first is not None
    assert (first.path, first.op, first.only_in) == ("0", "aten.mul.Tensor", "second")
    assert (first.step, first.phase, first.kind) == (0, "forward", "made")
    assert first.seen_at == "addmm in 0.down"
    assert str(multiplied).splitlines()[:3] == [
        "the runs part at mul in 0, step 0, forward",
        "  only the second run has it; its inputs are equal",
        f"  it shows in addmm in 0.down: relative error {first.error:.1e}, noise is {first.noise:.1e}",
    ]


def test_op_that_only_the_first_run_has_is_named() -> None:
    first = modtrace.compare(trained(factor=1.001), trained()).first
    assert first is not None
    assert (first.path, first.op, first.only_in) == ("0", "aten.mul.Tensor", "first")


class Written(nn.Module):
    """Writes a part of what it was given over a part of what its first layer returned, if it is told how."""

    def __init__(self, write: Callable[[Tensor, Tensor], object] | None) -> None:
        super().__init__()
        self.up, self.down, self.write = nn.Linear(16, 16), nn.Linear(16, 16), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x) * 2
        if self.write is not None:
            self.write(hidden, x)
        return self.down(hidden)


def written(
    write: Callable[[Tensor, Tensor], object] | None, capture: modtrace.Capture
) -> modtrace.Recording:
    with modtrace.record(ops=True, values=capture, strict=True) as recording:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), Written(write), nn.Linear(16, 4))
        net(torch.randn(8, 16)).square().mean().backward()
    return recording


@pytest.mark.parametrize("capture", [STATISTICS, EVERYTHING], ids=["statistics", "everything"])
@pytest.mark.parametrize(
    "write",
    [
        lambda hidden, x: hidden[:, 0].copy_(x[:, 1]),
        lambda hidden, x: hidden.__setitem__((slice(None), slice(1, 3)), x[:, :2]),
        lambda hidden, x: hidden.t()[2].copy_(x[:, 1]),
        lambda hidden, x: hidden.view(-1).copy_(x.reshape(-1)),
    ],
    ids=["a column", "an assignment", "of the transposed", "a view of all"],
)
def test_a_copy_into_a_view_that_one_run_lacks_is_named(
    write: Callable[[Tensor, Tensor], object], capture: modtrace.Capture
) -> None:
    one, other = written(None, capture), written(write, capture)
    for first, second, only_in in ((one, other, "second"), (other, one, "first")):
        found = modtrace.compare(first, second).first
        assert found is not None
        assert (found.path, found.op, found.only_in) == ("1", "aten.copy_.default", only_in)
        assert (found.phase, found.kind, found.seen_at) == ("forward", "made", "addmm in 1.down")


def test_one_planted_op_is_the_only_place_that_made_a_difference(multiplied: Comparison) -> None:
    assert [(each.path, each.op, each.kind) for each in multiplied.divergences] == [
        ("0", "aten.mul.Tensor", "made")
    ]


def test_backward_of_the_op_that_made_a_difference_is_its_consequence() -> None:
    def build(approximate: str) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 64), nn.GELU(approximate), nn.Linear(64, 16))
        return nn.Sequential(net, nn.Linear(16, 4))

    x = torch.linspace(-2, 2, 8 * 16).reshape(8, 16)
    found = modtrace.compare(build("none"), build("tanh"), (x,), gradients=True)
    assert [place.op for place in found.divergences] == ["aten.gelu.default"]
    assert found.made == 1
    assert [(place.phase, place.kind) for place in found.firsts] == [
        ("forward", "made"),
        ("backward", "inherited"),
    ]


class Beside(nn.Module):
    """Layers beside each other, each with an activation of its own."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(approximate)) for _ in range(110))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], 1)


def test_more_changed_ops_than_are_described_excuse_all_their_backwards() -> None:
    found = modtrace.compare(
        Beside("none"), Beside("tanh"), (torch.linspace(-2, 2, 64).view(16, 4),), gradients=True
    )
    frame = found.to_frame()
    made = frame[frame["verdict"] == "made"]
    assert (len(made) >= 100, set(made["phase"])) == (True, {"forward"})


def test_counts_tell_what_was_inherited_from_what_was_made() -> None:
    found = modtrace.compare(trained(), trained(seed=1))
    assert found.compared == found.equal + found.within + found.absorbed + found.inherited + found.made
    assert found.beyond == found.inherited + found.made
    frame = found.to_frame()
    assert len(frame) == found.compared
    assert {"step", "phase", "path", "op", "error", "noise", "input_error", "beyond"} <= set(frame.columns)
    noisy = frame[frame["verdict"] == "noise"]
    assert (noisy["error"] <= noisy["noise"]).all()
    assert found.inherited > 10 * found.within
    counts = frame["verdict"].value_counts()
    assert (counts["equal"], counts["noise"], counts["inherited"]) == (
        found.equal,
        found.within,
        found.inherited,
    )
    assert f"{found.inherited} differ as their inputs do, {found.made} made a difference" in str(
        found
    ).replace("\n  ", " ")


def test_two_seeds_are_said_to_be_two_seeds() -> None:
    found = modtrace.compare(trained(), trained(seed=1))
    assert found.environment == ("seed: 0 / 1; torch.manual_seed() gives both the same",)
    drawn = {each.op for each in found.divergences}
    assert {"aten.randn.default", "aten.bernoulli_.float"} <= drawn


def test_equal_runs_that_set_no_seed_have_equal_environments() -> None:
    assert modtrace.compare(recorded_once(0), recorded_once(1)).environment == ()


def recorded_once(seed: int) -> modtrace.Recording:
    torch.manual_seed(seed)
    net = nn.Linear(2, 2)
    with torch.no_grad(), modtrace.record(net) as recording:
        net.weight.fill_(1.0)
        net.bias.fill_(1.0)
        net(torch.ones(3, 2))
    return recording


def test_inputs_that_are_not_finite_have_no_number() -> None:
    found = modtrace.compare(trained(), trained(factor=float("nan")))
    assert "e+308" not in str(found)
    assert "NaN/inf" in str(found)
    assert found.to_frame()["input_error"].max() == float("inf")


def test_op_of_an_optimizer_that_one_run_lacks_is_in_the_optimizer() -> None:
    def run(decay: float) -> modtrace.Recording:
        class Decaying(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: object = None) -> None:  # type: ignore[override]
                super().step()
                for parameter in self.param_groups[0]["params"] if decay else ():
                    parameter.add_(decay)

        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = Decaying(model.parameters(), lr=0.1)
        capture = modtrace.Capture(roles="all", hash=True, sketch=True)
        with modtrace.record(model, ops=True, values=capture, strict=True) as rec:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
        return rec

    found = modtrace.compare(run(0.0), run(0.01))
    assert found.first is not None and found.first.phase == "optimizer"
    assert found.first.arguments == ("only the second run has add_ x2",)
    assert str(found).startswith(
        "the runs part at update weight, step 0, optimizer: only the second run has add_ x2\n"
    )


class Between(nn.Module):
    """A function between two layers; what its backward reads may be spoiled."""

    def __init__(self, function: Callable[[Tensor], Tensor], spoils: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(16, 32), nn.Linear(32, 4)
        self.function, self.spoils = function, spoils

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = self.function(x)
        x.detach().numpy()[:] *= self.spoils  # behind the back of autograd
        return self.after(y)


#: What differs between two runs in forward, whose backwards are its consequences however much more they differ.
EXPLAINED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (functional.gelu, lambda x: functional.gelu(x, approximate="tanh")),
    "slope": (lambda x: functional.leaky_relu(x, 0.01), lambda x: functional.leaky_relu(x, 0.2)),
    "power": (lambda x: x.abs() ** 2.0, lambda x: x.abs() ** 2.01),
    "root": (lambda x: x.abs() ** 0.5, lambda x: x.abs() ** 0.51),
    "softplus": (
        lambda x: functional.softplus(30 * x),
        lambda x: functional.softplus(30 * x, threshold=5.0),
    ),
    "eps": (lambda x: functional.layer_norm(x, (32,)), lambda x: functional.layer_norm(x, (32,), eps=0.1)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), lambda x: x.clamp(-0.5, 0.501)),
    "threshold": (lambda x: functional.threshold(x, 0.0, 0.0), lambda x: functional.threshold(x, 1e-3, 0.0)),
}


@pytest.mark.parametrize("capture", ["tensors", "sketch"])
@pytest.mark.parametrize("name", EXPLAINED)
def test_a_backward_that_its_forward_explains_is_not_blamed(name: str, capture: str) -> None:
    found = compare_between(*map(Between, EXPLAINED[name]), capture)
    assert [place.phase for place in found.divergences] == ["forward"]


@pytest.mark.parametrize("capture", ["tensors", "sketch"])
def test_a_saved_tensor_that_is_spoiled_as_well_is_blamed_beside_the_forward(capture: str) -> None:
    one, other = EXPLAINED["gelu"]
    found = compare_between(Between(one), Between(other, spoils=1.5), capture)
    assert [(place.op, place.phase) for place in found.divergences] == [
        ("aten.gelu.default", "forward"),
        ("aten.gelu_backward.default", "backward"),
    ]
    frame = found.to_frame()
    of_backward = frame[frame["op"] == "aten.gelu_backward.default"]
    assert set(of_backward["verdict"]) <= {"made", "amplified"}


@pytest.mark.parametrize("spoils", [1.0, 1.5])
@pytest.mark.parametrize("capture", ["tensors", "sketch"])
def test_a_saved_tensor_that_is_spoiled_later_is_blamed_where_its_forward_inherits(
    capture: str, spoils: float
) -> None:
    one, other = map(Between, EXPLAINED["gelu"])

    def learn(step: int) -> None:
        with torch.no_grad():
            other.before.weight.mul_(1.001)  # so that the same op reads other numbers from here on
        other.spoils = spoils if step == 1 else 1.0

    found = compare_between(one, other, capture, then=learn)
    frame = found.to_frame()
    assert set(frame[(frame["op"] == "aten.gelu.default") & (frame["step"] == 2)]["verdict"]) == {"inherited"}
    backwards = [("aten.gelu_backward.default", 2)] if spoils != 1 else []
    assert [(place.op, place.step) for place in found.divergences if place.phase == "backward"] == backwards


def compare_between(
    one: nn.Module, other: nn.Module, capture: str, then: Callable[[int], object] | None = None
) -> Comparison:
    """Compares a step of each model, or three steps if something is to happen `then`, behind each of the other's."""
    values = modtrace.Capture(roles=["output", "op_output", "leaf"], hash=True, **{capture: True})
    recordings = []
    for model in (one, other):
        with modtrace.record(model, ops=True, values=values) as rec:
            for step in range(3 if then else 1):
                x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
                model(x).square().mean().backward()
                rec.step()
                if then and model is other:
                    then(step)
        recordings.append(rec)
    return modtrace.compare(*recordings)


class Recurrent(nn.Module):
    """Normalizes what an LSTM gives, which keeps bytes for its backward that nothing else reads."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.rnn, self.norm = nn.LSTM(24, 24, batch_first=True), nn.LayerNorm(24, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.rnn(x)[0])


def test_bytes_that_an_op_keeps_for_its_backward_are_not_compared() -> None:
    runs = []
    for eps in (1e-5, 1e-2):
        torch.manual_seed(0)
        net = Recurrent(eps)
        with modtrace.record(net, ops=True, values=STATISTICS, strict=True) as recording:
            for _ in range(3):
                net(torch.randn(8, 9, 24)).square().sum().backward()
                torch.randn(200_000)  # what is in memory that is taken next
        runs.append(recording)
    found = modtrace.compare(*runs)
    assert found.first is not None
    assert (found.first.path, found.first.op) == ("norm", "aten.native_layer_norm.default"), str(found)
    assert found.compared == runs[0].table("values").num_rows - 3  # the workspace of each step
