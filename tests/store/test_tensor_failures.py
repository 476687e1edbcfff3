"""When tensors cannot be written, or come too fast, the statistics go on and the recording says what is missing."""

import errno
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from helpers.raw_tensors import given_tensor
from helpers.typed_rows import expected, rows, write_step
from modtrace.errors import ModtraceWarning, RecordingError
from modtrace.recording.meta import RunMeta
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.store import tensor_shards
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

META = RunMeta(run_id="r1")
BYTES = 20_000
FULL = "No space left on device"


class SmallDisk:
    """An `os.writev` for a disk with room for so many bytes, which takes at most 3,000 at a time."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, fd: int, parts: Sequence[memoryview]) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(fd, bytes(parts[0][: min(3000, self.room)]))
        self.room -= written
        return written


class Gate:
    """An `os.writev` that waits until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.waits = threading.Event()
        self.write = os.writev

    def __call__(self, fd: int, parts: Sequence[memoryview]) -> int:
        self.waits.set()
        self.opened.wait()
        return self.write(fd, parts)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr("modtrace.store.shard_file.os.writev", made)
    yield made
    made.opened.set()


def write_steps(writer: FolderWriter, steps: int) -> list[str | None]:
    """A tensor and some rows in each step; returns the references."""
    blobs = []
    for step in range(steps):
        blobs.append(given_tensor("out", "uint8", (BYTES,), seed=step).put(writer, step=step))
        writer.wait_for_tensors()
        write_step(writer, step, step)
    return blobs


@pytest.mark.parametrize("room", [0, 65_543, 65_545, 150_000])
def test_full_disk_stops_tensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr("modtrace.store.shard_file.os.writev", SmallDisk(room))
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    with pytest.warns(ModtraceWarning) as caught:
        blobs = write_steps(writer, 10)
        writer.close()
    reader = FolderReader(writer.path)
    stop = next(step for step, blob in enumerate([*blobs, None]) if blob is None) - 1
    assert stop == max(0, (room - 65_544) // (BYTES + 100))  # some 80 bytes of each are in the index
    where = f"{FULL} (tensors-00000.safetensors; the first that is missing is {stop:06d}.out)"
    assert rows(reader) == expected(10)
    assert [str(each.message) for each in caught] == [
        f"{writer.path}: no more whole tensors are written from step {stop} on: {where}. "
        "The run and the recording go on without them."
    ]
    assert reader.meta.marks == (f"whole tensors are incomplete from step {stop}: {where}",)
    for step, blob in enumerate(blobs[:stop]):
        assert bytes(reader.tensor(blob).data) == given_tensor("out", "uint8", (BYTES,), seed=step).data
    with pytest.raises(RecordingError):
        reader.tensor(blobs[stop])
    if stop:
        assert len(load_file(writer.folder / "tensors-00000.safetensors")) == stop
    else:
        assert room >= 65_544 or not list(writer.folder.glob("tensors-*"))


def test_strict_recording_raises_when_a_tensor_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modtrace.store.shard_file.os.writev", SmallDisk(0))
    writer = FolderWriter(tmp_path / "run.modtrace", META, strict=True)
    with pytest.raises(
        RecordingError, match=r"no more whole tensors are written from step 0 on: No space left"
    ):
        write_steps(writer, 1)
    writer.close()
    assert FolderReader(writer.path).table("steps").num_rows == 1


def test_tensor_that_fails_last_is_told_of_at_the_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    monkeypatch.setattr("modtrace.store.shard_file.os.writev", SmallDisk(0))
    given_tensor("out", "uint8", (5,)).put(writer, step=3)
    with pytest.warns(ModtraceWarning, match="no more whole tensors are written from step 3 on"):
        writer.close()


def test_system_without_threads_stops_tensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", fail)
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    with pytest.warns(ModtraceWarning, match="can't start new thread"):
        assert write_steps(writer, 3) == [None, None, None]
    writer.close()
    assert rows(FolderReader(writer.path)) == expected(3)


def test_too_many_tensors_are_dropped_and_counted(tmp_path: Path, gate: Gate) -> None:
    options = TensorOptions(max_bytes=2 * BYTES, when_full="drop")
    writer = FolderWriter(tmp_path / "run.modtrace", META, tensors=options)
    given = [given_tensor("out", "uint8", (9000,), seed=step) for step in range(10)]
    blobs = [each.put(writer, step=step) for step, each in enumerate(given)]
    assert [each is None for each in blobs] == [False] * 4 + [True] * 6
    assert writer._tensors.dropped.tensors == 6
    gate.opened.set()
    writer.wait_for_tensors()
    late = given_tensor("late", "uint8", (9000,), seed=99)
    blob = late.put(writer, step=11)
    assert given_tensor("large", "uint8", (2 * BYTES + 1,)).put(writer, step=12) is None
    writer.close()
    reader = FolderReader(writer.path)
    assert reader.meta.marks == (
        f"7 whole tensors ({6 * 9000 + 2 * BYTES + 1} bytes) were dropped from step 4 on: "
        "they came faster than they could be written",
    )
    assert reader.meta.complete is False
    assert [bytes(reader.tensor(each).data) for each in [*blobs[:4], blob]] == [
        each.data for each in [*given[:4], late]
    ]


def test_training_waits_until_there_is_room(tmp_path: Path, gate: Gate) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META, tensors=TensorOptions(max_bytes=2 * BYTES))
    given = [given_tensor("out", "uint8", (9000,), seed=step) for step in range(10)]
    done: list[str | None] = []
    thread = threading.Thread(target=lambda: done.extend(each.put(writer) for each in given))
    thread.start()
    gate.waits.wait()
    thread.join(0.05)
    assert thread.is_alive()
    gate.opened.set()
    thread.join()
    writer.close()
    reader = FolderReader(writer.path)
    assert [bytes(reader.tensor(each).data) for each in done] == [each.data for each in given]
    assert reader.meta.marks == ()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background: a shell has it ignored there."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("size_bytes", [9000, 100_000])
def test_interrupt_of_a_waiting_training_loses_that_tensor_alone(
    tmp_path: Path, gate: Gate, size_bytes: int, interruptible: None
) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META, tensors=TensorOptions(max_bytes=2 * BYTES))
    given = [given_tensor("out", "uint8", (9000,), seed=step) for step in range(4)]
    blobs = [each.put(writer) for each in given]
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        given_tensor("interrupted", "uint8", (size_bytes,)).put(writer)
    gate.opened.set()
    writer.wait_for_tensors()
    late = given_tensor("late", "uint8", (9000,), seed=9)
    blobs.append(late.put(writer))
    writer.close()
    reader = FolderReader(writer.path)
    assert [bytes(reader.tensor(each).data) for each in blobs] == [each.data for each in [*given, late]]
    loaded = load_file(writer.folder / "tensors-00000.safetensors")
    assert [each.partition(".")[2] for each in loaded] == ["out"] * 4 + ["late"]


def test_interrupt_amid_the_parts_of_a_tensor_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META, tensors=TensorOptions(max_bytes=10_000))
    first = given_tensor("first", "uint8", (5,))
    first.put(writer)
    place, calls = writer._tensors._ring.place, iter(range(100))

    def interrupted(size_bytes: int) -> int | None:
        if next(calls) == 5:
            raise KeyboardInterrupt
        writer.wait_for_tensors()
        return place(size_bytes)

    monkeypatch.setattr(writer._tensors._ring, "place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        given_tensor("interrupted", "uint8", (100_000,)).put(writer)
    monkeypatch.setattr(writer._tensors._ring, "place", place)
    last = given_tensor("last", "uint8", (50_000,))
    last.put(writer)
    writer.close()
    loaded = load_file(writer.folder / "tensors-00000.safetensors")
    assert {name: each.tobytes() for name, each in loaded.items()} == {
        "000000.first": first.data,
        "000002.last": last.data,
    }


def test_put_within_a_put_of_the_same_thread_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler does that writes what is held."""
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    place = writer._tensors._ring.place

    def place_amid(size_bytes: int) -> int | None:
        monkeypatch.setattr(writer._tensors._ring, "place", place)
        assert given_tensor("inner", "uint8", (7,)).put(writer, step=2) is None
        return place(size_bytes)

    monkeypatch.setattr(writer._tensors._ring, "place", place_amid)
    outer = given_tensor("outer", "uint8", (5,))
    blob = outer.put(writer, step=2)
    writer.close()
    reader = FolderReader(writer.path)
    assert bytes(reader.tensor(blob).data) == outer.data
    assert reader.meta.marks[0].startswith("1 whole tensors (7 bytes) were dropped from step 2 on")


def test_close_that_is_interrupted_leaves_the_tables_final(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, interruptible: None
) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    tensor = given_tensor("out", "uint8", (9000,))
    blob = tensor.put(writer)
    write_step(writer, 0, 0)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    reader = FolderReader(writer.path)
    assert rows(reader) == expected(1)
    assert reader.meta.marks[0] == (
        "whole tensors may be missing: the close was interrupted before all were written"
    )
    gate.opened.set()
    writer._tensors._is_done.wait()
    assert bytes(FolderReader(writer.path).tensor(blob).data) == tensor.data


# Threads that put while the recording is closed.


def test_tensor_that_waits_for_its_turn_at_the_close_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    given_tensor("first", "uint8", (9000,)).put(writer)
    comes = threading.Event()
    check = tensor_shards.check_raw
    monkeypatch.setattr(tensor_shards, "check_raw", lambda *args: (check(*args), comes.set()))
    done: list[object] = []

    def put() -> None:
        try:
            done.append(given_tensor("late", "uint8", (9000,)).put(writer))
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=put)
    with writer._tensors._putting:
        thread.start()
        comes.wait()
        thread.join(0.05)
        writer.close()
    thread.join()
    assert done == [None]


def test_close_waits_for_a_tensor_that_another_thread_is_putting(tmp_path: Path, gate: Gate) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META, tensors=TensorOptions(max_bytes=2 * BYTES))
    given = given_tensor("large", "uint8", (10 * BYTES,))
    done: list[str | None] = []
    putting = threading.Thread(target=lambda: done.append(given.put(writer)))
    putting.start()
    gate.waits.wait()
    closing = threading.Thread(target=writer.close)
    closing.start()
    closing.join(0.05)
    gate.opened.set()
    closing.join()
    putting.join()
    assert bytes(FolderReader(writer.path).tensor(str(done[0])).data) == given.data
