"""`modtrace record --keep-last N`: only the steps before something went wrong are written."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import modtrace
from helpers.command_ends import end_of_modtrace
from helpers.command_line import Command

TRAIN = """
import sys
import torch

model = torch.nn.Linear(2, 2)
for step in range(8):
    x = torch.ones(1, 2)
    if "nan" in sys.argv and step == 5:
        x = x * float("nan")
    model(x).sum().backward()
    model.zero_grad()
if "raise" in sys.argv:
    raise ValueError("out of luck")
"""


def record(folder: Path, *arguments: str, options: Sequence[str] = ()) -> tuple[int, str, modtrace.Recording]:
    """The exit code, what is said on standard error, and the recording."""
    (folder / "train.py").write_text(TRAIN)
    done = end_of_modtrace(folder, "record", "--keep-last", "3", *options, "train.py", *arguments)
    return done.status, done.stderr, modtrace.open_recording(folder / "train.modtrace")


def steps_of(rec: modtrace.Recording) -> list[int]:
    found: list[int] = rec.table("steps")["step"].to_pylist()
    return found


def test_steps_before_a_nan_are_written(tmp_path: Path) -> None:
    code, said, rec = record(tmp_path, "nan")
    assert code == 0
    assert steps_of(rec) == [3, 4, 5]
    because, dropped, end, advice = said.splitlines()
    assert because == "modtrace: written because: step 5: output of Linear holds 2 NaN"
    assert dropped == "modtrace: after the last trigger, 2 steps were held and dropped"
    assert end.startswith("modtrace: wrote 3 of 8 steps, ")
    assert advice.startswith("modtrace: it holds NaN or infinite values. Do they matter? modtrace nonfinite ")
    assert rec.triggers[0].reason == "output of Linear holds 2 NaN"


def test_steps_before_a_failure_are_written_and_it_is_passed_on(tmp_path: Path) -> None:
    code, said, rec = record(tmp_path, "raise")
    assert code == 1
    assert "ValueError: out of luck" in said
    assert steps_of(rec) == [5, 6, 7]
    assert [each.kind for each in rec.triggers] == ["exception"]


def test_held_steps_without_values_say_that_no_nan_is_seen(tmp_path: Path) -> None:
    code, said, rec = record(tmp_path, "nan", options=["--values", "none"])
    assert code == 0
    assert steps_of(rec) == []
    assert said.splitlines()[0] == (
        "modtrace: --values none measures nothing, so no NaN is seen: "
        "the last 3 steps are written only when the program fails."
    )


def test_run_that_goes_well_says_that_nothing_was_written(tmp_path: Path) -> None:
    code, said, rec = record(tmp_path)
    assert code == 0
    assert steps_of(rec) == []
    dropped, end = said.splitlines()
    assert dropped == "modtrace: no trigger fired; 8 steps were held and dropped"
    assert end.startswith("modtrace: wrote 0 of 8 steps, ")


def test_stop_ends_the_program_with_an_error_and_report_lets_it_end(tmp_path: Path) -> None:
    code, said, rec = record(tmp_path, "nan", options=["--on-nonfinite", "stop"])
    assert code == 1
    assert "modtrace.errors.NonFiniteError: first non-finite values: 2 NaN in step 5, forward\n" in said
    assert rec.meta.complete
    code, said, _ = record(tmp_path, "nan", options=["--on-nonfinite", "report", "--overwrite"])
    assert code == 0
    assert said.startswith("modtrace: first non-finite values: 2 NaN in step 5, forward\n")
    assert "  try: record(ops=True) (modtrace record --ops), on a long run with " in said


def test_dump_without_held_steps_is_refused(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    assert command("record", "--on-nonfinite", "dump", "train.py", code=2).err == (
        "modtrace: error: Invalid value for --on-nonfinite: on_nonfinite='dump' writes the steps that are held, "
        "and none are: give keep_last=20 (--keep-last 20). Try 'modtrace record --help'.\n"
    )
    assert not (tmp_path / "train.modtrace").exists()
