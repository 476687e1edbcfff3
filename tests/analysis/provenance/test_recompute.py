"""Whether activation checkpointing computed the same again: the first op that differs is named, and nothing else."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.command_line import run_command
from modtrace.errors import NothingRecordedError

BOTH_KINDS = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Block(nn.Module):
    """A linear layer, what is planted between, and a second linear layer."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.between = nn.Sequential(*between)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.between(self.first(x)))


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self, *blocks: nn.Module, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.options = {"use_reentrant": False, **options}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def record_checkpointed(
    model: nn.Module,
    between: Callable[[], object] = lambda: None,
    *,
    ops: bool = True,
    forward: AbstractContextManager[Any] | None = None,
    **options: Any,
) -> modtrace.Recording:
    """Returns the recording of a forward and its backward; `between` is called between the two."""
    x = torch.randn(4, 8, requires_grad=True)
    with modtrace.record(model, ops=ops, **options) as rec:
        with forward or nullcontext():
            y = model(x)
        between()
        y.float().square().mean().backward()
    return rec


def told(rec: modtrace.Recording) -> list[tuple[str | None, str | None, str | None]]:
    """Returns what differs: path, op and cause."""
    return [(each.path, each.op, each.cause) for each in rec.recompute_check().differences]


@BOTH_KINDS
def test_dropout_with_its_random_state_preserved_agrees(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(Block(nn.Dropout()), Block(nn.Dropout()), use_reentrant=use_reentrant)
    check = record_checkpointed(model).recompute_check()
    assert (check.differences, check.calls, check.steps, check.by_ops) == ((), 10, 1, True)
    # Of each block addmm, bernoulli_, div_ and mul; `last` and the sum only where the recompute does not end before.
    assert (check.by_statistics, check.by_hash) == (12 if use_reentrant else 8, 0)


@BOTH_KINDS
def test_dropout_without_its_random_state_is_named_in_each_block_and_nothing_behind_it(
    use_reentrant: bool,
) -> None:
    torch.manual_seed(0)
    model = Checkpointed(
        Block(nn.Dropout()), Block(nn.Dropout()), use_reentrant=use_reentrant, preserve_rng_state=False
    )
    rec = record_checkpointed(model)
    assert told(rec) == [
        ("blocks.1.between.0", "aten.bernoulli_.float", "random numbers"),
        ("blocks.0.between.0", "aten.bernoulli_.float", "random numbers"),
    ]
    first = rec.recompute_check().differences[0]
    assert (first.step, first.root, first.call, first.op_nth, first.by_hash) == (
        0,
        "Checkpointed",
        0,
        0,
        False,
    )
    assert first.forward.startswith("float32[4, 8], 0 .. 1, mean ")
    assert first.forward != first.recompute
    assert "preserve_rng_state=True" in (first.remedy or "")


@BOTH_KINDS
def test_dropout_of_a_checkpointed_function_is_named_although_no_module_was_computed_again(
    use_reentrant: bool,
) -> None:
    torch.manual_seed(0)

    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(F.dropout(self.first(x).relu()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.part, x, use_reentrant=use_reentrant, preserve_rng_state=False)
            return x

    random = ("", "aten.bernoulli_.float", "random numbers")
    assert told(record_checkpointed(Functions())) == [random, random]


def test_dropout_inside_of_attention_is_named() -> None:
    torch.manual_seed(0)

    def attend(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, 1, 4, 8)
        return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).view(4, 8)

    [found] = told(record_checkpointed(Checkpointed(Block(Applied(attend)), preserve_rng_state=False)))
    assert (found[0], found[2]) == ("blocks.0.between.0", "random numbers")


class OwnCheckpoint(torch.autograd.Function):
    """Checkpointing as people write it: it forgets the autocast of the forward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad.to(y.dtype))
        return None, x.grad


class OwnCheckpointed(nn.Module):
    """A block that is computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnCheckpoint.apply(self.block, x)  # type: ignore[no-any-return, no-untyped-call]


def test_autocast_that_the_recompute_lacks_is_named_at_the_first_op_that_it_changes() -> None:
    torch.manual_seed(0)
    rec = record_checkpointed(
        OwnCheckpointed(Block(nn.ReLU())), forward=torch.autocast("cpu", dtype=torch.bfloat16)
    )
    assert told(rec) == [("block.first", "aten.addmm.default", "autocast")]
    [found] = rec.recompute_check().differences
    assert found.forward.startswith("bfloat16[4, 8]")
    assert found.recompute.startswith("float32[4, 8]")


@BOTH_KINDS
def test_autocast_that_the_recompute_has_too_agrees(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(Block(nn.GELU()), Block(nn.GELU()), use_reentrant=use_reentrant)
    assert told(record_checkpointed(model, forward=torch.autocast("cpu", dtype=torch.bfloat16))) == []


@BOTH_KINDS
def test_buffer_that_changed_before_the_recompute_is_named(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8).eval()
    rec = record_checkpointed(
        Checkpointed(Block(norm), use_reentrant=use_reentrant), lambda: norm.running_mean.add_(0.5)
    )
    assert told(rec) == [("blocks.0.between.0", "aten.native_batch_norm.default", "changed buffer")]
    [found] = rec.recompute_check().differences
    assert found.hint == (
        "the buffer blocks.0.between.0.running_mean was written to by add_ (outside of modules) after the forward "
        "had read it"
    )


def test_weight_that_an_optimizer_changed_before_the_recompute_is_named() -> None:
    torch.manual_seed(0)
    model = Checkpointed(Block(nn.Tanh()))
    weight = model.blocks[0].last.weight  # type: ignore[union-attr]
    first = model.blocks[0].first.weight  # type: ignore[union-attr]

    def change() -> None:
        with torch.no_grad():
            first.mul_(2.0)
            weight.mul_(2.0)

    assert told(record_checkpointed(model, change)) == [
        ("blocks.0.first", "aten.addmm.default", "changed parameter")
    ]


def test_training_batch_norm_is_said_to_update_its_count_twice_behind_what_matters_more() -> None:
    torch.manual_seed(0)
    model = Checkpointed(Block(nn.BatchNorm1d(8), nn.Dropout()), preserve_rng_state=False)
    assert told(record_checkpointed(model)) == [
        ("blocks.0.between.1", "aten.bernoulli_.float", "random numbers"),
        ("blocks.0.between.0", "aten.add_.Tensor", "buffer updated twice"),
    ]


def test_op_that_ran_in_the_recompute_alone_is_named_as_the_cause_of_the_first_that_differs() -> None:
    torch.manual_seed(0)
    calls = []

    def take_turns(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin() if len(calls) % 2 else x.cos()

    rec = record_checkpointed(Checkpointed(Block(Applied(take_turns)), determinism_check="none"))
    assert told(rec) == []  # `last` ends the recompute before it computes anything: it needs its input alone
    calls.clear()
    rec = record_checkpointed(Checkpointed(Block(Applied(take_turns), nn.Tanh()), determinism_check="none"))
    assert told(rec) == [("blocks.0.between.1", "aten.tanh.default", "another op")]
    assert rec.recompute_check().differences[0].hint == (
        "its input comes from what ran in one of the two alone: cos in blocks.0.between.0 in the recompute and sin in "
        "blocks.0.between.0 in the forward"
    )


def test_nested_checkpoints_and_several_calls_of_one_module_agree() -> None:
    torch.manual_seed(0)
    shared = Block(nn.Dropout(), nn.GELU())
    inner = Checkpointed(shared, shared)
    check = record_checkpointed(Checkpointed(inner, inner)).recompute_check()
    assert check.differences == ()
    assert check.by_statistics > 20


def test_call_of_a_module_that_differs_is_named_by_its_number() -> None:
    torch.manual_seed(0)
    calls = []

    def scale(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * (3.0 if len(calls) == 3 else 2.0)

    shared = Block(Applied(scale), nn.Tanh())
    rec = record_checkpointed(Checkpointed(shared, shared))
    [found] = rec.recompute_check().differences
    assert (found.path, found.call, found.op, found.cause) == (
        "blocks.0.between.0",
        1,
        "aten.mul.Tensor",
        "other arguments",
    )
    assert found.hint == "forward and recompute gave it others: other 2.0 against 3.0"


class Repeated(nn.Module):
    """A function that is recomputed, and can read how often it has run, and a buffer that counts."""

    def __init__(self, function: Callable[["Repeated", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function, self.runs = nn.Linear(8, 8), nn.Linear(8, 8), function, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.run, self.first(x), use_reentrant=False, determinism_check="none"))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.function(self, x)


def mask(net: Repeated, x: torch.Tensor) -> torch.Tensor:
    """A mask that torch has not drawn."""
    return torch.from_numpy(np.random.default_rng(net.runs).random(x.shape).astype(np.float32))


def count(net: Repeated, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    return (x * net.count).tanh()


@pytest.mark.parametrize(
    ("function", "op", "cause", "hint"),
    [
        (lambda net, x: (x * net.runs).tanh(), "mul.Tensor", "other arguments", "other 1 against 2"),
        (lambda net, x: x.tanh() * mask(net, x), "lift_fresh.default", "another tensor", "no op has made"),
        (count, "add_.Tensor", "changed buffer", "mul in Repeated reads it"),
        (
            lambda net, x: (x * 2 if net.runs > 1 else x).tanh(),
            "tanh.default",
            "another op",
            "mul in Repeated in the recompute",
        ),
    ],
    ids=["number", "mask at the end", "counter", "one op more"],
)
def test_what_python_and_numpy_change_is_told_as_that(
    function: Callable[[Repeated, torch.Tensor], torch.Tensor], op: str, cause: str, hint: str
) -> None:
    torch.manual_seed(0)
    model = Repeated(function)
    with modtrace.record(
        model, ops=True, values=modtrace.Capture(roles="all", hash=True), strict=True
    ) as rec:
        model(torch.ones(4, 8)).square().sum().backward()
    found = rec.recompute_check().differences[0]
    assert (found.path, found.op, found.cause) == ("", f"aten.{op}", cause)
    assert hint in (found.hint or "")


def test_modules_are_compared_where_ops_were_not_recorded() -> None:
    torch.manual_seed(0)
    model = Checkpointed(
        Block(nn.Dropout(), nn.Tanh()), Block(nn.Dropout(), nn.Tanh()), preserve_rng_state=False
    )
    rec = record_checkpointed(model, ops=False)
    assert told(rec) == [
        ("blocks.1.between.0", None, "random numbers"),
        ("blocks.0.between.0", None, "random numbers"),
    ]
    assert not rec.recompute_check().by_ops


def test_modules_are_compared_where_ops_were_recorded_and_not_measured() -> None:
    torch.manual_seed(0)
    model = Checkpointed(Block(nn.Dropout(), nn.Tanh()), preserve_rng_state=False)
    rec = record_checkpointed(model, values=modtrace.Capture(roles=("output",)))
    assert told(rec) == [("blocks.0.between.0", None, "random numbers")]


def test_hashes_tell_what_statistics_cannot() -> None:
    torch.manual_seed(0)
    calls = []

    def shift(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.roll(len(calls), 1)

    hashed = modtrace.Capture(roles=("op_output",), hash=True)
    rec = record_checkpointed(Checkpointed(Block(Applied(shift), nn.Tanh())), values=hashed)
    [found] = rec.recompute_check().differences
    assert (found.op, found.by_hash) == ("aten.roll.default", True)
    assert found.cause == "other arguments"
    calls.clear()
    counted = modtrace.Capture(roles=("op_output",))
    check = record_checkpointed(
        Checkpointed(Block(Applied(shift), nn.Tanh())), values=counted
    ).recompute_check()
    assert (check.by_hash, check.by_statistics > 0) == (0, True)


def test_recording_without_a_recompute_has_nothing_to_compare() -> None:
    with pytest.raises(
        NothingRecordedError, match=r"^there is nothing to compare: no activation checkpointing ran"
    ):
        record_checkpointed(Block(nn.ReLU())).recompute_check()


def test_recompute_of_which_nothing_was_measured_has_nothing_to_compare() -> None:
    rec = record_checkpointed(Checkpointed(Block(nn.ReLU())), values=modtrace.Capture(roles=("grad_output",)))
    with pytest.raises(
        NothingRecordedError, match=r"^5 calls were recomputed, and no tensor was measured in both"
    ):
        rec.recompute_check()


@pytest.mark.parametrize(("preserved", "code"), [(True, 0), (False, 1)])
def test_command_ends_with_1_where_something_differs(
    preserved: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    folder = str(tmp_path / "run.modtrace")
    record_checkpointed(Checkpointed(Block(nn.Dropout()), preserve_rng_state=preserved)).write(folder)
    assert run_command(monkeypatch, "recompute", folder) == code
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "forward and recompute agree as far as compared: compared 4 outputs of ops by statistics, "
        "of 5 recomputed calls in 1 step; 1 call ended before the last op of the forward"
        if preserved
        else "forward and recompute differ in step 0, first bernoulli_ in blocks.0.between.0"
    )
    assert run_command(monkeypatch, "recompute", folder, "--json") == code
    answer = json.loads(capsys.readouterr().out)
    assert [each["cause"] for each in answer["differences"]] == ["random numbers"] * code
    assert (answer["calls"], answer["marks"]) == (5, [])


def test_command_breaks_its_lines_at_the_width_of_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    folder = str(tmp_path / "run.modtrace")
    record_checkpointed(Checkpointed(Block(nn.BatchNorm1d(8), nn.Dropout()), preserve_rng_state=False)).write(
        folder
    )
    monkeypatch.setenv("COLUMNS", "60")
    assert run_command(monkeypatch, "recompute", folder) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert "and add_ in blocks.0.between.0: buffer updated twice" in lines


def test_command_ends_with_2_where_nothing_was_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run.modtrace")
    record_checkpointed(Block(nn.ReLU())).write(folder)
    assert run_command(monkeypatch, "recompute", folder) == 2
    assert capsys.readouterr().err == (
        f"modtrace: error: {folder}: there is nothing to compare: no activation checkpointing ran in a backward "
        "of this recording.\n"
    )
