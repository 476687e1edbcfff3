"""Where two recordings of small models part, from whole tensors, sketches, statistics and hashes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import modtrace
from builders import RecordingBuilder
from modtrace.analysis.divergence.answer import Comparison
from modtrace.errors import NothingRecordedError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.approximate = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate=self.approximate))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(16, 4))


TOKENS = torch.linspace(-2, 2, 6 * 16).reshape(6, 16)
STATISTICS = modtrace.Capture(roles=["output", "op_output", "leaf"])
SKETCHES = modtrace.Capture(roles=["output", "op_output", "leaf"], sketch=True)
TENSORS = modtrace.Capture(roles=["output", "op_output", "leaf"], tensors=True)
HASHES = modtrace.Capture(roles=["output", "op_output", "leaf"], stats=0, hash=True)


def record(net: nn.Module, capture: modtrace.Capture = STATISTICS) -> modtrace.Recording:
    with modtrace.record(net, ops=True, values=capture) as recording, torch.no_grad():
        net(TOKENS)
    return recording


@pytest.fixture(scope="module", params=["statistics", "sketches", "tensors", "hashes"])
def capture(request: pytest.FixtureRequest) -> Iterator[modtrace.Capture]:
    yield {"statistics": STATISTICS, "sketches": SKETCHES, "tensors": TENSORS, "hashes": HASHES}[
        request.param
    ]


def parts_at(found: Comparison) -> tuple[Any, ...] | None:
    first = found.first
    return None if first is None else (first.path, first.op, first.kind)


def test_a_run_is_equal_to_itself(capture: modtrace.Capture) -> None:
    found = modtrace.compare(record(model(), capture), record(model(), capture))

    assert found.ok and found and found.first is None
    assert found.compared == found.equal > 20
    assert found.environment == ()


def test_the_op_that_computes_something_else_is_named_though_all_later_ones_differ(
    capture: modtrace.Capture,
) -> None:
    other = model()
    other[1].norm.eps = 1e-3

    found = modtrace.compare(record(model(), capture), record(other, capture))

    assert not found.ok
    assert parts_at(found) == ("1.norm", "aten.native_layer_norm.default", "made")
    assert found.first is not None and found.first.input_error == 0


def test_a_parameter_that_differs_is_the_source(capture: modtrace.Capture) -> None:
    other = model()
    with torch.no_grad():
        other[1].up.weight[3, 5] += 1

    found = modtrace.compare(record(model(), capture), record(other, capture))

    assert parts_at(found) == ("1.up", None, "source")
    assert found.first is not None and (found.first.role, found.first.slot) == ("parameter", "weight")


def test_the_difference_of_a_single_element_is_told_with_its_index() -> None:
    other = model()
    with torch.no_grad():
        other[1].up.weight[3, 5] += 1

    first = modtrace.compare(record(model(), TENSORS), record(other, TENSORS)).first

    assert first is not None
    assert (first.where, first.metric) == ((3, 5), "tensors")
    assert first.largest == pytest.approx(1)


def test_sketches_estimate_what_whole_tensors_tell() -> None:
    other = model()
    other[1].norm.eps = 1e-3
    exact, estimated = (
        modtrace.compare(record(model(), each), record(other, each)).first for each in (TENSORS, SKETCHES)
    )

    assert exact is not None and estimated is not None
    assert estimated.low <= exact.error <= estimated.high


def test_a_difference_below_the_tolerance_is_none() -> None:
    other = model()
    other[1].norm.eps = 1e-3
    runs = record(model()), record(other)

    assert modtrace.compare(*runs, tolerance=0.5).ok
    assert not modtrace.compare(*runs, tolerance=1e-6).ok


def test_further_runs_tell_what_is_noise() -> None:
    runs = []
    for seed in range(3):
        net = model()
        torch.manual_seed(seed)
        with torch.no_grad():
            net[0].up.weight.add_(torch.randn(32, 16), alpha=1e-3)
        runs.append(record(net, SKETCHES))
    other = model()
    other[1].approximate = "tanh"
    other[1].norm.eps = 1.0

    assert not modtrace.compare(runs[0], runs[1]).ok
    assert modtrace.compare(runs[0], runs[1], noise=[runs[2]]).ok
    found = modtrace.compare(runs[0], record(other, SKETCHES), noise=runs[1:])
    assert found.noise == "measured" and parts_at(found) == (
        "1.norm",
        "aten.native_layer_norm.default",
        "made",
    )


def test_a_model_in_bfloat16_differs_from_its_float32_by_noise_alone() -> None:
    found = modtrace.compare(record(model(), SKETCHES), record_in_bfloat16(model()))

    assert found.first is None and found.within > 10


def record_in_bfloat16(net: nn.Module) -> modtrace.Recording:
    net = net.to(torch.bfloat16)
    with modtrace.record(net, ops=True, values=SKETCHES) as recording, torch.no_grad():
        net(TOKENS.to(torch.bfloat16))
    return recording


def test_two_models_are_recorded_from_one_seed_and_left_as_they_were() -> None:
    net, other = model(), model()
    other[1].norm.eps = 1e-3
    state = torch.get_rng_state()

    found = modtrace.compare(net, other, (TOKENS,), gradients=True)

    assert parts_at(found) == ("1.norm", "aten.native_layer_norm.default", "made")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in net.parameters())


def test_two_steps_of_one_run_are_compared() -> None:
    net = model()
    with modtrace.record(net, values=SKETCHES, ops=True) as recording, torch.no_grad():
        net(TOKENS)
        net(TOKENS)
        net(TOKENS + 1)

    assert modtrace.compare(recording, recording, step=(0, 1)).first is None
    assert modtrace.compare(recording, recording, step=(1, 2)).first is not None


def test_what_only_one_run_has_makes_them_disagree_unless_it_is_allowed() -> None:
    net = nn.Sequential(*model()[:3])
    runs = record(model()), record(net)

    found = modtrace.compare(*runs)

    assert not found.ok and found.first is None
    assert found.missing.modules == ("3 (Linear)",)
    assert [(each.name, each.why) for each in found.extra.tensors] == [("output of Sequential", "shape")]
    assert modtrace.compare(*runs, allow_missing=True).ok


def test_modules_alone_tell_where_it_was_seen_first() -> None:
    other = model()
    other[1].norm.eps = 1e-3
    runs = []
    for net in (model(), other):
        with modtrace.record(net) as recording, torch.no_grad():
            net(TOKENS)
        runs.append(recording)

    assert parts_at(modtrace.compare(*runs)) == ("1.norm", None, "seen")


def test_a_run_without_values_cannot_be_compared() -> None:
    with modtrace.record(model(), values=None) as recording:
        pass

    with pytest.raises(ValueError, match="no values are in this recording: no module was called"):
        modtrace.compare(record(model()), recording)


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(TypeError, match=r"compare\(a=5\): give a recording"):
        modtrace.compare(5, record(model()))
    with pytest.raises(TypeError, match="give the arguments of the call too"):
        modtrace.compare(model(), model())
    for tolerance in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"tolerance={tolerance}: give a relative error"):
            modtrace.compare(record(model()), record(model()), tolerance=tolerance)
    with pytest.raises(
        ValueError, match=r"^step=99 of the first recording: no step 99 in this recording; there are: 0$"
    ):
        modtrace.compare(record(model()), record(model()), step=99)
    with pytest.raises(
        ValueError, match=r"^step=1 of the second recording: no step 1 in this recording; there are: 0$"
    ):
        modtrace.compare(record(model()), record(model()), step=(0, 1))


class Projections(nn.Module):
    """Three projections of the same input, as parts or in one."""

    def __init__(self, *, is_fused: bool, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        weights = torch.randn(3, 16, 16) * scale
        if is_fused:
            self.qkv = nn.Linear(16, 48, bias=False)
            self.qkv.weight.data = weights.flatten(0, 1)
        else:
            self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
            for each, weight in zip((self.q, self.k, self.v), weights, strict=True):
                each.weight.data = weight.clone()
        self.is_fused = is_fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x) if self.is_fused else torch.cat([self.q(x), self.k(x), self.v(x)], -1)


FUSED = [f"{name}=qkv" for name in "qkv"]


def test_parts_of_which_only_hashes_are_known_are_not_compared_with_the_whole() -> None:
    hashes = modtrace.Capture(roles=["parameter", "output"], stats=0, hash=True)
    parts, whole = (record(Projections(is_fused=each), hashes) for each in (False, True))

    metrics = dict(modtrace.compare(parts, whole, map=FUSED).metrics)

    assert "statistics" not in metrics
    assert metrics["nothing"] >= 3


def test_nan_in_one_of_three_parts_is_a_difference_from_the_whole() -> None:
    statistics = modtrace.Capture(roles=["parameter", "output"])
    spoiled = Projections(is_fused=False)
    spoiled.q.weight.data[0, 0] = float("nan")
    parts, whole = record(spoiled, statistics), record(Projections(is_fused=True), statistics)

    found = modtrace.compare(parts, whole, map=FUSED)

    assert not found.ok
    assert dict(found.metrics)["nonfinite"] >= 3


def test_gradient_that_is_zero_in_one_run_alone_is_a_difference_in_both_directions() -> None:
    def trained(factor: float) -> modtrace.Recording:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with modtrace.record(net, values=modtrace.Capture(roles=["parameter_grad"])) as recording:
            (net(torch.ones(3, 4)) * factor).sum().backward()
            optimizer.step()
        return recording

    still, moving = trained(0.0), trained(1.0)
    assert not modtrace.compare(still, moving).ok
    assert not modtrace.compare(moving, still).ok


def test_site_that_differs_in_a_further_run_by_its_hash_is_not_blamed() -> None:
    drawn = model()
    with torch.no_grad():
        drawn[1].up.bias += 1
    again = record(drawn, HASHES)

    assert not modtrace.compare(record(model(), HASHES), again).ok
    assert modtrace.compare(record(model(), HASHES), again, noise=[again]).ok


def test_further_run_of_something_else_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^no tensor was measured in both recordings, of 1 aligned module\. "
    ):
        other = record(nn.Tanh(), modtrace.Capture(roles=["input"]))
        modtrace.compare(record(model()), record(model()), noise=[other])


def test_runs_whose_tensors_all_have_other_sizes_are_told_so() -> None:
    runs = []
    for width in (4, 6):
        net = nn.Tanh()
        with modtrace.record(net) as recording:
            net(torch.ones(2, width))
        runs.append(recording)

    found = modtrace.compare(*runs)

    assert not found.ok
    assert {each.why for each in found.missing.tensors} == {"shape"}


def trained(lr: float, only: str = "") -> modtrace.Recording:
    """Two steps of training, in which the optimizer moves one parameter, or each, at this rate and others at 0.1."""
    net = model()
    groups = [{"params": [each], "lr": lr if only in name else 0.1} for name, each in net.named_parameters()]
    optimizer = torch.optim.SGD(groups)
    with modtrace.record(net) as recording:
        for _ in range(2):
            net(TOKENS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


def test_a_parameter_that_the_optimizer_has_moved_elsewhere_was_equal_before() -> None:
    one = modtrace.compare(trained(0.1), trained(0.2, only="1.up.bias"))
    assert one.first is not None and (one.first.path, one.first.slot, one.first.step) == ("1.up", "bias", 1)
    assert (one.first.updated_since, one.first.updated) == (0, (1, 20))
    assert (
        "its optimizer, or a write by hand, has moved it elsewhere since: 1 of 20 parameters now differ"
        in str(one)
    )
    assert "zero but for rounding" in str(one) and "same weights" not in str(one)

    every = modtrace.compare(trained(0.1), trained(0.2))
    assert every.first is not None and every.first.updated_since == 0
    assert every.first.updated[0] > 15 and "zero but for rounding" not in str(every)


def test_what_was_not_compared_is_counted_by_the_reason() -> None:
    def build(notes: list[str | None]) -> modtrace.Recording:
        made = RecordingBuilder(complete=True)
        made.step(0, 0, 100)
        net = made.module("", "Net")
        root = made.call(net, 0, 90, nth=0)
        for number, note in enumerate(notes):
            part = made.module(f"part{number}", "Part", parent=net)
            call = made.call(part, 10 * number, 10 * number + 5, parent=root, nth=0)
            made.output(call, [1.0, 2.0] if note is None else None, note=note, numel=2)
        return modtrace.Recording(made.data())

    noted = build([None, "a partial sum", "a partial sum", "on no device", None])
    found = modtrace.compare(noted, build([None, None, None, None, "not measured: no"]))
    assert (found.compared, found.unmeasured) == (1, 4)
    assert found.unmeasured_why == (("a partial sum", 2), ("on no device", 1), ("not measured: no", 1))
    assert (
        "1 equal; 4 not compared (2 a partial sum, 1 on no device, 1 not measured: no)"
        in str(found).splitlines()[1]
    )


def test_steps_of_equal_numbers_and_other_kinds_are_named_by_their_kinds() -> None:
    recordings = []
    for kind in ("train", "eval"):
        build = RecordingBuilder()
        net = build.module("", "Net")
        for step in (0, 1):
            build.step(step, 1000 * step, 1000 * step + 900, kind=kind)
            build.output(build.call(net, 1000 * step, 1000 * step + 600), [1.0])
        recordings.append(build.data())
    text = "the first has measured train steps 0..1, the second eval steps 0..1. "
    with pytest.raises(NothingRecordedError, match=text):
        modtrace.compare(*map(modtrace.Recording, recordings))
