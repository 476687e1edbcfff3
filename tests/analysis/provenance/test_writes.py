"""Writes in place, through views and from outside of what was measured: the writer is named, and no reader of its."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.nonfinite_models import BY_OP, Applied, record_planted, record_training
from modtrace.analysis.provenance.search import find_all
from modtrace.analysis.values.nonfinite import NonFinite


def made_in_step(rec: modtrace.Recording) -> list[tuple[str | None, str | None, str | None]]:
    """Returns phase, path and op of all that came up in the only step."""
    return [(found.phase, found.path, found.op) for found in find_all(rec.data)]


def log_through_view(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, :4].abs_().mul_(0).log_()
    return x


def root_through_view(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, :4].abs_().mul_(0).sqrt_()
    return x


def write_around_autograd(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.data[0, 0] = math.nan
    return x


def write_into_output(x: torch.Tensor) -> torch.Tensor:
    found = torch.empty(4, 8)
    torch.log(x.detach() * 0, out=found)
    return x + found


@pytest.mark.parametrize(
    ("function", "phase", "op"),
    [
        (log_through_view, "forward", "aten.log_.default"),
        (root_through_view, "backward", "aten.div.Tensor"),
        (write_around_autograd, "forward", "aten.copy_.default"),
        (write_into_output, "forward", "aten.log.out"),
    ],
    ids=["log of a view", "root of a view", "write to .data", "out argument"],
)
def test_op_that_writes_through_a_view_is_named_once_and_no_op_that_reads(
    function: Callable[[torch.Tensor], torch.Tensor], phase: str, op: str
) -> None:
    assert made_in_step(record_planted(function, steps=1)) == [(phase, "1", op)]


def test_values_that_are_overwritten_before_anyone_reads_them_do_not_spread() -> None:
    def overwrite(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, ::2] = math.nan
        x[:, ::2] = 1.0
        return (x * 0).log()

    ops = [op for _, _, op in made_in_step(record_planted(overwrite, steps=1))]
    assert ops[0] == "aten.log.default"
    assert "aten.fill_.Tensor" not in ops


def test_where_behind_a_write_to_a_view_takes_its_values_away() -> None:
    def guarded(x: torch.Tensor) -> torch.Tensor:
        found = x.detach().relu()
        found[:, :4].log_()
        return torch.where(found.isfinite(), found, x)

    assert record_planted(guarded).first_nonfinite() is None


class Recomputed(nn.Module):
    """Its block writes NaN in place when it runs for the n-th time: 0 in forward, 1 in recompute."""

    def __init__(self, nth: int, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.block = Applied(self.write)
        self.runs, self.nth, self.use_reentrant = 0, nth, use_reentrant

    def write(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        if self.runs == self.nth:
            x.detach().view(-1)[3:5].fill_(math.nan)  # else its own derivative takes them away
        self.runs += 1
        return (x * x).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.block, self.inner(x), use_reentrant=self.use_reentrant)
        return found


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(("nth", "phase"), [(0, "forward"), (1, "recompute")])
def test_write_in_a_checkpointed_block_is_named_with_its_phase(
    nth: int, phase: str, use_reentrant: bool
) -> None:
    rec = record_training(
        Recomputed(nth, use_reentrant), lambda step: torch.randn(4, 8), loss=lambda y: y.mean(), steps=1
    )
    found = rec.first_nonfinite()
    assert found is not None
    assert (found.phase, found.path, found.op) == (phase, "block", "aten.fill_.Scalar")
    assert (found.kind, found.cause, found.nan_count) == ("producer", "constant NaN", 2)


def divide_by_foreach(x: torch.Tensor) -> torch.Tensor:
    both = [x * 1, x * 2]
    torch._foreach_div_(both, [0.0, 1.0])
    return both[0] + both[1]


def read_unwritten(x: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(8)
    memory.numpy()[:] = np.nan  # as if chance had it there
    return x + memory


def read_partly_written(x: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(8)
    memory.numpy()[:] = np.nan
    memory[2:] = 1.0
    return x + memory


def write_by_numpy(x: torch.Tensor) -> torch.Tensor:
    copied = x.detach().clone()
    copied.numpy()[0, 0] = np.nan
    return x + copied


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (
            divide_by_foreach,
            "it read a tensor that was not measured, and may have held them: "
            "_foreach_div_ wrote it in step 0, forward",
        ),
        (
            read_unwritten,
            "a tensor that it read is memory of torch.empty, and no op has written to all of it",
        ),
        (
            read_partly_written,
            "a tensor that it read is memory of torch.empty, and no op has written to all of it",
        ),
        (
            write_by_numpy,
            "it makes no NaN of finite numbers: they were written from outside of torch, as through NumPy",
        ),
    ],
    ids=["foreach", "unwritten", "partly written", "NumPy"],
)
def test_op_that_reads_what_nobody_measured_is_only_the_first_that_was_seen(
    function: Callable[[torch.Tensor], torch.Tensor], hint: str
) -> None:
    found = record_planted(function).first_nonfinite()
    assert found is not None
    assert (found.kind, found.op, found.path) == ("first seen", "aten.add.Tensor", "1")
    assert (found.source, found.hint, found.cause) == (None, hint, None)


def test_reader_of_an_op_that_was_left_out_of_the_capture_is_not_called_its_maker() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Applied(lambda x: x.relu().log()), nn.Linear(8, 2))
    few = modtrace.Capture(include=["2"], roles=("op_output", "leaf", "parameter"))
    with modtrace.record(model, ops=True, values=few) as rec:
        model(torch.randn(4, 8))
    found = rec.first_nonfinite()
    assert found is not None
    assert (found.kind, found.path, found.op) == ("first seen", "2", "aten.addmm.default")
    assert found.hint == (
        "it read a tensor that was not measured, and may have held them: log wrote it in step 0, forward"
    )


class InNumPy(torch.autograd.Function):
    """Calculates outside of torch: `forward` or `backward` divides by 0."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, divide_forward: bool) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() / np.float32(0)) if divide_forward else x * 1

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(grad.numpy() / np.float32(0)), None


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("in_forward", "phase"), [(True, "forward"), (False, "backward")])
def test_infinity_from_outside_of_torch_is_held_by_a_tensor_and_not_made_by_its_reader(
    in_forward: bool, phase: str
) -> None:
    found = record_planted(lambda x: InNumPy.apply(x, in_forward)).first_nonfinite()
    assert found is not None
    assert (found.kind, found.phase, found.path) == ("source", phase, "1")
    assert found.inf_count == 32


def test_hidden_state_of_an_earlier_step_is_not_blamed_on_its_reader() -> None:
    torch.manual_seed(0)
    cell = nn.RNNCell(8, 8)
    state = torch.zeros(4, 8)
    with modtrace.record(cell, ops=True, values=BY_OP) as rec:
        for _ in range(2):
            rec.step()
            state = cell(torch.randn(4, 8), state)
            torch._foreach_div_([state.data], [0.0])
    found = rec.first_nonfinite()
    assert found is not None
    assert (found.kind, found.op) == ("first seen", "aten.addmm.default")


class KeptMask(nn.Linear):
    """Adds a mask to its scores that it made in the first step."""

    mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.full((len(x), len(x)), -math.inf).triu(1)
        return (super().forward(x) @ x.T + self.mask).softmax(-1)


def record_last_steps(spoil: Callable[[torch.Tensor], object]) -> NonFinite | None:
    """Returns who made NaN or infinite values by the last two steps of five; the first has spoiled its mask."""
    model = KeptMask(3, 3)
    with modtrace.record(model, ops=True, keep_last=2, triggers=[], strict=True) as rec:
        for step in range(5):
            model(torch.ones(3, 3))
            if step == 0:
                spoil(model.mask)
        rec.dump()
    return rec.first_nonfinite()


def test_mask_that_a_dropped_step_has_made_is_meant() -> None:
    assert record_last_steps(torch.clone) is None


def test_op_that_reads_nan_of_a_dropped_step_is_only_the_first_that_was_seen() -> None:
    found = record_last_steps(lambda mask: mask.add_(math.inf))
    assert found is not None
    assert (found.op, found.kind) == ("aten.add.Tensor", "first seen")
    assert found.hint == (
        "it read a tensor of an earlier step, which may have held them; nothing is known of it here"
    )
