"""Steps that wait for their data are found with what they wait for, and busy ones are left alone."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run
from helpers.health_models import FAMILIES, Stack
from helpers.timed_loops import Clock, clock
from modtrace.analysis.findings.finding import Finding

__all__ = ["clock"]

STEPS = 8


class _Texts(Dataset[torch.Tensor]):
    """Spends some milliseconds on each sample."""

    def __init__(self, clock: Clock, milliseconds: int) -> None:
        self.clock, self.milliseconds = clock, milliseconds

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.spend(self.milliseconds)
        return torch.randint(0, 30, (2, 6))


def _loaded(clock: Clock, milliseconds: int, **options: object) -> Iterator[torch.Tensor]:
    yield from DataLoader(_Texts(clock, milliseconds), batch_size=None, **options)  # type: ignore[arg-type]


def _by_itself(clock: Clock, milliseconds: int) -> Iterator[torch.Tensor]:
    for _ in range(STEPS):
        clock.spend(milliseconds)
        yield torch.randint(0, 30, (2, 6))


def _train(
    clock: Clock, block: type[nn.Module], batches: Iterator[torch.Tensor], *, milliseconds: int = 10
) -> modtrace.Recording:
    """Trains; a step takes some milliseconds, in forward."""
    model = Stack(block)
    optimizer = torch.optim.AdamW(model.parameters())
    model.head.register_forward_hook(lambda *_: clock.spend(milliseconds))
    with modtrace.record(model, strict=True) as rec:
        for tokens in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    return rec


def _find(rec: modtrace.Recording, **thresholds: float) -> tuple[Finding, ...]:
    return check_run(rec, "input-bound", **thresholds)


@pytest.mark.parametrize("block", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize(
    ("batches", "severity", "text"),
    [
        (lambda clock: _loaded(clock, 90), "warning", "waiting for data takes 90 % of a step (90 of 100 ms, mean of"),
        (lambda clock: _loaded(clock, 4), "warning", "waiting for data takes 29 % of a step (4 of 14 ms, mean of"),
        (lambda clock: _by_itself(clock, 40), "note", "the time between steps is 80 % of a step (40 of 50 ms"),
    ],
    ids=["loader", "barely", "own iterator"],
)  # fmt: skip
def test_what_holds_up_the_steps_is_named(
    batches: Callable[[Clock], Iterator[torch.Tensor]],
    severity: str,
    text: str,
    block: type[nn.Module],
    clock: Clock,
) -> None:
    (found,) = _find(_train(clock, block, batches(clock)))
    assert (found.severity, found.text[: len(text)]) == (severity, text)
    assert len(f"{found.severity}: {found.text}") <= 80
    assert ("the program waits for: _Texts" in found.evidence) == (severity == "warning")
    assert ("num_workers" in found.remedy) == (severity == "warning")
    assert any("takes most: 10 ms of its own" in line for line in found.evidence)


@pytest.mark.parametrize("block", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize(
    "batches",
    [
        lambda clock: _loaded(clock, 2),
        lambda clock: _loaded(clock, 0),
        lambda clock: _by_itself(clock, 4),
    ],
    ids=["loader", "fast loader", "own iterator"],
)
def test_a_busy_step_is_left_alone(
    batches: Callable[[Clock], Iterator[torch.Tensor]], block: type[nn.Module], clock: Clock
) -> None:
    assert _find(_train(clock, block, batches(clock))) == ()


@pytest.mark.parametrize("block", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_step_of_2_ms_without_a_loader_is_never_input_bound(block: type[nn.Module], clock: Clock) -> None:
    assert _find(_train(clock, block, _by_itself(clock, 9), milliseconds=2)) == ()


def test_workers_that_are_there_are_not_asked_for(clock: Clock) -> None:
    build = RecordingBuilder()
    model = build.module("", "Net")
    for step in range(4):
        start_ns = step * 100_000_000
        build.step(step, start_ns, start_ns + 20_000_000)
        build.call(model, start_ns, start_ns + 20_000_000)
        build.interval("data", start_ns + 20_000_000, start_ns + 99_000_000, name="Texts, 4 workers")
    (found,) = modtrace.Recording(build.data()).findings(only=["input-bound"]).findings
    assert found.text == "waiting for data takes 79 % of a step (79 of 100 ms, mean of 3 steps)"
    assert found.remedy.startswith("raise num_workers or prefetch_factor")


def test_thresholds_are_given(clock: Clock) -> None:
    rec = _train(clock, FAMILIES["attention"], _loaded(clock, 4))
    assert _find(rec, share=0.3) == ()
    assert _find(rec, wait_ms=5) == ()


def test_a_recording_without_cycles_cannot_be_checked() -> None:
    model = nn.Linear(2, 2)
    with modtrace.record(model) as rec:
        model(torch.ones(1, 2)).sum().backward()
    (why,) = rec.findings(only=["input-bound"]).unchecked
    assert why.why == "no two training steps follow each other, or an older version recorded them"
