"""The thread that writes whole tensors: when it cannot start, is interrupted as it starts, or has ended."""

import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.raw_tensors import given_tensor
from helpers.typed_rows import write_step
from modtrace.errors import ModtraceWarning
from modtrace.recording.meta import RunMeta
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.store.reader import FolderReader
from modtrace.store.tensor_ring import TensorRing
from modtrace.store.writer import FolderWriter

META = RunMeta(run_id="r1")
GIVEN = given_tensor("out", "uint8", (1000,))


@pytest.fixture
def interrupted_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread that starts is interrupted before it runs."""
    start = threading.Thread.start

    def interrupt(_: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupt)


def test_thread_that_was_interrupted_as_it_started_is_started_again(
    tmp_path: Path, interrupted_start: None
) -> None:
    writer = FolderWriter(tmp_path / "run", META)
    with pytest.raises(KeyboardInterrupt):
        GIVEN.put(writer)
    blob = GIVEN.put(writer)
    writer.close()
    reader = FolderReader(writer.path)
    assert bytes(reader.tensor(str(blob)).data) == GIVEN.data
    assert reader.meta.marks == ()


def test_thread_that_never_ran_is_not_waited_for(tmp_path: Path, interrupted_start: None) -> None:
    writer = FolderWriter(tmp_path / "run", META)
    with pytest.raises(KeyboardInterrupt):
        GIVEN.put(writer)
    writer.close()
    assert FolderReader(writer.path).meta.complete is True


def test_room_that_the_system_does_not_have_stops_tensors_alone(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run", META, tensors=TensorOptions(max_bytes=2**60))
    assert GIVEN.put(writer) is None
    with pytest.warns(
        ModtraceWarning, match=r"no more whole tensors are written from step 0 on: MemoryError\("
    ):
        writer.close()


def test_nobody_waits_for_a_thread_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FolderWriter(tmp_path / "run", META, tensors=TensorOptions(max_bytes=4096))
    monkeypatch.setattr(writer._tensors, "_run", writer._tensors._is_done.set)
    GIVEN.put(writer)
    writer.wait_for_tensors()
    assert [GIVEN.put(writer) is None for _ in range(4)] == [False, False, False, True]
    writer.close()


def test_tensor_of_no_given_step_is_of_the_one_that_runs(tmp_path: Path) -> None:
    options = TensorOptions(max_bytes=4096, when_full="drop")
    writer = FolderWriter(tmp_path / "run", META, tensors=options)
    write_step(writer, 0, 0)
    write_step(writer, 1, 1)
    assert given_tensor("large", "uint8", (5000,)).put(writer) is None
    writer.close()
    assert "were dropped from step 2 on" in FolderReader(writer.path).meta.marks[0]


def test_first_step_that_was_dropped_is_told_whichever_thread_was_first(tmp_path: Path) -> None:
    options = TensorOptions(max_bytes=4096, when_full="drop")
    writer = FolderWriter(tmp_path / "run", META, tensors=options)
    for step in (7, 5, 6):
        assert given_tensor("large", "uint8", (5000,)).put(writer, step=step) is None
    writer.close()
    assert FolderReader(writer.path).meta.marks == (
        "3 whole tensors (15000 bytes) were dropped from step 5 on: they came faster than they could be written",
    )


def test_error_of_the_thread_outside_of_writing_stops_tensors_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(ring: TensorRing) -> list[Any]:
        if ring.is_empty:
            return []
        raise MemoryError

    monkeypatch.setattr(TensorRing, "_next_batch", fails)
    writer = FolderWriter(tmp_path / "run", META)
    write_step(writer, 0, 0)
    assert GIVEN.put(writer, step=3) is not None
    with pytest.warns(ModtraceWarning, match="no more whole tensors are written from step 3 on: MemoryError"):
        writer.close()
    [mark] = FolderReader(writer.path).meta.marks
    assert mark.startswith("whole tensors are incomplete from step 3: MemoryError() (")
