"""A difference of less than noise that a cancellation blows up is told where it was made, and what it becomes."""

import pytest
import torch
from torch import nn

import modtrace

CAPTURES = {
    "hashes": modtrace.Capture(roles="all", hash=True, sketch=True),
    "tensors": modtrace.Capture(roles="all", tensors=True),
}
X = torch.linspace(-2, 2, 1024).sin().reshape(16, 64)


class Variance(nn.Module):
    """Takes the difference of two numbers that are nearly equal."""

    def __init__(self, fault: float) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 300
        return x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square() * (1 + self.fault)


def record(fault: float, capture: str) -> modtrace.Recording:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), Variance(fault), nn.Linear(1, 8))
    with modtrace.record(net, ops=True, values=CAPTURES[capture], strict=True) as rec, torch.no_grad():
        net(X)
    return rec


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("fault", [3e-7, 1e-6, 1e-5])
def test_place_is_where_it_was_made_and_what_it_becomes_is_told(fault: float, capture: str) -> None:
    found = modtrace.compare(record(0.0, capture), record(fault, capture))
    first = found.first
    assert not found.ok and first is not None
    assert (first.path, first.op, first.kind) == ("2", "aten.mul.Tensor", "made")
    assert first.error < 2 * fault
    if first.error < first.noise:
        assert first.leads_to is not None and first.leads_to.startswith("output of Sequential, ")
        assert f"behind it summands cancel, and it becomes {first.leads_to}" in str(found)
    else:
        assert first.leads_to is None


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("tolerance", [0.0, 1e-9])
def test_place_is_the_same_where_nothing_is_noise(tolerance: float, capture: str) -> None:
    first = modtrace.compare(record(0.0, capture), record(1e-6, capture), tolerance=tolerance).first
    assert first is not None and first.op == "aten.mul.Tensor"


@pytest.mark.parametrize("capture", CAPTURES)
def test_rounding_of_which_a_result_shows_little_is_noise(capture: str) -> None:
    def run(is_split: bool) -> modtrace.Recording:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64))
        if is_split:
            one = net[0].forward
            net[0].forward = lambda x: torch.cat([one(x[:1]), one(x[1:])])
        with modtrace.record(net, ops=True, values=CAPTURES[capture], strict=True) as rec, torch.no_grad():
            net(X)
        return rec

    found = modtrace.compare(run(False), run(True), allow_missing=True)
    assert found.ok and found.first is None, str(found)
