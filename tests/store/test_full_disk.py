"""On a full disk the recording stops at a whole batch and says so, and the run goes on."""

import errno
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.typed_rows import CALLS, MS, calls_of, expected, rows, scalars_of, step_row, write_step
from modtrace.errors import ModtraceWarning, RecordingError
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.meta import RunMeta
from modtrace.store.copy import write_recording
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

META = RunMeta(run_id="r1")


class SmallDisk:
    """An `os.write` for a disk with room for so many bytes, which takes at most 1,000 at a time."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.write = os.write

    def __call__(self, fd: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.write(fd, data[: min(1000, self.room)])
        self.room -= written
        return written


@pytest.fixture
def real_small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 256 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"may not mount a small disk: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def record_until_full(path: Path, steps: int) -> tuple[FolderWriter, list[str]]:
    """Records with one flush a step; returns the writer, closed, and the warnings."""
    writer = FolderWriter(path, META)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            write_step(writer, step, step * 200 * MS)
        writer.close()
    assert all(each.category is ModtraceWarning for each in caught)
    return writer, [str(each.message) for each in caught]


def assert_stopped_at(path: Path, stop: int, caught: list[str], table: str) -> None:
    reader = FolderReader(path)
    assert reader.meta.marks == (f"incomplete from step {stop}: No space left on device ({table}.arrow)",)
    assert reader.meta.complete is False
    assert caught == [
        f"{path}: the recording stops at step {stop}: No space left on device ({table}.arrow). "
        "The run goes on; what was written before stays readable."
    ]
    assert reader.table("steps").to_pylist() == expected(stop)["steps"]
    for name in ("calls", "scalars"):
        written = reader.table(name).to_pylist()
        assert written[: len(expected(stop)[name])] == expected(stop)[name]
        assert written == expected(stop + 1)[name][: len(written)]


@pytest.mark.parametrize("room", [0, 1, 20_000, 45_678])
def test_recording_stops_at_the_last_whole_batch_and_gathers_no_rows_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("modtrace.store.stream.os.write", SmallDisk(room))
    path = tmp_path / "run.modtrace"
    writer, caught = record_until_full(path, steps=30)
    mark = FolderReader(path).meta.marks[0]
    stop, table = int(mark.split()[3].rstrip(":")), mark.split("(")[1].removesuffix(".arrow)")
    assert stop < 30
    assert_stopped_at(path, stop, caught, table)
    written = rows(FolderReader(path))
    assert writer.rows == sum(map(len, written.values()))


def test_recording_on_a_disk_that_is_really_full(real_small_disk: Path) -> None:
    path = real_small_disk / "run.modtrace"
    _, caught = record_until_full(path, steps=200)
    mark = FolderReader(path).meta.marks[0]
    stop, table = int(mark.split()[3].rstrip(":")), mark.split("(")[1].removesuffix(".arrow)")
    assert 10 < stop < 200
    assert_stopped_at(path, stop, caught, table)


def test_mark_reaches_a_disk_that_is_full(real_small_disk: Path) -> None:
    writer = FolderWriter(real_small_disk / "run.modtrace", META)
    write_step(writer, 0, 0)
    with pytest.raises(OSError, match="No space left"):
        (real_small_disk / "filler").write_bytes(bytes(300_000))
    writer.mark("layers.3: boom")
    assert "layers.3: boom" in FolderReader(real_small_disk / "run.modtrace").meta.marks
    writer.close()


def test_folder_on_a_full_disk_cannot_be_made(real_small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (real_small_disk / "filler").write_bytes(bytes(300_000))
    with pytest.raises(RecordingError, match=r"run\.modtrace: cannot write .*No space left on device"):
        FolderWriter(real_small_disk / "run.modtrace", META)


def test_strict_writer_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META, strict=True)
    monkeypatch.setattr("modtrace.store.stream.os.write", SmallDisk(0))
    with pytest.raises(RecordingError) as caught:
        write_step(writer, 0, 0)
    assert str(caught.value) == (
        f"{tmp_path}/run.modtrace: the recording stops at step 0: No space left on device (calls.arrow)."
    )
    writer.close()


def test_copy_that_does_not_fit_raises_and_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = MemoryRecording(META)
    for step in range(5):
        write_step(recording, step, 0)
    recording.close()
    monkeypatch.setattr("modtrace.store.stream.os.write", SmallDisk(3_000))
    with pytest.raises(RecordingError, match="No space left on device"):
        write_recording(recording, tmp_path / "copy.modtrace")
    assert FolderReader(tmp_path / "copy.modtrace").meta.complete is False
    assert rows(recording) == expected(5)


def test_marks_that_outgrow_their_place_are_kept(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    meta = tmp_path / "run.modtrace/rank-00000/meta.json"
    assert meta.stat().st_size == 16 * 1024
    marks = [f"mark {each} " + "x" * 1000 for each in range(40)]
    for each in marks:
        writer.mark(each)
    writer.close()
    assert meta.stat().st_size == 48 * 1024
    assert list(FolderReader(tmp_path / "run.modtrace").meta.marks) == marks


def test_meta_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)

    def fail(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("modtrace.store.json_files.os.pwrite", fail)
    with pytest.warns(ModtraceWarning) as caught:
        writer.mark("boom")
    assert str(caught[0].message) == (
        f"{tmp_path}/run.modtrace: meta.json cannot be written: Input/output error. "
        "The run goes on; the recording will not tell that it is closed, nor its marks."
    )


class FileLimit:
    """An `os.write` that lets files grow to so many bytes, as `ulimit -f` does; those named alone, if any are."""

    def __init__(self, limit: int, *only: str) -> None:
        self.limit = limit
        self.only = only
        self.write = os.write

    def __call__(self, fd: int, data: memoryview) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        left = self.limit - os.fstat(fd).st_size
        if self.only and name not in self.only:
            return self.write(fd, data)
        if left <= 0:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return self.write(fd, data[:left])


TABLES = ("modules", "sites", "calls", "ops", "tensors", "uses", "values", "scalars", "steps")


def write_every_table(sink: FolderWriter, step: int) -> None:
    """A step with some rows in each table."""
    ids = list(range(step * CALLS, (step + 1) * CALLS))
    paths = [f"layers.{each}" for each in ids]
    sink.write("modules", {"module_id": ids, "path": paths, "aliases": [[]] * CALLS})
    sink.write("sites", {"site_id": ids, "module_id": ids, "role": ["output"] * CALLS})
    sink.write("calls", calls_of(step))
    sink.write("ops", {"op_id": ids, "step": [step] * CALLS})
    sink.write("tensors", {"tensor_id": ids})
    sink.write("uses", {"consumer_op": ids, "tensor_id": ids})
    sink.write("values", {"step": [step] * CALLS, "site_id": ids})
    sink.write("scalars", scalars_of(step))
    sink.write("steps", step_row(step))
    sink.end_step(step * 200 * MS)


@pytest.mark.parametrize("table", ["modules", "calls", "steps"])
@pytest.mark.parametrize("limit", [0, 7, 100, 15_000])
def test_table_that_may_not_grow_leaves_the_others_and_its_own_whole_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, limit: int
) -> None:
    path = tmp_path / "run.modtrace"
    writer = FolderWriter(path, META)
    monkeypatch.setattr("modtrace.store.stream.os.write", FileLimit(limit, f"{table}.arrow"))
    with pytest.warns(ModtraceWarning, match="the recording stops at step"):
        for step in range(60):
            write_every_table(writer, step)
    writer.close()
    reader = FolderReader(path)
    stop = reader.table("steps").num_rows
    assert reader.meta.marks == (f"incomplete from step {stop}: File too large ({table}.arrow)",)
    assert reader.meta.complete is False
    assert (stop > 0) == (limit == 15_000)
    assert reader.table("steps").column("step").to_pylist() == list(range(stop))
    before = TABLES[: TABLES.index(table)]
    for name in TABLES:
        per_step = 1 if name in ("scalars", "steps") else CALLS
        assert reader.table(name).num_rows == per_step * (stop + (name in before))
    assert writer.rows == sum(reader.table(name).num_rows for name in TABLES)


def test_marks_that_outgrow_their_place_on_a_full_disk_leave_the_recording_as_it_was(
    real_small_disk: Path,
) -> None:
    writer = FolderWriter(real_small_disk / "run.modtrace", META)
    write_step(writer, 0, 0)
    with pytest.raises(OSError, match="No space left"):
        (real_small_disk / "filler").write_bytes(bytes(300_000))
    writer.mark("boom")
    with pytest.warns(ModtraceWarning, match="meta.json cannot be written: No space left on device"):
        writer.mark("x" * 20_000)
        writer.close()
    reader = FolderReader(real_small_disk / "run.modtrace")
    assert reader.meta.marks == (
        "boom",
        "not closed: the process ended or is still running; complete to step 0",
    )
    assert rows(reader) == expected(1)
    folder = real_small_disk / "run.modtrace/rank-00000"
    assert sorted(each.name for each in folder.iterdir()) == [
        "calls.arrow",
        "meta.json",
        "scalars.arrow",
        "steps.arrow",
    ]


@pytest.mark.parametrize("room", range(0, 3_000, 600))
def test_close_on_a_full_disk_leaves_every_row_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """The end markers do not fit, or one of them does and a compaction does not."""
    path = tmp_path / "run.modtrace"
    writer = FolderWriter(path, META)
    for step in range(5):
        write_step(writer, step, step * 200 * MS)
    monkeypatch.setattr("modtrace.store.stream.os.write", SmallDisk(room))
    writer.close()
    reader = FolderReader(path)
    assert rows(reader) == expected(5)
    assert reader.meta.marks == ()


def test_folder_in_which_nothing_could_be_written_leaves_its_path_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_nothing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("modtrace.store.writer.write_meta", write_nothing)
    path = tmp_path / "run.modtrace"
    with pytest.raises(RecordingError, match=r"run\.modtrace: cannot write here: No space left on device"):
        FolderWriter(path, META)
    assert not path.exists()
    monkeypatch.undo()
    FolderWriter(path, META).close()
    monkeypatch.setattr("modtrace.store.writer.write_meta", write_nothing)
    with pytest.raises(RecordingError):
        FolderWriter(path, RunMeta(run_id="r1", rank=1))
    assert [each.name for each in sorted(path.iterdir())] == ["rank-00000", "recording.json"]


def test_folder_of_a_rank_that_others_may_join_keeps_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_nothing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("modtrace.store.writer.write_meta", write_nothing)
    path = tmp_path / "run.modtrace"
    with pytest.raises(RecordingError):
        FolderWriter(path, RunMeta(run_id="r1", world_size=2))
    assert [each.name for each in path.iterdir()] == ["recording.json"]
    monkeypatch.undo()
    FolderWriter(path, RunMeta(run_id="r1", rank=1, world_size=2)).close()
    assert FolderReader(path).meta.rank == 1
