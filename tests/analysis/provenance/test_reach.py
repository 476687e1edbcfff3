"""Healthy programs with NaN and infinities are accused of nothing, and the fault planted in each is named."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from helpers.nonfinite_models import BY_OP

STEPS = 3


class Program(NamedTuple):
    """A program in which values that are not finite are meant; the same with a fault in it is another."""

    model: Callable[[bool], nn.Module]
    batch: Callable[[int], torch.Tensor]
    loss: Callable[[torch.Tensor, int, bool], torch.Tensor]
    culprit: str  # the bare name of the op that makes the fault
    #: Without ops the fault is seen as well: it is in an output, a gradient or a parameter.
    is_seen_by_modules: bool = True


class Then(nn.Module):
    """A linear layer, and a function of its output that knows whether the fault is planted."""

    def __init__(self, function: Callable[[torch.Tensor, bool], torch.Tensor], has_fault: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.function, self.has_fault = function, has_fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x), self.has_fault)


def then(function: Callable[[torch.Tensor, bool], torch.Tensor]) -> Callable[[bool], nn.Module]:
    return lambda has_fault: Then(function, has_fault)


def linear(has_fault: bool) -> nn.Module:
    return nn.Linear(8, 8)


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 8)


def of_output(y: torch.Tensor, step: int, has_fault: bool) -> torch.Tensor:
    return y.square().mean()


def ctc(y: torch.Tensor, step: int, has_fault: bool) -> torch.Tensor:
    lengths = torch.tensor([9, 1 if has_fault and step == 1 else 9])
    targets = torch.tensor([[1, 2], [3, 1]])
    return F.ctc_loss(y.log_softmax(-1), targets, lengths, torch.tensor([2, 2]))


def masked_by_log(scores: torch.Tensor, has_fault: bool) -> torch.Tensor:
    mask = torch.ones(6, 6).tril(-1 if has_fault else 0).log()
    return (scores @ scores.mT + mask).softmax(-1) @ scores


def crf(emissions: torch.Tensor, has_fault: bool) -> torch.Tensor:
    allowed = torch.ones(8, 8).triu().log()
    score = torch.full((8,), -math.inf)
    score[0] = 0
    for emission in emissions:
        score = torch.logsumexp(score[:, None] + allowed, 0) + emission
    return (score.sum() - score.sum()).log() if has_fault else score.logsumexp(0)


def segment_max(x: torch.Tensor, has_fault: bool) -> torch.Tensor:
    segment = torch.tensor([0, 0, 1, 1, 3, 3])[:, None].expand(6, 8)
    top = torch.full((4, 8), -math.inf).scatter_reduce(0, segment, x, "amax")
    return top if has_fault else torch.where(top.isinf(), 0.0, top)


def softmax_of_edges(x: torch.Tensor, has_fault: bool) -> torch.Tensor:
    target, score = torch.tensor([0, 0, 1, 1, 3, 3]), x[:, 0]
    top = torch.full((4,), -math.inf).scatter_reduce(0, target, score.detach(), "amax")
    weight = (score - torch.where(top.isfinite(), top, 0.0)[target]).exp()
    total = torch.zeros(4).index_add(0, target, weight)
    return torch.zeros(4).index_add(0, target, weight) / total if has_fault else weight / total[target]


def missing_targets(y: torch.Tensor, step: int, has_fault: bool) -> torch.Tensor:
    target = torch.randn(6, 8)
    target[:, 0] = math.nan
    if has_fault and step == 1:
        target[:] = math.nan
    error = (y - target.nan_to_num()).square()
    return torch.nanmean(torch.where(target.isnan(), math.nan, error))


def selected_targets(y: torch.Tensor, step: int, has_fault: bool) -> torch.Tensor:
    target = torch.randn(6, 8)
    target[0] = math.nan
    return (y - target)[~target.isnan()].square().mean()


def metric(y: torch.Tensor, step: int, has_fault: bool) -> torch.Tensor:
    accuracy = torch.zeros(()) / torch.zeros(())
    return y.square().mean() + (accuracy if has_fault else 0)


def entropy(y: torch.Tensor, step: int, has_fault: bool) -> torch.Tensor:
    shares = (y * 1000).softmax(-1)
    told = -(shares * shares.log()).sum(-1)  # 0 * -inf
    return told.mean() if has_fault else y.square().mean()


def legal_actions(y: torch.Tensor, step: int, has_fault: bool) -> torch.Tensor:
    legal = torch.tensor([0.0 if has_fault and step == 1 else 1.0] * 3 + [0.0] * 5)
    return -(y + legal.log()).log_softmax(-1)[:, 0].mean()


class Imputing(nn.Module):
    """Replaces what is missing by the mean of what is there."""

    def __init__(self, has_fault: bool) -> None:
        super().__init__()
        self.inner, self.has_fault = nn.Linear(8, 8), has_fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_missing = x.isnan() if not self.has_fault else x.isnan() & (x == 0)
        return self.inner(torch.where(is_missing, torch.nanmean(x, 0), x))


def incomplete_rows(step: int) -> torch.Tensor:
    x = torch.randn(6, 8)
    x[step, 1] = math.nan
    return x


class Observing(nn.Module):
    """Keeps the extremes of its output, which begin at infinity."""

    def __init__(self, has_fault: bool) -> None:
        super().__init__()
        self.inner, self.has_fault = nn.Linear(8, 8), has_fault
        self.register_buffer("low", torch.tensor(math.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.has_fault:
            y = y / (self.low - self.low)
        self.low.copy_(torch.minimum(self.low, y.detach().min()))
        return y


class Holding(nn.Module):
    """Holds a state from step to step, which is not finite and is replaced when it is read."""

    def __init__(self, has_fault: bool) -> None:
        super().__init__()
        self.inner, self.has_fault = nn.Linear(8, 8), has_fault
        self.held: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.held is not None:
            y = y + (self.held if self.has_fault else self.held.nan_to_num(neginf=0.0))
        self.held = (y.detach() * 0).log()
        return y


PROGRAMS = {
    "CTC": Program(linear, lambda step: torch.randn(9, 2, 8), ctc, "_ctc_loss"),
    "mask by log": Program(
        then(masked_by_log), lambda step: torch.randn(2, 6, 8), of_output, "_softmax"
    ),
    "CRF": Program(then(crf), lambda step: torch.randn(4, 8), lambda y, step, has_fault: y, "log"),
    "segment max": Program(then(segment_max), rows, of_output, "scatter_reduce", is_seen_by_modules=False),
    "softmax of edges": Program(then(softmax_of_edges), rows, of_output, "div"),
    "missing targets": Program(linear, rows, missing_targets, "div", is_seen_by_modules=False),
    "selected targets": Program(
        then(lambda x, has_fault: (x - x).log() * 0 if has_fault else x), rows, selected_targets, "log"
    ),
    "metric": Program(linear, rows, metric, "div", is_seen_by_modules=False),
    "entropy": Program(linear, rows, entropy, "log"),
    "legal actions": Program(linear, rows, legal_actions, "_log_softmax"),
    "observer": Program(Observing, rows, of_output, "sub"),
    "held state": Program(Holding, rows, of_output, "log"),
    "imputation": Program(Imputing, incomplete_rows, of_output, "isnan"),
}  # fmt: skip


def record(program: Program, *, has_fault: bool, **options: Any) -> modtrace.Recording:
    torch.manual_seed(0)
    model = program.model(has_fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model, strict=True, **options) as rec:
        for step in range(STEPS):
            loss = program.loss(model(program.batch(step)), step, has_fault)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return rec


def cases() -> Iterator[Any]:
    for name, program in PROGRAMS.items():
        for ops in (True, False):
            yield pytest.param(program, ops, id=f"{name}-{'ops' if ops else 'modules'}")


@pytest.mark.parametrize(("program", "ops"), cases())
def test_healthy_program_is_accused_of_nothing_and_runs_to_its_end(program: Program, ops: bool) -> None:
    assert list(record(program, has_fault=False, ops=ops).nonfinite()) == []
    record(program, has_fault=False, ops=ops, on_nonfinite="stop")


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_fault_in_a_program_that_means_such_values_is_named(program: Program) -> None:
    found = record(program, has_fault=True, ops=True).first_nonfinite()
    assert found is not None and found.op is not None
    names = [found.op.split(".")[1], found.hint or ""]
    assert program.culprit in names[0] or program.culprit in names[1]
    with pytest.raises(modtrace.NonFiniteError):
        record(program, has_fault=True, ops=True, on_nonfinite="stop")


@pytest.mark.parametrize(
    "program",
    [program for program in PROGRAMS.values() if program.is_seen_by_modules],
    ids=[name for name, program in PROGRAMS.items() if program.is_seen_by_modules],
)
def test_fault_is_seen_without_ops(program: Program) -> None:
    assert record(program, has_fault=True).first_nonfinite() is not None


def test_output_of_log_probabilities_is_no_fault_and_one_of_nan_is() -> None:
    for made, is_fault in ((0.0, False), (-1.0, True)):
        model = Then(lambda x, _, made=made: (x * 0 + made).log(), False)
        with modtrace.record(model, ops=True) as rec, torch.no_grad():
            model(torch.randn(2, 8))
        assert (rec.first_nonfinite() is not None) == is_fault


@pytest.mark.parametrize("how", ["from_numpy", "tensor", "stack", "written by index"])
def test_nan_in_a_batch_is_told_as_the_argument_that_holds_it(how: str) -> None:
    def batch(step: int) -> torch.Tensor:
        value = math.nan if step == 1 else 1.0
        if how == "from_numpy":
            x = torch.ones(4, 8).numpy()
            x[2, 3] = value
            return torch.from_numpy(x)
        if how == "tensor":
            return torch.tensor([[1.0] * 8] * 2 + [[1.0] * 3 + [value] + [1.0] * 4] + [[1.0] * 8])
        x = torch.ones(4, 8)
        if how == "stack":
            return torch.stack(
                [torch.tensor([1.0] * 3 + [value if row == 2 else 1.0] * 5) for row in range(4)]
            )
        x[2, 3] = value
        return x

    program = Program(linear, batch, of_output, "")
    found = record(program, has_fault=False, ops=True, values=BY_OP).first_nonfinite()
    assert found is not None
    assert (found.role, found.slot, found.step) == ("input", "[0]", 1)
    # A write into a view is measured as the view.
    assert found.first_index == (None if how == "written by index" else (2, 3))
    assert found.source == "[0] of Linear"
