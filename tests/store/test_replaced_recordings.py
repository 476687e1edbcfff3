"""A recording that is replaced, moved or deleted while it is written or read: nobody takes one for the other."""

import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import modtrace
from helpers.command_line import run_command
from helpers.typed_rows import expected, rows, write_step
from modtrace.errors import ModtraceWarning, RecordingError, RecordingReplacedError
from modtrace.recording.meta import Note, RunMeta
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.recording.process import name_process
from modtrace.store import reader as reader_module
from modtrace.store.folder import delete_if_empty
from modtrace.store.layout import STARTING
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

OTHER = RunMeta(run_id="other", clock_time_ns=2)


def begin(path: Path, run_id: str = "first", *, overwrite: bool = False) -> FolderWriter:
    """A writer that has written one step and one tensor, in shards that hold one each."""
    writer = FolderWriter(
        path, RunMeta(run_id=run_id), overwrite=overwrite, tensors=TensorOptions(shard_bytes=4096)
    )
    writer.delete_replaced()
    go_on(writer, 0)
    return writer


def go_on(writer: FolderWriter, step: int) -> None:
    write_step(writer, step, step, force=True)
    writer.put_tensor("weight", np.ones(1000, np.float32), "float32", (1000,))
    writer.wait_for_tensors()


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def replace_it(path: Path) -> None:
    go_on(begin(path, "other", overwrite=True), 1)


def move_it(path: Path) -> None:
    path.rename(path.with_name("moved"))


def delete_it(path: Path) -> None:
    shutil.rmtree(path)


def delete_it_and_begin_another(path: Path) -> None:
    delete_it(path)
    begin(path, "other")


def delete_the_ranks_part(path: Path) -> None:
    shutil.rmtree(path / "rank-00000")


REPLACED = "another run has replaced it"
GONE = "it was moved or deleted"
EVENTS = [
    (replace_it, REPLACED),
    (move_it, GONE),
    (delete_it, GONE),
    (delete_it_and_begin_another, REPLACED),
    (delete_the_ranks_part, REPLACED),
]
FOR_EVENTS = pytest.mark.parametrize(("event", "why"), EVENTS, ids=lambda each: getattr(each, "__name__", ""))


def end_a_step(writer: FolderWriter) -> None:
    go_on(writer, 1)


def put_many_tensors(writer: FolderWriter) -> None:
    """The thread that writes them notices first."""
    for _ in range(3):
        writer.put_tensor("weight", np.ones(1000, np.float32), "float32", (1000,))
    writer.wait_for_tensors()
    writer.end_step(1)


NOTICES: dict[str, Callable[[FolderWriter], None]] = {
    "step": end_a_step,
    "tensors": put_many_tensors,
    "mark": lambda writer: writer.mark("something is missing"),
    "note": lambda writer: writer.note(Note(step=0, kind="dump", reason="")),
    "close": lambda writer: writer.close(),
}


@FOR_EVENTS
@pytest.mark.parametrize("first", NOTICES)
def test_writer_says_once_that_its_folder_is_gone_and_touches_nothing(
    tmp_path: Path, event: Callable[[Path], None], why: str, first: str
) -> None:
    path = tmp_path / "run.modtrace"
    writer = begin(path)
    event(path)
    before = content(tmp_path)
    with pytest.warns(ModtraceWarning) as warned:
        NOTICES[first](writer)
        for action in NOTICES.values():
            if writer._state != "closed":
                action(writer)
        writer.delete_replaced()
    [warning] = warned
    assert str(warning.message) == (
        f"{path}: the recording stops at step 1: {why} while it was written. The run goes on, unrecorded."
    )
    after = content(tmp_path)
    assert {name for name in after if not name.startswith("moved")} == {
        name for name in before if not name.startswith("moved")
    }
    assert all(after[name] == before[name] for name in before if not name.startswith("moved"))
    assert writer.rows == 0


@FOR_EVENTS
def test_error_says_so_if_it_is_asked_for_and_no_thread_is_left(
    tmp_path: Path, event: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "run.modtrace"
    writer = FolderWriter(path, RunMeta(run_id="first"), strict=True)
    go_on(writer, 0)
    event(path)
    with pytest.raises(RecordingReplacedError, match=why):
        writer.close()
    writer.close()
    assert [thread for thread in threading.enumerate() if thread is writer._tensors._thread] == []


@FOR_EVENTS
def test_writer_that_undoes_its_start_deletes_nothing_of_others(
    tmp_path: Path, event: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "run.modtrace"
    writer = begin(path)
    event(path)
    before = content(tmp_path)
    writer.undo()
    assert content(tmp_path) == before


@pytest.mark.parametrize("ends", ["the first ends first", "the second ends first"])
@pytest.mark.parametrize("begins", ["in the place of an old one", "where nothing was"])
def test_two_runs_that_replace_each_other_leave_the_whole_second(
    tmp_path: Path, begins: str, ends: str
) -> None:
    path = tmp_path / "run.modtrace"
    if begins == "in the place of an old one":
        begin(path, "old").close()
    first = begin(path, "first", overwrite=True)
    second = begin(path, "second", overwrite=True)
    go_on(second, 1)
    with pytest.warns(ModtraceWarning, match=REPLACED):
        for writer in (first, second) if ends == "the first ends first" else (second, first):
            writer.close()
    reader = FolderReader(path)
    found = rows(reader)
    assert (reader.meta.run_id, reader.meta.complete) == ("second", True)
    assert found["steps"] == expected(2)["steps"]
    assert [entry.name for entry in sorted(path.iterdir())] == ["rank-00000", "recording.json"]


def test_run_whose_start_is_undone_gives_back_the_recording_of_one_that_still_writes(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    first = begin(path)
    FolderWriter(path, OTHER, overwrite=True).undo()
    go_on(first, 1)
    first.close()
    assert (FolderReader(path).meta.run_id, FolderReader(path).meta.complete) == ("first", True)
    assert FolderReader(path).table("steps").num_rows == 2


READS: dict[str, Callable[[FolderReader], object]] = {
    "a table": lambda reader: reader.table("steps"),
    "a table that is not there": lambda reader: reader.table("ops"),
    "meta data": lambda reader: reader.meta,
    "a tensor": lambda reader: reader.tensor("tensors-00000.safetensors:000000.weight"),
    "all tensors": lambda reader: reader.hold_tensors(),
}


@FOR_EVENTS
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("closed", [True, False])
def test_reader_refuses_what_is_not_the_recording_that_it_has_opened(
    tmp_path: Path, event: Callable[[Path], None], why: str, read: str, closed: bool
) -> None:
    path = tmp_path / "run.modtrace"
    writer = begin(path)
    if closed:
        writer.close()
    reader = FolderReader(path)
    READS[read](reader)  # what it has read before does not count
    event(path)
    is_there = (path / "rank-00000").exists()
    with pytest.raises(RecordingReplacedError if is_there else RecordingError) as caught:
        READS[read](reader)
    if is_there:
        assert str(caught.value) == (
            f"{path}: another run has replaced this recording since it was opened. "
            "Opening it again reads the new one."
        )


def test_reader_that_holds_tensors_reads_them_from_a_recording_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    begin(path).close()
    reader = FolderReader(path)
    reader.hold_tensors()
    replace_it(path)
    assert reader.tensor("tensors-00000.safetensors:000000.weight").to_numpy().tolist() == [1.0] * 1000


def test_reader_of_a_run_that_goes_on_is_not_disturbed_by_its_close(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    writer = begin(path)
    reader = FolderReader(path)
    for step in (1, 2):
        assert reader.table("steps").num_rows == step
        go_on(writer, step)
        writer.mark(f"something is missing in step {step}: {'…' * 20_000}")  # meta.json becomes another file
        assert len(reader.meta.marks) == step + 1
    writer.close()
    assert reader.table("steps").num_rows == 3
    assert len(reader.meta.marks) == 2


@pytest.mark.parametrize("closed", [True, False])
def test_recording_is_told_from_another_to_whose_folder_the_system_gave_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    monkeypatch.setattr(reader_module, "folder_identity", lambda folder: (0, 0))
    path = tmp_path / "run.modtrace"
    writer = FolderWriter(path, RunMeta(run_id="same", clock_time_ns=1))
    if closed:
        writer.close()
    reader = FolderReader(path)
    FolderWriter(path, RunMeta(run_id="same", clock_time_ns=2), overwrite=True)
    with pytest.raises(RecordingReplacedError):
        reader.table("steps")


def test_table_that_is_replaced_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.modtrace"
    begin(path).close()
    reader = FolderReader(path)

    def replace_and_read(*given: object, **more: object) -> object:
        replace_it(path)
        return read_table(*given, **more)

    read_table = reader_module.read_table
    monkeypatch.setattr(reader_module, "read_table", replace_and_read)
    with pytest.raises(RecordingReplacedError):
        reader.table("calls")


@pytest.mark.parametrize("command", ["show", "export"])
def test_command_that_reads_while_another_run_replaces_the_recording_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    with modtrace.record(model, to="run", ops=True):
        model(torch.ones(1, 2)).sum().backward()
    read_table, left = reader_module.read_table, [2]

    def read_two_tables(*given: Any, **more: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            replace_it(Path("run"))
        return read_table(*given, **more)

    monkeypatch.setattr(reader_module, "read_table", read_two_tables)
    output = ["-o", "out.parquet"] if command == "export" else []
    assert run_command(monkeypatch, command, "run", *output) == 2
    assert "another run has replaced this recording since it was opened" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("options", [{}, {"keep_last": 3}, {"values": modtrace.Capture(tensors=True)}])
def test_training_goes_on_and_its_recording_gives_no_answer_of_the_other_run(
    tmp_path: Path, options: dict[str, object]
) -> None:
    path, model = tmp_path / "run.modtrace", torch.nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with modtrace.record(model, to=path, **options) as rec:
            for step in range(6):
                model(torch.ones(1, 2)).sum().backward()
                rec.log(loss=1.0)
                rec.step()
                if step == 2:
                    replace_it(path)
                    before = content(path)
                if step == 4 and "keep_last" in options:
                    rec.dump("for once")
    [warning] = warned
    assert re.search(
        rf"stops at step \d: {REPLACED} while it was written\. The run goes", str(warning.message)
    )
    assert content(path) == before
    assert (rec.progress.steps, rec.progress.rows) == (6, 0)
    for read in (lambda: rec.meta, lambda: rec.table("steps"), rec.module_tree):
        with pytest.raises(RecordingReplacedError):
            read()


@pytest.mark.parametrize(
    ("leaves", "is_free"),
    [
        (lambda path: None, True),
        (lambda path: (path / STARTING).touch(), True),
        (lambda path: (path / "notes.txt").touch(), False),
        (lambda path: (path / "rank-00000" / "values.arrow").touch(), False),
        (lambda path: (path / "rank-00000" / "meta.json").write_text("{"), False),
        (lambda path: shutil.rmtree(path / "rank-00000"), False),  # a start may be as far as that
    ],
    ids=["nothing", "start", "file of the user", "rows", "damage", "no rank"],
)
def test_recording_in_which_nothing_is_gives_its_path_back_and_nothing_else_does(
    tmp_path: Path, leaves: Callable[[Path], None], is_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.modtrace"
    monkeypatch.setattr(
        "modtrace.store.folder._STARTED_AFTER_S", 0.02
    )  # a start that was killed is over then
    FolderWriter(path, RunMeta(run_id="first")).close()
    leaves(path)
    before = content(tmp_path)
    assert delete_if_empty(path) is is_free
    assert content(tmp_path) == ({} if is_free else before)


def test_recording_that_is_being_made_or_that_other_ranks_may_join_is_not_deleted(tmp_path: Path) -> None:
    runs = tmp_path / "running", tmp_path / "ranks"
    FolderWriter(runs[0], RunMeta(run_id="first", process=name_process()))
    FolderWriter(runs[1], RunMeta(run_id="first", launch="host:1")).close()
    before = content(tmp_path)
    assert not delete_if_empty(runs[0])
    assert not delete_if_empty(runs[1])
    assert content(tmp_path) == before
    assert not delete_if_empty(tmp_path)
    assert not delete_if_empty(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
