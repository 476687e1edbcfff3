"""What the folder reader says of recordings that are cut, damaged, newer, or none."""

import json
from pathlib import Path

import pytest

from helpers.typed_rows import MS, expected, rows, write_step
from modtrace.errors import (
    DamagedRecordingError,
    NewerSchemaError,
    NotARecordingError,
    RecordingError,
    RecordingNotFoundError,
)
from modtrace.recording.meta import RunMeta
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

META = RunMeta(run_id="r1", created="2026-11-20T10:00:00Z", modtrace_version="0.1.0", argv=("train.py",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A recording of five steps that was closed."""
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    for step in range(5):
        write_step(writer, step, step * 200 * MS)
    writer.close()
    return tmp_path / "run.modtrace"


@pytest.fixture
def unclosed(tmp_path: Path) -> FolderWriter:
    """A recording of five steps that is not closed, of which two have not gone to the disk."""
    writer = FolderWriter(tmp_path / "unclosed.modtrace", META)
    for step in range(5):
        write_step(writer, step, min(step, 2) * 200 * MS)
    return writer


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def cut(file: Path, by: int) -> None:
    file.write_bytes(file.read_bytes()[:-by])


# --- not closed


def test_unclosed_recording_is_read_and_says_how_far_it_goes(unclosed: FolderWriter) -> None:
    reader = FolderReader(unclosed.path)
    assert rows(reader) == expected(3)
    assert reader.meta.marks == ("not closed: the process ended or is still running; complete to step 2",)
    assert reader.meta.complete is False


def test_recording_that_is_still_written_is_read_anew(unclosed: FolderWriter) -> None:
    reader = FolderReader(unclosed.path)
    assert reader.table("steps").num_rows == 3
    unclosed.end_step(0, force=True)
    assert reader.table("steps").num_rows == 5
    assert reader.meta.marks == ("not closed: the process ended or is still running; complete to step 4",)


def test_recording_that_is_closed_meanwhile_is_complete(unclosed: FolderWriter) -> None:
    reader = FolderReader(unclosed.path)
    assert reader.meta.complete is False
    unclosed.close()
    assert (reader.meta.complete, reader.meta.marks) == (True, ())
    assert rows(reader) == expected(5)


def test_table_is_read_once_while_its_file_is_the_same(path: Path) -> None:
    reader = FolderReader(path)
    assert reader.table("calls") is reader.table("calls")


def test_recording_without_a_step_says_so(tmp_path: Path) -> None:
    FolderWriter(tmp_path / "run.modtrace", META)
    assert FolderReader(tmp_path / "run.modtrace").meta.marks == (
        "not closed: the process ended or is still running; no step is complete",
    )


def test_rows_of_a_step_that_has_not_ended_are_kept(unclosed: FolderWriter) -> None:
    unclosed.write("scalars", {"step": [5], "name": ["loss"], "value": [0.0]})
    unclosed.end_step(0, force=True)
    assert FolderReader(unclosed.path).table("scalars").column("step").to_pylist() == [0, 1, 2, 3, 4, 5]


def test_marks_of_an_unclosed_recording_come_first(unclosed: FolderWriter) -> None:
    unclosed.mark("incomplete from event 7")
    assert FolderReader(unclosed.path).meta.marks == (
        "incomplete from event 7",
        "not closed: the process ended or is still running; complete to step 2",
    )


# --- cut and damaged


def test_table_that_was_cut_after_the_close_is_told(path: Path) -> None:
    cut(path / "rank-00000/calls.arrow", by=3)
    reader = FolderReader(path)
    assert reader.meta.marks == ("calls.arrow is cut: the rows at its end are missing",)
    assert reader.meta.complete is False
    assert reader.table("calls").to_pylist() == expected(5)["calls"]


def test_table_that_is_missing_after_the_close_is_told(path: Path) -> None:
    (path / "rank-00000/calls.arrow").unlink()
    reader = FolderReader(path)
    assert reader.meta.marks == ("calls.arrow is missing",)
    assert reader.table("calls").num_rows == 0


def test_empty_file_is_an_empty_table(path: Path) -> None:
    (path / "rank-00000/calls.arrow").write_bytes(b"")
    reader = FolderReader(path)
    assert reader.table("calls").num_rows == 0
    assert reader.meta.marks == ("calls.arrow is cut: all of its rows are missing",)


def test_damaged_steps_leave_the_last_step_unknown(unclosed: FolderWriter) -> None:
    (unclosed.path / "rank-00000/steps.arrow").write_bytes(b"garbage")
    [mark] = FolderReader(unclosed.path).meta.marks
    assert mark.startswith("not closed: the process ended or is still running; its last step is unknown (")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "0 bytes; JSONDecodeError('Expecting value: line 1 column 1 (char 0)')"),
        ("[]", "2 bytes; AttributeError(\"'list' object has no attribute 'get'\")"),
        ("{}", "2 bytes; KeyError('schema_version')"),
        ('{"schema_version": "1"}', "23 bytes; a value is of the wrong type"),
        ('{"schema_version": 1, "run_id": 7}', "34 bytes; a value is of the wrong type"),
    ],
)
def test_damaged_header_is_told(path: Path, content: str, why: str) -> None:
    (path / "recording.json").write_text(content)
    with pytest.raises(DamagedRecordingError) as caught:
        FolderReader(path)
    assert str(caught.value) == (
        f"{path}/recording.json: cannot be understood ({why}). "
        'Put {"schema_version": 2} into it to read the tables beside it.'
    )
    (path / "recording.json").write_text('{"schema_version": 1}')
    assert rows(FolderReader(path)) == expected(5)


def test_recording_in_which_no_rank_wrote_is_told(path: Path) -> None:
    (path / "rank-00000").rename(path / "moved")
    with pytest.raises(DamagedRecordingError) as caught:
        FolderReader(path)
    assert str(caught.value) == (
        f"{path}: no rank has written to this recording: rank-00000 is missing "
        "(it holds 'moved', 'recording.json'). Record again."
    )


def test_table_that_may_not_be_read_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    reader = FolderReader(path)
    monkeypatch.setattr("modtrace.store.regular_file.os.open", refuse)
    with pytest.raises(RecordingError) as caught:
        reader.table("calls")
    assert str(caught.value) == (
        f"{path}/rank-00000/calls.arrow: cannot be read: Permission denied. Check that you may read it."
    )


# --- other versions


def test_newer_schema_is_told(path: Path) -> None:
    change(path / "recording.json", schema_version=3, modtrace_version="9.1")
    with pytest.raises(NewerSchemaError) as caught:
        FolderReader(path)
    assert str(caught.value) == (
        f"{path} was written by modtrace 9.1 with schema 3; this modtrace reads up to 2. "
        "Upgrade: pip install -U modtrace"
    )


def test_meta_of_another_minor_version_is_read(path: Path) -> None:
    file = path / "rank-00000/meta.json"
    values = json.loads(file.read_text())
    del values["world_size"]
    file.write_text(json.dumps({**values, "from_the_future": 1}))
    assert FolderReader(path).meta.to_json() == {**META.to_json(), "complete": True}


# --- none


def test_path_where_nothing_is_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecordingNotFoundError) as caught:
        FolderReader(tmp_path / "run.modtrace")
    assert str(caught.value) == (
        f"{tmp_path}/run.modtrace: nothing is there. Give the folder of a recording."
    )


def test_file_is_told_to_be_no_recording(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(NotARecordingError) as caught:
        FolderReader(tmp_path / "trace.json")
    assert str(caught.value) == (
        f"{tmp_path}/trace.json: not a recording: a file of 2 bytes is there, and a recording is a folder "
        "with recording.json in it. Give the folder of a recording."
    )


def test_script_is_told_to_be_no_recording_and_how_to_make_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass")
    with pytest.raises(NotARecordingError) as caught:
        FolderReader(script)
    assert str(caught.value) == (
        f"{script}: this is a script, and a recording is a folder. modtrace record {script} makes one of it."
    )


def test_other_folder_is_told_to_be_no_recording(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "d", "c"):
        (tmp_path / name).write_text("")
    with pytest.raises(NotARecordingError) as caught:
        FolderReader(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: not a recording: there is no recording.json in this folder "
        "(it holds 'a.txt', 'b.txt', 'c' and 1 more). Give the folder of a recording."
    )


def test_empty_folder_is_told_to_be_no_recording(tmp_path: Path) -> None:
    with pytest.raises(NotARecordingError, match=r"in this folder \(it is empty\)\. Give"):
        FolderReader(tmp_path)


# --- where


def test_folder_of_a_rank_is_read(path: Path) -> None:
    assert rows(FolderReader(path / "rank-00000")) == expected(5)


def test_recording_may_be_opened_from_within(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path / "rank-00000")
    assert rows(FolderReader(".")) == expected(5)


def test_first_rank_that_is_there_is_read(path: Path) -> None:
    (path / "rank-00000").rename(path / "rank-00003")
    (path / "rank-00003.attempt-1").mkdir()
    assert FolderReader(path).folder.name == "rank-00003"
