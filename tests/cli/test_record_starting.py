"""What fails in modtrace itself does not stop the program, and costs no recording that was there."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch

import modtrace
from cli.processes.test_record import TRAIN
from helpers.command_ends import end_of_modtrace
from modtrace.collect.recorder.recorder import Recorder
from modtrace.errors import ModtraceWarning

CANNOT_BEGIN = "modtrace met an internal error when it began to record; the run goes on, unrecorded"


def fail(*given: object) -> NoReturn:
    raise ZeroDivisionError("out of luck")


def failing(what: str) -> str:
    """Python that makes a function of modtrace fail in its process."""
    return (
        f"from unittest import mock; mock.patch({what!r}, side_effect=ZeroDivisionError('no luck')).start()"
    )


def record_steps(path: Path, steps: int, **options: bool) -> modtrace.Recording:
    model = torch.nn.Linear(2, 2)
    with modtrace.record(model, to=path, **options) as rec:
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            rec.log(loss=1.0)
            rec.step()
    return rec


def count_steps(path: Path) -> int:
    return modtrace.open_recording(path).table("steps").num_rows


def test_run_goes_on_unrecorded_where_recording_cannot_begin_and_the_old_recording_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    record_steps(path, 3)
    files = sorted(path.rglob("*"))
    monkeypatch.setattr(Recorder, "_begin", fail)
    with pytest.warns(ModtraceWarning, match=CANNOT_BEGIN) as given:
        rec = record_steps(path, 2, overwrite=True)
    assert given[0].filename == __file__
    assert rec.meta.marks == ("modtrace failed when it began to record: ZeroDivisionError: out of luck",)
    assert rec.table("calls").num_rows == 0
    assert sorted(path.rglob("*")) == files
    assert count_steps(path) == 3
    monkeypatch.undo()
    record_steps(path, 1, overwrite=True)
    assert count_steps(path) == 1
    assert [each.name for each in path.iterdir() if each.name.startswith(".")] == []


def test_error_at_the_start_is_raised_if_it_is_asked_for_and_the_path_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "_begin", fail)
    with pytest.raises(ZeroDivisionError):
        record_steps(tmp_path / "run", 2, strict=True)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    record_steps(tmp_path / "run", 2)
    assert count_steps(tmp_path / "run") == 2


def test_error_at_the_end_does_not_take_the_place_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Recorder.stop
    with (
        pytest.warns(ModtraceWarning, match="when recording ended: modtrace met an internal error"),
        pytest.raises(KeyError, match="mine"),
        modtrace.record(to=tmp_path / "run") as rec,
    ):
        recorder = rec._recorder
        monkeypatch.setattr(Recorder, "stop", fail)
        raise KeyError("mine")
    assert recorder is not None
    stop(recorder)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "modtrace.collect.recorder.recorder.Recorder._begin",
            f"{CANNOT_BEGIN} (ZeroDivisionError: no luck)",
        ),
        (
            "modtrace.api.record.to_captures",
            "modtrace met an internal error when it began to record (ZeroDivisionError",
        ),
    ],
)
def test_program_runs_unrecorded_where_modtrace_fails(tmp_path: Path, what: str, told: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "print('trained')\nsys.exit(3)\n")
    done = end_of_modtrace(tmp_path, "record", "train.py", before=failing(what))
    assert (done.stdout, done.status) == ("trained\n", 3)
    first, *others = done.stderr.splitlines()
    assert first.startswith(f"modtrace: warning: {told}")
    assert not others or others == [
        "modtrace: recorded nothing; modtrace failed when it began to record: ZeroDivisionError: no luck."
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_error_in_the_middle_is_a_warning_with_what_raises_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    what = failing("modtrace.collect.recorder.row_writer.call_columns")
    done = end_of_modtrace(tmp_path, "record", "train.py", before=what)
    [warned] = [line for line in done.stderr.splitlines() if "modtrace met an internal error" in line]
    assert warned.endswith(
        "the run goes on (ZeroDivisionError: no luck). Please report it; record(strict=True) raises it."
    )
