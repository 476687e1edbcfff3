"""When the folder writer writes, where, and what it never deletes."""

import json
from pathlib import Path

import pytest

from helpers.typed_rows import MS, calls_of, expected, rows, step_row, write_step
from modtrace.errors import MisuseError, NotARecordingError, RecordingError, RecordingExistsError
from modtrace.recording.meta import RunMeta
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

META = RunMeta(run_id="r1", created="2026-11-20T10:00:00Z", modtrace_version="0.1.0")
OTHER_RUN = RunMeta(run_id="r2", created="2026-11-21T10:00:00Z")


def record(path: Path, meta: RunMeta = META, *, steps: int = 2, overwrite: bool = False) -> None:
    writer = FolderWriter(path, meta, overwrite=overwrite)
    for step in range(steps):
        write_step(writer, step, 0)
    writer.close()


def files(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


# --- when


def test_files_are_made_when_their_first_rows_rest(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    assert files(tmp_path / "run.modtrace") == ["rank-00000/meta.json", "recording.json"]
    writer.write("scalars", {"step": [0], "name": ["loss"], "value": [1.0]})
    writer.write("calls", {"call_id": [], "phase": []})
    writer.end_step(0)
    assert files(tmp_path / "run.modtrace") == [
        "rank-00000/meta.json",
        "rank-00000/scalars.arrow",
        "recording.json",
    ]
    assert json.loads((tmp_path / "run.modtrace/recording.json").read_text()) == {
        "schema_version": 2,
        "run_id": "r1",
        "created": "2026-11-20T10:00:00Z",
        "modtrace_version": "0.1.0",
    }


def test_rows_rest_when_100_ms_have_passed(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    on_disk = []
    for step, now_ms in enumerate([1000, 1050, 1099, 1100, 1199, 1200]):
        write_step(writer, step, now_ms * MS)
        on_disk.append(FolderReader(tmp_path / "run.modtrace").table("steps").num_rows)
    assert on_disk == [1, 1, 1, 4, 4, 6]


def test_rows_rest_at_once_when_forced(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    write_step(writer, 0, 0)
    write_step(writer, 1, 1, force=True)
    assert rows(FolderReader(tmp_path / "run.modtrace")) == expected(2)


def test_rows_rest_when_they_are_many(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    write_step(writer, 0, 0)
    writer.write("values", {"sketch": [[0.0] * 64] * 70_000})
    writer.end_step(1)
    assert FolderReader(tmp_path / "run.modtrace").table("values").num_rows == 70_000


def test_step_stands_in_steps_after_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    monkeypatch.setattr(writer, "_flush_table", lambda table, buffer: written.append(table))
    write_step(writer, 0, 0)
    writer.write("modules", {"module_id": [1]})
    writer.end_step(0, force=True)
    assert written == ["calls", "scalars", "steps", "modules", "calls", "scalars", "steps"]


def test_progress_is_told(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    assert (writer.rows, writer.steps, writer.size_bytes) == (0, 0, 0)
    for step in range(3):
        write_step(writer, step, step * 200 * MS)
    assert (writer.rows, writer.steps) == (3 * 22, 3)
    writer.close()
    on_disk = sum(each.stat().st_size for each in (tmp_path / "run.modtrace").rglob("*.arrow"))
    assert writer.size_bytes == on_disk


def test_small_batches_are_joined_at_the_close(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    for step in range(50):
        write_step(writer, step, step * 200 * MS)
    assert FolderReader(tmp_path / "run.modtrace").table("calls").column(0).num_chunks == 50
    writer.close()
    assert FolderReader(tmp_path / "run.modtrace").table("calls").column(0).num_chunks == 1
    assert rows(FolderReader(tmp_path / "run.modtrace")) == expected(50)
    assert [each for each in files(tmp_path) if "tmp" in each] == []


def test_words_start_anew_when_they_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modtrace.store.writer._MOST_ENTRIES", 3)
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    names = [f"word {each}" for each in range(20)]
    for step, name in enumerate(names):
        writer.write("scalars", {"step": [step], "name": [name], "value": [0.0]})
        writer.end_step(step, force=True)
    unclosed = FolderReader(tmp_path / "run.modtrace").table("scalars")
    writer.close()
    closed = FolderReader(tmp_path / "run.modtrace").table("scalars")
    assert unclosed.column("name").to_pylist() == closed.column("name").to_pylist() == names


def test_closing_again_does_nothing_and_writing_then_is_misuse(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    writer.close()
    writer.close()
    writer.end_step(0, force=True)
    with pytest.raises(MisuseError) as caught:
        writer.write("steps", step_row(0))
    assert str(caught.value) == (
        f"{tmp_path}/run.modtrace: rows of 'steps' come after the recording was closed"
    )


def test_interrupt_while_writing_stops_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    write_step(writer, 0, 0)

    def interrupt(fd: int, data: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("modtrace.store.stream.os.write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_step(writer, 1, 1, force=True)
    monkeypatch.undo()
    write_step(writer, 2, 2, force=True)
    writer.close()
    reader = FolderReader(tmp_path / "run.modtrace")
    assert rows(reader) == expected(1)
    assert reader.meta.marks == ("incomplete from step 1: KeyboardInterrupt() (calls.arrow)",)


# --- where


def test_recording_that_is_there_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    record(path)
    with pytest.raises(RecordingExistsError) as caught:
        FolderWriter(path, OTHER_RUN)
    assert str(caught.value) == (
        f"{path}: there is a recording here already (created 2026-11-20T10:00:00Z). "
        "Give another path, or overwrite=True (--overwrite) to replace it."
    )
    assert rows(FolderReader(path)) == expected(2)


def test_overwrite_replaces_a_recording_and_keeps_files_that_are_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    record(path, steps=5)
    (path / "notes.txt").write_text("mine")
    record(path, OTHER_RUN, steps=1, overwrite=True)
    assert rows(FolderReader(path)) == expected(1)
    assert FolderReader(path).meta.run_id == "r2"
    assert (path / "notes.txt").read_text() == "mine"


def test_overwrite_replaces_a_recording_with_a_damaged_header(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    record(path)
    (path / "recording.json").write_text("")
    record(path, OTHER_RUN, steps=1, overwrite=True)
    assert rows(FolderReader(path)) == expected(1)


@pytest.mark.parametrize("broken", ["folder.write_header", "writer.write_meta"])
def test_recording_that_cannot_be_replaced_because_the_disk_is_full_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "run.modtrace"
    record(path, steps=5)
    before = files(path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(RecordingError, match="No space left"):
        patched.setattr(f"modtrace.store.{broken}", fail)
        record(path, OTHER_RUN, overwrite=True)
    assert files(path) == before
    assert rows(FolderReader(path)) == expected(5)


def test_open_reader_is_not_disturbed_by_an_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    record(path, steps=5)
    calls = FolderReader(path).table("calls")
    record(path, OTHER_RUN, steps=1, overwrite=True)
    assert calls.to_pylist() == expected(5)["calls"]


@pytest.mark.parametrize(("overwrite", "error"), [(False, RecordingExistsError), (True, NotARecordingError)])
def test_other_folder_is_never_deleted(tmp_path: Path, overwrite: bool, error: type[Exception]) -> None:
    for name in "dcba":
        (tmp_path / name).write_text("precious")
    (tmp_path / "a").rename(tmp_path / "recording.json")
    with pytest.raises(error) as caught:
        FolderWriter(tmp_path, META, overwrite=overwrite)
    assert str(caught.value) == (
        f"{tmp_path}: a folder that is not a recording is here already "
        "(it holds 'b', 'c', 'd' and 1 more); modtrace does not delete it. Give another path."
    )
    assert files(tmp_path) == ["b", "c", "d", "recording.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_file_is_never_deleted(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "run.modtrace").write_text("precious")
    with pytest.raises(RecordingExistsError) as caught:
        FolderWriter(tmp_path / "run.modtrace", META, overwrite=overwrite)
    assert str(caught.value) == f"{tmp_path}/run.modtrace: a file is here already. Give another path."
    assert (tmp_path / "run.modtrace").read_text() == "precious"


def test_empty_folder_is_used_and_missing_parents_are_made(tmp_path: Path) -> None:
    record(tmp_path)
    record(tmp_path / "runs/today/run.modtrace")
    assert rows(FolderReader(tmp_path)) == rows(FolderReader(tmp_path / "runs/today/run.modtrace"))


def test_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError) as caught:
        FolderWriter(tmp_path / "file/run.modtrace", META)
    assert str(caught.value) == (
        f"{tmp_path}/file/run.modtrace: cannot write a recording here: Not a directory. Give another path."
    )
    assert isinstance(caught.value.__cause__, OSError)


def test_folder_that_may_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write everywhere
    with pytest.raises(RecordingError) as caught:
        FolderWriter(tmp_path / "run.modtrace", META)
    assert str(caught.value) == (
        f"{tmp_path}/run.modtrace: cannot write a recording here: Permission denied. Give another path."
    )


def test_working_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = FolderWriter("run.modtrace", META)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write_step(writer, 0, 0)
    writer.mark("something is missing")
    writer.close()
    assert rows(FolderReader(tmp_path / "run.modtrace")) == expected(1)


# --- ranks


def test_ranks_of_a_run_share_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    for rank in (1, 0):
        writer = FolderWriter(path, RunMeta(run_id="r1", rank=rank, world_size=2), overwrite=True)
        writer.write("calls", calls_of(rank))
        writer.close()
    assert FolderReader(path).meta.rank == 0
    assert FolderReader(path / "rank-00001").meta.rank == 1
    assert FolderReader(path / "rank-00001").table("calls").column("call_id")[0].as_py() == 20


def test_rank_that_has_written_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    record(path)
    with pytest.raises(RecordingExistsError) as caught:
        FolderWriter(path, META)
    assert str(caught.value) == (
        f"{path}: rank 0 of run 'r1' has written here already (rank-00000). "
        "Give another path, or overwrite=True (--overwrite) to replace it."
    )
    record(path, steps=1, overwrite=True)
    assert rows(FolderReader(path)) == expected(1)


def test_restart_adds_an_attempt_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    for _ in range(3):
        writer = FolderWriter(path, META, new_attempt=True)
        writer.close()
    assert writer.folder == path / "rank-00000.attempt-2"
    assert sorted(each.name for each in path.iterdir()) == [
        "rank-00000",
        "rank-00000.attempt-1",
        "rank-00000.attempt-2",
        "recording.json",
    ]


def test_runs_without_an_id_never_share_a_folder(tmp_path: Path) -> None:
    FolderWriter(tmp_path / "run.modtrace", RunMeta()).close()
    with pytest.raises(
        RecordingExistsError, match=r"run\.modtrace: there is a recording here already\. Give"
    ):
        FolderWriter(tmp_path / "run.modtrace", RunMeta(rank=1))
