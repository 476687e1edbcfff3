"""Every sink keeps what it is given: in memory, in a folder, and copied from one to the other."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.kept import META, Keep, keep_in_copied_memory, keep_in_folder, keep_in_memory
from helpers.typed_rows import Columns, expected, rows, rows_of, same, write_all, write_step, writes
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.protocols import RecordingData, Sink
from modtrace.recording.schema import schema, schemas
from modtrace.store.copy import write_recording
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter


def keep_in_unclosed_folder(folder: Path, write: Callable[[Sink], None]) -> RecordingData:
    writer = FolderWriter(folder / "run.modtrace", META)
    write(writer)
    writer.end_step(0, force=True)
    return FolderReader(folder / "run.modtrace")


def keep_in_copied_folder(folder: Path, write: Callable[[Sink], None]) -> RecordingData:
    write_recording(keep_in_folder(folder, write), folder / "copy.modtrace")
    return FolderReader(folder / "copy.modtrace")


CLOSED = [keep_in_memory, keep_in_folder, keep_in_copied_memory, keep_in_copied_folder]
every_sink = pytest.mark.parametrize("keep", [*CLOSED, keep_in_unclosed_folder])
every_closed_sink = pytest.mark.parametrize("keep", CLOSED)


@every_sink
@settings(max_examples=8, deadline=None)
@given(batches=writes(), step_ms=st.sampled_from([0, 90, 250]))
def test_what_is_written_is_read(keep: Keep, batches: list[tuple[str, Columns]], step_ms: int) -> None:
    with TemporaryDirectory() as folder:
        data = keep(Path(folder), lambda sink: write_all(sink, batches, step_ms))
        assert same(rows(data), rows_of(batches))
        for name in schemas():
            assert data.table(name).schema.equals(schema(name))
            data.table(name).validate(full=True)


@every_sink
def test_steps_are_kept_in_order(tmp_path: Path, keep: Keep) -> None:
    def write(sink: Sink) -> None:
        for step in range(60):
            write_step(sink, step, now_ns=step * 30_000_000)

    assert rows(keep(tmp_path, write)) == expected(60)


@every_sink
def test_column_has_one_dictionary(tmp_path: Path, keep: Keep) -> None:
    def write(sink: Sink) -> None:
        for step in range(20):
            write_step(sink, step, now_ns=step * 200_000_000)

    names = keep(tmp_path, write).table("scalars").column("name")
    dictionaries = [each.dictionary.to_pylist() for each in names.chunks]
    assert dictionaries == [[f"loss/{each}" for each in range(7)]] * names.num_chunks


@every_closed_sink
def test_meta_is_kept_and_complete(tmp_path: Path, keep: Keep) -> None:
    meta = keep(tmp_path, lambda sink: write_step(sink, 0, 0)).meta
    assert meta.to_json() == {**META.to_json(), "complete": True}


@every_closed_sink
def test_marked_recording_is_not_complete(tmp_path: Path, keep: Keep) -> None:
    def write(sink: Sink) -> None:
        sink.mark("incomplete from event 7: layers.3: boom")
        sink.mark("incomplete from event 7: layers.3: boom")

    meta = keep(tmp_path, write).meta
    assert meta.marks == ("incomplete from event 7: layers.3: boom",)
    assert meta.complete is False


@every_sink
def test_table_without_rows_is_empty_and_none_that_is_unknown(tmp_path: Path, keep: Keep) -> None:
    data = keep(tmp_path, lambda sink: None)
    assert data.table("ops").num_rows == 0
    assert data.table("ops").schema.equals(schema("ops"))
    with pytest.raises(ValueError, match=r"^no table 'op' in a recording"):
        data.table("op")


@every_sink
def test_rows_that_do_not_fit_are_refused_at_once(tmp_path: Path, keep: Keep) -> None:
    def write(sink: Sink) -> None:
        with pytest.raises(ValueError, match=r"^table 'calls' has no column 'name'$"):
            sink.write("calls", {"name": ["x"]})
        with pytest.raises(ValueError, match=r"^no table 'call' in a recording"):
            sink.write("call", {"call_id": [1]})

    assert rows(keep(tmp_path, write)) == {}


@every_sink
def test_arrow_columns_of_a_table_may_be_written(tmp_path: Path, keep: Keep) -> None:
    table = pa.table({"step": [0, 1], "name": ["a", "b"], "value": [1.0, 2.0]})
    data = keep(
        tmp_path, lambda sink: sink.write("scalars", dict(zip(table.column_names, table, strict=True)))
    )
    assert data.table("scalars").to_pylist() == table.to_pylist()


def test_copy_of_an_open_recording_says_so(tmp_path: Path) -> None:
    recording = MemoryRecording(META)
    write_step(recording, 0, 0)
    write_recording(recording, tmp_path / "copy.modtrace")
    meta = FolderReader(tmp_path / "copy.modtrace").meta
    assert meta.marks == ("copied before the recording was closed",)


def test_copy_replaces_the_recording_it_is_made_of(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    keep_in_folder(tmp_path, lambda sink: [write_step(sink, step, 0) for step in range(5)])
    write_recording(FolderReader(path), path, overwrite=True)
    assert rows(FolderReader(path)) == expected(5)
