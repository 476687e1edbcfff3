"""The silent errors of training that TrainCheck (OSDI 2025) reproduced, rebuilt small where a CPU can show them.

Each is named by one check. docs/check.md has the whole list, with those that a recording cannot show.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.parallel_training import Run, record_runs
from modtrace.analysis.findings.all_checks import CHECKS
from modtrace.analysis.findings.finding import Finding
from modtrace.analysis.findings.of_ranks import check_ranks
from modtrace.store.reader import open_last_attempts

RUNS = {
    "parameters moved behind DDP's back (pytorch 104336)": Run("ddp", "moved"),
    "wrapped in some steps alone (jxmnop)": Run("ddp", "unwrapped"),
    "message lost on the way (pytorch 84803, 96600, Baichuan2 86)": Run("ddp", "lost"),
    "norms clipped on one rank (DeepSpeed 1801)": Run("ddp", "unclipped"),
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    named = {str(number): run for number, run in enumerate(RUNS.values())}
    paths = record_runs(tmp_path_factory.mktemp("silent"), {**named, "healthy": Run("ddp")}, 2)
    return {**dict(zip(RUNS, paths.values(), strict=False)), "healthy": paths["healthy"]}


def _check(path: str) -> tuple[Finding, ...]:
    ranks = [(rank, data) for rank, data in open_last_attempts(Path(path))]
    return check_ranks(ranks, (), CHECKS, ignore=["straggler"]).findings


@pytest.mark.parametrize("error", RUNS)
def test_ranks_that_part_are_named_by_the_first_replica_that_differs(
    error: str, recordings: dict[str, str]
) -> None:
    found = _check(recordings[error])
    assert found[0].check == "replicas"
    assert found[0].severity == "error" or "from the first step on" in found[0].evidence[0]
    if "norms" in error:
        assert "norm" in str(found[0].path)


def test_healthy_ranks_are_left_alone(recordings: dict[str, str]) -> None:
    assert not [found for found in _check(recordings["healthy"]) if found.severity != "note"]


def _train(model: nn.Module, optimizer: Any, *, clears: bool = True, steps: int = 8) -> modtrace.Recording:
    with modtrace.record(model, strict=True) as rec:
        for _ in range(steps):
            if clears:
                optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    return rec


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))


def _worst(rec: modtrace.Recording) -> Finding:
    return rec.findings().findings[0]


def test_missing_zero_grad() -> None:
    """stackoverflow 60335387."""
    model = _net()
    assert (
        _worst(_train(model, torch.optim.Adam(model.parameters()), clears=False)).check
        == "uncleared-gradients"
    )


def test_all_but_norms_frozen() -> None:
    """PyTorch forum 84911."""
    model = _net()
    for module in model:
        module.requires_grad_(isinstance(module, nn.BatchNorm1d))
    found = _worst(_train(model, torch.optim.Adam(model.parameters(), lr=1e-3)))
    assert (found.check, found.severity) == ("not-in-optimizer", "warning")
    assert "only BatchNorm1d trains" in found.text


def test_optimizer_made_before_the_parameters_were_replaced() -> None:
    """As accelerate 2665: the optimizer holds parameters that the model has no more."""
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    found = _worst(_train(model, optimizer))
    assert (found.check, found.severity) == ("not-in-optimizer", "warning")
    assert "0.weight" in found.text


class _Stuck(torch.optim.SGD):
    """Steps, and changes nothing after the second step, as compiled code did in pytorch 115607."""

    taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        if self.taken <= 2:
            super().step(closure)


def test_updates_that_change_nothing() -> None:
    model = _net()
    found = _worst(_train(model, _Stuck(model.parameters(), lr=0.1), steps=10))
    assert (found.check, found.severity) == ("rounded-updates", "warning")
    assert "do not change" in found.text


class _Dropping(nn.Module):
    """Drops out whatever its mode, as the fused attention of transformers 33844."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.is_fused, self.inner = is_fused, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.is_fused:
            return nn.functional.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.1)[0]
        return nn.functional.dropout(y, 0.1, training=True)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_dropout_in_evaluation(is_fused: bool, is_training: bool) -> None:
    model = nn.Sequential(_Dropping(is_fused), nn.Dropout(0.1)).train(is_training)
    with modtrace.record(model, ops=True, strict=True) as rec, torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 6))
    found = rec.findings(only=["dropout-in-eval"]).findings
    assert [one.path for one in found] == ([] if is_training else ["0"])
