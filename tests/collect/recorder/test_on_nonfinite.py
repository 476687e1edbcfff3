"""`record(on_nonfinite=...)`: what is reported, and what stops a run before its parameters change."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from modtrace.measure.measurers.measurer import Measurer

WITH_AND_WITHOUT_OPS = pytest.mark.parametrize("ops", [True, False], ids=["ops", "modules"])


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


class CachedMask(nn.Module):
    """Attention whose mask is made in the first step, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.full((len(x), len(x)), float("-inf")).triu(1)
        q = self.q(x)
        return torch.softmax(q @ q.T + self.mask, -1) @ q


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), Log(), nn.Dropout(0.5), nn.Linear(8, 1))


def batches(bad: int, steps: int = 5) -> Iterator[torch.Tensor]:
    """Inputs of which one makes the sigmoid exactly 0."""
    return (torch.randn(4, 8) * (1e5 if step == bad else 1) for step in range(steps))


class Loop:
    """A training loop that keeps what there was before each step of the optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.before: tuple[Any, ...] = ()

    def state(self) -> tuple[Any, ...]:
        parameters = [each.clone() for each in self.model.parameters()]
        kept = [value.clone() for each in self.optimizer.state.values() for value in each.values()]
        return parameters, kept, [torch.get_rng_state()]

    def run(self, inputs: Iterator[torch.Tensor], step: Callable[[], Any] | None = None) -> None:
        for x in inputs:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.before = self.state()
            (step or self.optimizer.step)()


def are_bit_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(
        len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
        for mine, theirs in zip(one, other, strict=True)
    )


@WITH_AND_WITHOUT_OPS
def test_stop_raises_before_parameters_change_and_leaves_a_complete_recording(ops: bool) -> None:
    loop = Loop(make_model())
    rec = modtrace.record(loop.model, ops=ops, on_nonfinite="stop", strict=True)
    with pytest.raises(modtrace.NonFiniteError) as stopped, rec:
        loop.run(batches(bad=3))
    assert are_bit_equal(loop.before, loop.state())
    assert rec.meta.complete
    assert rec.table("steps")["step"].to_pylist() == [0, 1, 2, 3]
    [note] = rec.triggers
    told = "log in 2 of Sequential made 18 -inf" if ops else "output of 2 in Sequential holds 18 -inf"
    assert (note.step, note.kind, note.reason) == (3, "NonFinite", told)
    lines = str(stopped.value).splitlines()
    assert lines[0].endswith("in step 3, forward")
    assert ("made by log in 2 of Sequential" if ops else "output of 2 in Sequential") in lines[1]
    assert lines[-1] == "The optimizer has not stepped: parameters and its state are as they were before."
    assert str(rec.first_nonfinite()).splitlines()[:2] == lines[:2]


@WITH_AND_WITHOUT_OPS
def test_rows_are_the_same_whether_or_not_they_were_looked_at_before_the_step_ended(ops: bool) -> None:
    """A mask has each step looked at, and none is a reason to stop."""
    ids, shown = [], []
    for then in (None, "stop"):
        torch.manual_seed(0)
        loop = Loop(CachedMask())
        with modtrace.record(loop.model, ops=ops, on_nonfinite=then, strict=True) as rec:
            loop.run(batches(bad=-1))
        assert rec.triggers == ()
        tables = [rec.table(name) for name in ("calls", "ops", "tensors", "uses", "values", "sites")]
        ids.append([table.num_rows for table in tables])
        wanted = ("op_id", "sequence_nr", "forward_op_id", "name", "nth", "site_id", "producer_op", "order")
        shown.append(
            [table[name].to_pylist() for table in tables for name in wanted if name in table.column_names]
        )
    assert ids[0] == ids[1]
    first, again = shown
    assert [len(each) for each in first] == [len(each) for each in again]


def test_values_that_no_optimizer_uses_stop_the_next_call() -> None:
    model = make_model().eval()
    done = []
    with (
        pytest.raises(modtrace.NonFiniteError, match="in step 1, forward"),
        modtrace.record(model, on_nonfinite="stop", strict=True) as rec,
    ):
        for x in batches(bad=1):
            with torch.no_grad():
                model(x)
            done.append(len(done))
    assert done == [0, 1]
    assert rec.meta.complete


def test_last_step_stops_at_the_end_of_the_block_and_a_step_of_the_users_at_once() -> None:
    model, bad = make_model().eval(), torch.full((4, 8), 1e5)
    with pytest.raises(modtrace.NonFiniteError), modtrace.record(on_nonfinite="stop", strict=True):
        model(bad)
    with modtrace.record(on_nonfinite="stop", strict=True) as rec:
        model(bad)
        with pytest.raises(modtrace.NonFiniteError, match="output of 2 in Sequential"):
            rec.step()


def test_run_that_goes_on_is_stopped_in_each_step_once() -> None:
    loop = Loop(make_model())
    stopped = []
    with modtrace.record(loop.model, on_nonfinite="stop", strict=True) as rec:
        for x in (torch.full((4, 8), 1e5 if step in (1, 2) else 1.0) for step in range(5)):
            try:
                loop.run(iter([x]))
            except modtrace.NonFiniteError as error:
                stopped.append(str(error).partition(",")[0][-6:])
    assert stopped == ["step 1", "step 2"]
    assert all(bool(each.isfinite().all()) for each in loop.model.parameters())
    assert rec.table("steps").num_rows == 5


class ScaledLoop:
    """Training in float16 under a GradScaler, of which each step overflows at the scale `2 ** 19`."""

    def __init__(self, scale: float = 2.0**19, *, fused: bool = False) -> None:
        self.model = WithAux()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, fused=fused)
        self.scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=scale)

    def run(self, inputs: Iterator[torch.Tensor]) -> None:
        for x in inputs:
            self.optimizer.zero_grad()
            with torch.autocast(torch.get_default_device().type, dtype=torch.float16):
                loss = self.model(x)[0].square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


class WithAux(nn.Module):
    """Returns something else besides, which does not reach the loss, and may be NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.aux = Log()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            aux = self.aux(x.sum() + 100)
        return self.head(x), aux


@pytest.mark.parametrize(("ops", "fused"), [(False, False), (True, True)], ids=["modules", "ops, fused"])
def test_overflow_that_a_grad_scaler_skips_is_not_told(
    ops: bool, fused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = ScaledLoop(fused=fused)
    with modtrace.record(loop.model, ops=ops, on_nonfinite="report", strict=True) as rec:
        loop.run(batches(bad=-1))
    assert loop.scaler.get_scale() < 2.0**19
    assert rec.table("values")["inf_count"].to_numpy().any()
    assert capsys.readouterr().err == ""


def test_overflow_of_one_optimizer_that_is_skipped_does_not_stop_another() -> None:
    one, other = WithAux(), WithAux()
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-4) for each in (one, other)]
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
    before = [each.head.weight.clone() for each in (one, other)]
    with modtrace.record(nn.ModuleList([one, other]), on_nonfinite="stop", strict=True):
        with torch.autocast(torch.get_default_device().type, dtype=torch.float16):
            losses = [one(torch.ones(4, 8))[0].sum() * 1e4, other(torch.ones(4, 8))[0].sum()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        scaler.update()
    assert torch.equal(before[0], one.head.weight)
    assert not torch.equal(before[1], other.head.weight)


def test_first_of_two_optimizers_is_stopped() -> None:
    model = make_model()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model[0], model[4])]
    with (
        pytest.raises(modtrace.NonFiniteError, match="in step 1, forward"),
        modtrace.record(model, on_nonfinite="stop", strict=True),
    ):
        for x in batches(bad=1):
            model(x).square().mean().backward()
            before = [each.clone() for each in model.parameters()]
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    assert all(map(torch.equal, before, model.parameters()))
    assert [len(each.state) for each in optimizers] == [2, 2]


def test_bad_micro_batch_stops_the_step_that_its_gradients_are_added_up_for() -> None:
    loop = Loop(make_model())
    with (
        pytest.raises(modtrace.NonFiniteError, match="in step 1, micro-batch 0 of 0 to 2, forward"),
        modtrace.record(loop.model, ops=True, on_nonfinite="stop", strict=True) as rec,
    ):
        for bad in (-1, 0, -1):
            loop.optimizer.zero_grad()
            for x in batches(bad=bad, steps=3):
                loop.model(x).square().mean().backward()
            loop.before = loop.state()
            loop.optimizer.step()
    assert are_bit_equal(loop.before, loop.state())
    assert rec.table("steps")["step"].to_pylist() == [0, 1]


@WITH_AND_WITHOUT_OPS
def test_error_tells_that_training_diverges(ops: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    with (
        pytest.raises(modtrace.NonFiniteError) as raised,
        modtrace.record(model, ops=ops, on_nonfinite="stop", strict=True) as rec,
    ):
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(64, 8)).square().mean().backward()
            optimizer.step()
    found = rec.first_nonfinite()
    assert found is not None and {each.of for each in found.growth} == {"parameter", "parameter_grad"}
    said = str(raised.value).splitlines()
    assert {line for line in said if " grew, by step: " in line} == {
        line for line in str(found).splitlines() if " grew, by step: " in line
    }
    assert any(line.startswith("  try: training diverges: lower the learning rate") for line in said)


def test_tensor_of_a_dropped_step_is_suspected_only_if_it_held_such_values() -> None:
    """A target of every step is innocent; a weight that step 1 divided by 0 is named with that division."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 1), torch.randn(4, 8)
    target, weights = x.sum(1, keepdim=True), [torch.ones(())]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(modtrace.NonFiniteError) as raised,
        modtrace.record(model, ops=True, on_nonfinite="stop", strict=True),
    ):
        target = target + 1
        for step in range(5):
            loss = (model(x) - target).square().mean()
            weights.append(loss.detach() / (0.0 if step == 1 else 1.0))
            (loss * weights[max(0, step - 1)]).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = str(raised.value)
    assert said.startswith(
        "first non-finite values: 1 inf in step 3, after forward\n  first seen at mul outside"
    )
    assert "it read a tensor of an earlier step: div (outside of modules) made it in step 1" in said


def test_tensor_of_a_step_that_nobody_searched_is_not_taken_for_finite() -> None:
    """A metric of 0 / 0 in each step is absorbed; that of step 3 is used in step 4."""
    torch.manual_seed(0)
    model, metrics = nn.Linear(8, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(modtrace.NonFiniteError) as raised,
        modtrace.record(model, ops=True, on_nonfinite="stop", strict=True),
    ):
        for step in range(6):
            loss = model(torch.randn(4, 8)).square().mean()
            metrics.append((loss.detach() - loss.detach()) / 0)
            (loss * metrics[3] if step == 4 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = str(raised.value)
    assert said.startswith(
        "first non-finite values: 1 NaN in step 4, after forward\n  first seen at mul outside"
    )
    assert "it read a tensor of an earlier step, which may have held them" in said


def test_compiled_part_is_stopped_too() -> None:
    model = make_model()
    model[0].compile(backend="eager")
    model[2].compile(backend="eager")
    loop = Loop(model)
    with (
        pytest.raises(modtrace.NonFiniteError, match=r"in step 2, forward\n.*output of 2"),
        modtrace.record(model, on_nonfinite="stop", strict=True),
    ):
        loop.run(batches(bad=2))
    assert are_bit_equal(loop.before, loop.state())


def test_recording_around_one_that_stops_takes_it_for_a_failure_and_one_inside_does_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = Loop(make_model())
    outer = modtrace.record(loop.model, keep_last=2, triggers=[], strict=True)
    stopping = modtrace.record(loop.model, on_nonfinite="stop", keep_last=2, strict=True)
    inner = modtrace.record(loop.model, keep_last=2, triggers=[], strict=True)
    with pytest.raises(modtrace.NonFiniteError), outer, stopping, inner:
        loop.run(batches(bad=3))
    assert are_bit_equal(loop.before, loop.state())
    assert [[(note.step, note.kind) for note in rec.triggers] for rec in (outer, stopping, inner)] == [
        [(3, "exception")],
        [(3, "NonFinite")],
        [(3, "exception")],
    ]
    assert [rec.table("steps")["step"].to_pylist() for rec in (outer, stopping, inner)] == [[2, 3]] * 3


@pytest.mark.parametrize("then", ["report", "stop"])
def test_internal_error_while_looking_does_not_stop_the_run(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **more: object) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr("modtrace.api.nonfinite_reports.find_first", fail)
    loop = Loop(make_model())
    with (
        pytest.warns(modtrace.ModtraceWarning, match="while it looked for NaN, and looks no more") as warned,
        modtrace.record(loop.model, on_nonfinite=then) as rec,
    ):
        loop.run(batches(bad=2))
    assert len(warned) == 1
    assert rec.meta.complete
    assert rec.table("steps").num_rows == 5
    with pytest.raises(IndexError), modtrace.record(loop.model, on_nonfinite=then, strict=True):
        loop.run(batches(bad=2))


def test_internal_error_before_the_optimizer_ends_the_recording_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: object) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr("modtrace.collect.recorder.row_writer.RowWriter.open_rows", fail)
    loop = Loop(make_model())
    with (
        pytest.warns(modtrace.ModtraceWarning, match="met an internal error and stopped recording"),
        modtrace.record(loop.model, on_nonfinite="stop") as rec,
    ):
        loop.run(batches(bad=-1))
    assert not are_bit_equal(loop.before, loop.state())
    assert not rec.meta.complete


def test_stop_of_a_recording_without_a_block_raises_in_stop() -> None:
    model = make_model().eval()
    rec = modtrace.record(model, on_nonfinite="stop", strict=True)
    rec.start()
    model(torch.full((4, 8), 1e5))
    with pytest.raises(modtrace.NonFiniteError, match="in step 0, forward"):
        rec.stop()
    assert rec.meta.complete
    rec.stop()


@WITH_AND_WITHOUT_OPS
def test_report_prints_at_the_end_of_the_step_what_nonfinite_prints_and_counts_the_rest(
    ops: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, told = Loop(make_model()), []
    with modtrace.record(loop.model, ops=ops, on_nonfinite="report", strict=True) as rec:
        for x in batches(bad=2):
            loop.run(iter([x]))
            told.append(capsys.readouterr().err)
        found = rec.first_nonfinite()
        assert found is not None
        assert found.after is not None
        assert found.after.parameters_step == 3
        # What later steps used is not known yet when step 2 ends, which it does when step 3 begins.
        known = replace(found, after=replace(found.after, parameters_step=None, last_parameters_step=2))
        assert told == ["", "", "", f"modtrace: {known}", ""]
    assert capsys.readouterr().err == "modtrace: non-finite values in 3 steps, 2 to 4\n"


def test_report_leaves_out_what_is_not_included_and_tells_what_was_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make_model().eval()
    for path, told in (("4", "output of 4 in Sequential"), ("0", None)):
        trigger = modtrace.NonFinite(include=path, then="report")
        with modtrace.record(model, triggers=trigger, strict=True):
            model(torch.full((4, 8), 1e5))
        text = capsys.readouterr().err
        assert (told in text) if told else text == ""
    with modtrace.record(model, on_nonfinite="report", strict=True) as rec:
        model(torch.ones(4, 8))
        rec.log(loss=float("nan"))
    assert capsys.readouterr().err == "modtrace: non-finite values in step 0: log.loss is nan\n"


@pytest.mark.parametrize("then", ["report", "stop"])
def test_no_tensor_is_measured_more_often(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    measure = Measurer.measure

    def counted(self: Measurer, tensor: torch.Tensor) -> Any:
        counts[-1] += 1
        return measure(self, tensor)

    monkeypatch.setattr(Measurer, "measure", counted)
    for chosen in (None, then):
        counts.append(0)
        torch.manual_seed(0)
        loop = Loop(make_model())
        with modtrace.record(loop.model, on_nonfinite=chosen, strict=True):
            loop.run(batches(bad=-1))
    assert counts[0] == counts[1] > 0


@WITH_AND_WITHOUT_OPS
def test_dump_writes_the_steps_that_are_held(ops: bool) -> None:
    loop = Loop(make_model())
    with modtrace.record(loop.model, ops=ops, on_nonfinite="dump", keep_last=2, strict=True) as rec:
        loop.run(batches(bad=3, steps=7))
    behind = [4] if ops else []  # ops between two steps belong to the first, and their values to the second
    assert rec.table("steps")["step"].to_pylist() == [2, 3, *behind]
    assert [note.step for note in rec.triggers] == [3]


def test_healthy_run_of_which_no_step_is_written_says_so() -> None:
    loop = Loop(make_model())
    with modtrace.record(loop.model, on_nonfinite="dump", keep_last=2, strict=True) as rec:
        loop.run(batches(bad=-1))
    assert rec.table("steps").num_rows == 0
    assert rec.first_nonfinite() is None


def test_what_can_never_happen_is_refused() -> None:
    said = "on_nonfinite='dump' writes the steps that are held, and none are: give keep_last=20"
    with pytest.raises(ValueError, match=said):
        modtrace.record(on_nonfinite="dump")
    with pytest.raises(ValueError, match="on_nonfinite='stop' looks at what is measured, and values=None"):
        modtrace.record(on_nonfinite="stop", values=None)
    with pytest.raises(
        ValueError, match="on_nonfinite='die': give 'report', 'dump', 'stop', or leave it out"
    ):
        modtrace.record(on_nonfinite="die")
    with pytest.raises(ValueError, match="then='die': give 'report', 'dump', 'stop', or leave it out"):
        modtrace.NonFinite(then="die")
