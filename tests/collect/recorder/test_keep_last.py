"""`record(keep_last=K)`: the last steps are written when something goes wrong, in full, and nothing otherwise."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.command_ends import end_of_program
from helpers.ours import assert_bounded, settled
from helpers.stat_rows import rows as stat_rows
from helpers.user_modes import SeesOps
from modtrace.recording.meta import Note

#: Where a recording goes: what `to` is, from a folder.
PLACES: dict[str, Callable[[Path], Path | None]] = {
    "to a folder": lambda folder: folder / "run.modtrace",
    "in memory": lambda folder: None,
}

#: What is recorded: with values, with ops, with both.
KINDS: dict[str, dict[str, Any]] = {
    "values": {},
    "ops": {"ops": True, "values": None},
    "values and ops": {"ops": True},
}


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


class Net(nn.Module):
    """Its norm is frozen, so that every step reads the same weights; its mask is made once, by ops."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.norm = nn.LayerNorm(4).requires_grad_(False)
        self.head = nn.Linear(4, 2)
        self.mask: torch.Tensor | None = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(4) * 2
        return self.head(self.norm(self.block(x)) * self.mask)


class Training:
    def __init__(self, rec: modtrace.LiveRecording, model: nn.Module) -> None:
        self.rec = rec
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.step = 0

    def run(self, steps: int, *, nan_at: int = -1, forever: bool = True) -> None:
        for _ in range(steps):
            is_bad = 0 <= nan_at <= self.step and (forever or self.step == nan_at)
            x = torch.ones(3, 4) * (float("nan") if is_bad else 1.0)
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            if not is_bad or forever:
                self.optimizer.step()
            self.rec.log(loss=loss)
            self.step += 1


def steps_of(rec: modtrace.Recording) -> list[int]:
    found: list[int] = rec.table("steps")["step"].to_pylist()
    return found


# The promise.


@pytest.mark.parametrize(
    ("place", "options"),
    [("to a folder", "values and ops"), ("in memory", "values"), ("in memory", "ops")],
)
def test_steps_up_to_the_first_nan_are_left_in_full(tmp_path: Path, place: str, options: str) -> None:
    """The same run, recorded from its first step to its last, has the same rows of those steps."""
    whole, kept = [
        modtrace.record(model, to, strict=True, backward_times=True, **KINDS[options], **more)
        for model, to, more in ((None, None, {}), (None, PLACES[place](tmp_path), {"keep_last": 8}))
    ]
    for rec in (whole, kept):
        torch.manual_seed(0)
        with rec:
            Training(rec, Net()).run(30, nan_at=25)
    last = list(range(18, 26))
    assert steps_of(kept) == last
    assert kept.meta.marks == ()
    assert [each.step for each in kept.triggers] == [25]
    for table in ("calls", "ops", "values", "scalars"):
        assert counts(kept, table) == {step: n for step, n in counts(whole, table).items() if step in last}
    for step in (18, 22, 25):
        assert shown(kept, step) == shown(whole, step)
    if place == "to a folder":
        assert steps_of(modtrace.open_recording(tmp_path / "run.modtrace")) == last


def counts(rec: modtrace.Recording, table: str) -> dict[int, int]:
    """How many rows of each step there are."""
    steps = rec.table(table)["step"].to_pylist()
    return {step: steps.count(step) for step in sorted(set(steps))}


EARLIER = re.compile("^earlier:.*")


def shown(rec: modtrace.Recording, step: int) -> dict[str, Any]:
    """What the answers of a recording say about a step, without times and ids.

    Which op made what was there before the step (the mask, a momentum) is not known where that step was dropped.
    """
    graph = rec.graph(step)
    nodes = {index: EARLIER.sub("earlier", node.key) for index, node in enumerate(graph.nodes)}
    names = [(node.path, node.calls, [(child.path, child.type) for child in node.children])
             for node in rec.module_tree(step).roots]  # fmt: skip
    return {
        "values": [str(row._replace(call_id=None)) for row in stat_rows(rec, step=step)],
        "nodes": list(nodes.values()),
        "edges": sorted((nodes[edge.source], nodes[edge.target], edge.slot) for edge in graph.edges),
        "tree": names,
        "ops": sorted(row.name for row in rec.op_table(step).rows),
        "paths": rec.paths(step).rows,
    }


def test_first_nonfinite_is_found_in_what_was_kept() -> None:
    with modtrace.record(keep_last=3, strict=True, ops=True) as rec:
        Training(rec, Net()).run(12, nan_at=9)
    found = rec.first_nonfinite()
    assert found is not None
    # The input is made NaN between two steps, by an op that belongs to the step that is given it.
    assert (found.path, found.step, found.role) == (None, 9, "op_output")
    assert rec.triggers == (Note(step=9, kind="NonFinite", reason=rec.triggers[0].reason),)
    assert rec.triggers[0].reason == "mul outside of modules made 12 NaN"


def test_steps_go_on_being_held_after_a_dump() -> None:
    with modtrace.record(keep_last=2, strict=True) as rec:
        training = Training(rec, Net())
        training.run(6, nan_at=4, forever=False)
        training.run(6, nan_at=9, forever=False)
        training.run(3)
    assert steps_of(rec) == [3, 4, 8, 9]
    assert [each.step for each in rec.triggers] == [4, 9]
    assert rec.meta.notes[-1].reason == "after the last trigger, 5 steps were held and dropped"
    assert rec.module_tree().step.last == 9  # type: ignore[union-attr]


# What else has steps written.


@pytest.mark.parametrize("error", [ValueError("boom\nmore"), KeyboardInterrupt(), SystemExit(3)])
def test_exception_leaves_the_last_steps_and_the_one_that_was_open(error: BaseException) -> None:
    rec = modtrace.record(keep_last=3, strict=True)
    with pytest.raises(type(error)), rec:
        training = Training(rec, Net())
        training.run(7)
        training.model(torch.ones(3, 4))
        raise error
    assert steps_of(rec) == [5, 6, 7]
    said = {
        "ValueError": "ValueError: boom",
        "KeyboardInterrupt": "KeyboardInterrupt",
        "SystemExit": "SystemExit: 3",
    }
    assert rec.triggers == (Note(step=7, kind="exception", reason=said[type(error).__name__]),)
    assert counts(rec, "calls")[7] == 6


@pytest.mark.parametrize("code", [None, 0])
def test_exit_without_an_error_is_a_clean_end(code: int | None) -> None:
    rec = modtrace.record(keep_last=3, strict=True)
    with pytest.raises(SystemExit), rec:
        Training(rec, Net()).run(4)
        raise SystemExit(code)
    assert steps_of(rec) == []
    assert rec.meta.complete


def test_exception_in_a_module_leaves_the_step_in_which_it_came() -> None:
    class Failing(Net):
        def forward(self, x):
            y = super().forward(x)
            if x.numel() == 4:
                raise RuntimeError("batch of one")
            return y

    rec = modtrace.record(keep_last=2, strict=True, ops=True)
    with pytest.raises(RuntimeError), rec:
        training = Training(rec, Failing())
        training.run(4)
        training.model(torch.ones(1, 4))
    assert steps_of(rec) == [3, 4]
    assert rec.table("calls")["raised"].to_pylist().count(True) == 1


def test_dump_where_nothing_is_held_is_refused() -> None:
    with (
        modtrace.record() as rec,
        pytest.raises(
            modtrace.ModtraceError, match=r"^dump\(\) writes the steps that are held, and none are"
        ),
    ):
        rec.dump()
    with pytest.raises(modtrace.ModtraceError, match=r"^rec.dump\(\) works inside the"):
        rec.dump()


def test_logged_number_and_band_fire() -> None:
    triggers = [modtrace.Above("log.loss", 50), modtrace.OutOfBand("log.lr", at_least=5)]
    with modtrace.record(keep_last=2, triggers=triggers, strict=True, values=None) as rec:
        training = Training(rec, Net())
        for step in range(12):
            training.run(1)
            rec.log(loss=100.0 if step == 4 else 1.0, lr=3.0 if step == 9 else 0.1)
    assert rec.triggers == (
        Note(step=4, kind="Above", reason="log.loss 100 is above 50"),
        Note(step=9, kind="OutOfBand", reason="log.lr 3 is outside of 0.1 +- 0.0008 (its last 9 steps)"),
    )
    assert steps_of(rec) == [3, 4, 8, 9]


def test_triggers_alone_write_every_step_and_leave_their_notes() -> None:
    with modtrace.record(triggers=modtrace.NonFinite(), strict=True) as rec:
        training = Training(rec, Net())
        training.run(3, nan_at=2)
        assert rec._recorder is not None
        flight_recorder = rec._recorder._flight_recorder
        assert flight_recorder is not None
        assert flight_recorder.last_fired_step is None
        training.run(1, nan_at=2)
        assert flight_recorder.last_fired_step == 2  # as soon as the next step begins
    assert steps_of(rec) == [0, 1, 2, 3]
    assert [(each.step, each.kind) for each in rec.triggers] == [(2, "NonFinite")]


def test_steps_that_the_user_ends_are_looked_at_at_once() -> None:
    with modtrace.record(keep_last=2, strict=True) as rec:
        training = Training(rec, Net())
        for _ in range(4):
            training.run(1, nan_at=3)
            rec.step()
        assert rec.meta.notes[0].step == 3
        assert steps_of(rec) == [2, 3]


# The end.


def test_run_without_a_trigger_leaves_no_steps_and_says_so(tmp_path: Path) -> None:
    with modtrace.record(to=tmp_path / "run", keep_last=3, strict=True) as rec:
        Training(rec, Net()).run(5)
    opened = modtrace.open_recording(tmp_path / "run")
    assert opened.meta.complete
    assert opened.triggers == ()
    assert [each.num_rows for each in map(opened.table, ("calls", "values", "steps", "scalars"))] == [0] * 4
    assert opened.table("modules").num_rows == 6
    assert str(opened).splitlines()[1:3] == [
        "nothing was recorded",
        "no trigger fired; 5 steps were held and dropped",
    ]
    assert rec.progress.steps == 5
    assert opened.meta.options["keep_last"] == 3
    assert opened.meta.options["triggers"] == ["NonFinite()"]


def test_tree_says_why_its_steps_were_written() -> None:
    with modtrace.record(keep_last=2, strict=True) as rec:
        Training(rec, Net()).run(5, nan_at=3)
    tree = str(rec.module_tree(step=3))
    lines = [line for line in tree.splitlines() if not line.startswith("of ")]  # where the step goes
    assert lines[1].startswith("step 3 (train), ")
    assert lines[2] == "! NaN or infinite values in step 3; do they matter? rec.first_nonfinite()"
    assert lines[3] == "written because: step 3: output of block.0 in Net holds 12 NaN"
    assert lines[4] == "after the last trigger, 1 step was held and dropped"


FORKING = """
import os, sys
import torch
import modtrace

model = torch.nn.Linear(2, 2)
rec = modtrace.record(model, to=sys.argv[1], keep_last=3, triggers=modtrace.OnSignal()).__enter__()
def run(steps):
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()
run(4)
child = os.fork()
if not child:
    run(2)
    rec.dump("in the child")
    os.kill(os.getpid(), __import__("signal").SIGUSR1)
    sys.exit(3)
assert os.waitpid(child, 0)[1] == 3 << 8
run(1)
rec.dump("in the parent")
run(3)
"""


def test_block_that_is_never_left_ends_cleanly_and_a_fork_writes_nothing_of_what_its_parent_holds(
    tmp_path: Path,
) -> None:
    ended = end_of_program(tmp_path, FORKING, str(tmp_path / "run"))
    assert (ended.status, ended.stderr) == (0, "")
    opened = modtrace.open_recording(tmp_path / "run")
    assert opened.meta.complete
    assert [each.reason for each in opened.meta.notes] == [
        "in the parent",
        "after the last trigger, 3 steps were held and dropped",
    ]
    assert steps_of(opened) == [2, 3, 4]


# What must not happen.


def test_looking_at_steps_runs_no_op_and_draws_no_number() -> None:
    def run(with_triggers: bool) -> tuple[list[str], torch.Tensor]:
        torch.manual_seed(3)
        mode = SeesOps()
        more = {"keep_last": 2, "triggers": [modtrace.NonFinite(), modtrace.OutOfBand("log.loss")]}
        with modtrace.record(strict=True, ops=True, **(more if with_triggers else {})) as rec, mode:
            Training(rec, Net()).run(4, nan_at=3)
        return mode.seen, torch.rand(4)

    (plain, plain_numbers), (kept, kept_numbers) = run(False), run(True)
    assert kept == plain
    assert torch.equal(kept_numbers, plain_numbers)


def test_failure_while_looking_is_told_once_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from modtrace.recording.triggers.step_conditions import IsNonFinite

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("in a trigger")

    monkeypatch.setattr(IsNonFinite, "__call__", fail)
    with pytest.warns(modtrace.ModtraceWarning, match="in a trigger"), modtrace.record(keep_last=2) as rec:
        Training(rec, Net()).run(5)
    assert rec.meta.marks == (
        "incomplete from step 1: modtrace failed at while writing rows: ZeroDivisionError: in a trigger",
    )
    with pytest.raises(ZeroDivisionError), modtrace.record(keep_last=2, strict=True) as rec:
        Training(rec, Net()).run(5)


def test_eighty_steps_hold_as_many_objects_as_forty(tmp_path: Path) -> None:
    counted = []
    with modtrace.record(to=tmp_path / "run", keep_last=10, strict=True, ops=True) as rec:
        training = Training(rec, Net())
        for _ in range(4):
            training.run(20)
            counted.append(settled(rec, lambda: training.run(1)))
    assert_bounded(counted[1:], slack=4)  # a step has four gradients that are measured


# What may be given.


def test_what_makes_no_sense_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"^keep_last=0: give a number of steps"):
        modtrace.record(keep_last=0)
    with pytest.raises(TypeError, match=r"^triggers=3: give modtrace's NonFinite"):
        modtrace.record(triggers=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^include='blok\.0' matches no"):
        modtrace.record(Net(), triggers=modtrace.NonFinite(include="blok.0"))
    with pytest.raises(ValueError, match=r"looks at what is measured, and values=None measures nothing$"):
        modtrace.record(values=None, triggers=modtrace.Above("rms", 3))


# With what else is captured.


def test_whole_tensors_are_kept_with_the_steps_that_are_written(tmp_path: Path) -> None:
    values = modtrace.Capture(roles="output", include="head", tensors=True)
    with modtrace.record(Net(), tmp_path / "run", keep_last=2, values=values, strict=True) as rec:
        model = Net()
        outputs = []
        for _ in range(6):
            outputs.append(model(torch.randn(3, 4)).detach().clone())
            rec.step()
        rec.dump()
    table = rec.table("values")
    assert table["step"].to_pylist() == [4, 5]
    found = [rec.data.tensor(blob).to_torch() for blob in table["blob"].to_pylist()]
    assert torch.equal(torch.stack(found), torch.stack(outputs[4:]))


def test_capture_that_waits_for_a_trigger_looks_at_the_steps_behind_it() -> None:
    waiting = modtrace.Capture(roles="output", include="head", on_trigger=2)
    with modtrace.record(values=waiting, triggers=modtrace.Above("log.loss", 50), strict=True) as rec:
        training = Training(rec, Net())
        for step in range(9):
            training.run(1)
            rec.log(loss=100.0 if step == 4 else 1.0)
    assert [each.step for each in rec.triggers] == [4]
    assert sorted(set(rec.table("values")["step"].to_pylist())) == [5, 6]
