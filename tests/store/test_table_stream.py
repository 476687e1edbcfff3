"""A stream cut anywhere is read to its last whole batch."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from helpers.typed_rows import columns_of, same
from modtrace.errors import DamagedRecordingError
from modtrace.recording.arrow.buffer import TableBuffer
from modtrace.recording.schema import schema
from modtrace.store.read_stream import read_messages, read_stream
from modtrace.store.stream import TableStream, compact


def write_stream(path: Path, table: str, batches: list[dict[str, Any]]) -> list[int]:
    """Writes a stream; returns where each of its batches ends."""
    stream, buffer, ends = TableStream(path, schema(table)), TableBuffer(table), []
    for columns in batches:
        buffer.append(columns)
        stream.write(buffer.take())
        ends.append(stream.size_bytes)
    stream.finish()
    return ends


SCALARS = [
    {"step": [0, 1], "name": ["loss", "lr"], "value": [1.0, 2.0]},
    {"step": [2], "name": ["loss"], "value": [3.0]},
    {"step": [3, 4], "name": ["norm", "loss"], "value": [4.0, 5.0]},
]
ROWS = [
    {"step": 0, "name": "loss", "value": 1.0},
    {"step": 1, "name": "lr", "value": 2.0},
    {"step": 2, "name": "loss", "value": 3.0},
    {"step": 3, "name": "norm", "value": 4.0},
    {"step": 4, "name": "loss", "value": 5.0},
]


def test_every_prefix_is_read_to_its_last_whole_batch(tmp_path: Path) -> None:
    whole, cut = tmp_path / "scalars.arrow", tmp_path / "cut.arrow"
    ends = write_stream(whole, "scalars", SCALARS)
    content = whole.read_bytes()
    for length in [*range(0, len(content), 3), *ends, *(end - 1 for end in ends), len(content)]:
        cut.write_bytes(content[:length])
        rows = [0, 2, 3, 5][sum(end <= length for end in ends)]
        assert read_stream(cut, schema("scalars")).to_pylist() == ROWS[:rows]
        assert read_messages(cut).is_ended == (length == len(content))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), table=st.sampled_from(["ops", "values", "modules", "sites"]))
def test_prefix_of_any_stream_is_read_to_its_last_whole_batch(data: st.DataObject, table: str) -> None:
    columns = columns_of(table).filter(lambda each: len(next(iter(each.values()))) > 0)
    batches = data.draw(st.lists(columns, min_size=1, max_size=4))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "table.arrow"
        ends = write_stream(path, table, batches)
        whole = read_stream(path, schema(table)).to_pylist()
        rows = [sum(len(next(iter(each.values()))) for each in batches[:n]) for n in range(len(batches) + 1)]
        assert len(whole) == rows[-1]
        length = data.draw(st.integers(0, path.stat().st_size))
        path.write_bytes(path.read_bytes()[:length])
        kept = read_stream(path, schema(table))
        kept.validate(full=True)
        assert same(kept.to_pylist(), whole[: rows[sum(end <= length for end in ends)]])


def test_word_is_written_once(tmp_path: Path) -> None:
    word = "aten.a_very_long_name" * 100
    batches = [{"step": [0], "name": [word], "value": [1.0]} for _ in range(50)]
    write_stream(tmp_path / "scalars.arrow", "scalars", batches)
    assert (tmp_path / "scalars.arrow").read_bytes().count(word.encode()) == 1


def test_rows_are_not_copied_when_read(tmp_path: Path) -> None:
    write_stream(
        tmp_path / "steps.arrow", "steps", [{"step": [0] * 100_000, "kind": ["train"] * 100_000}] * 4
    )
    before = pa.total_allocated_bytes()
    table = read_stream(tmp_path / "steps.arrow", schema("steps"))
    assert table.num_rows == 400_000
    assert pa.total_allocated_bytes() - before < 100_000


@pytest.mark.parametrize(
    "content", [b"garbage", b"\x00" * 100, b"\xff\xff\xff\xff" + b"\x10\x00\x00\x00" * 9]
)
def test_file_that_is_no_stream_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "calls.arrow"
    path.write_bytes(content)
    with pytest.raises(DamagedRecordingError) as caught:
        read_stream(path, schema("calls"))
    assert str(caught.value) == (
        f"{path}: not an Arrow stream ({len(content)} bytes). "
        "Copy the file again, or delete it to read the other tables."
    )


def test_damage_in_the_middle_names_the_batch_and_where_to_cut(tmp_path: Path) -> None:
    path = tmp_path / "scalars.arrow"
    first_end, *_ = write_stream(path, "scalars", SCALARS)
    content = bytearray(path.read_bytes())
    content[first_end : first_end + 16] = b"\x7f" * 16
    path.write_bytes(content)
    with pytest.raises(DamagedRecordingError) as caught:
        read_stream(path, schema("scalars"))
    assert str(caught.value) == (
        f"{path}: batch 1 is damaged: no message begins at byte {first_end}. Copy the file again, cut it at byte "
        f"{first_end} to read what lies before, or delete it to read the other tables."
    )
    os.truncate(path, first_end)
    assert read_stream(path, schema("scalars")).to_pylist() == ROWS[:2]


def write_columns(path: Path, columns: dict[str, pa.Array]) -> None:
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def test_first_of_two_damaged_batches_is_named_in_a_long_stream(tmp_path: Path) -> None:
    path, rows = tmp_path / "scalars.arrow", 10_000
    batch = {"step": list(range(rows)), "name": ["loss"] * rows, "value": [1.0] * rows}
    ends = write_stream(path, "scalars", [batch] * 20)  # which are checked in threads
    content = bytearray(path.read_bytes())
    for number in (16, 12):
        codes = content.rindex(bytes(4 * 1_000), 0, ends[number])  # all are 0
        content[codes : codes + 4] = (99).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(DamagedRecordingError, match=r"batch 12 is damaged: column 'name'"):
        read_stream(path, schema("scalars"))


def test_older_file_without_a_column_that_may_be_null_is_filled(tmp_path: Path) -> None:
    full = read_modules(tmp_path, leave_out=["buffers", "name"])
    assert full.schema.equals(schema("modules"))
    assert full.select(["module_id", "type", "name", "buffers"]).to_pylist() == [
        {"module_id": 0, "type": "GPT", "name": None, "buffers": None},
        {"module_id": 1, "type": "Linear", "name": None, "buffers": None},
    ]


def read_modules(tmp_path: Path, leave_out: list[str]) -> pa.Table:
    columns = {
        "module_id": pa.array([0, 1], pa.int64()),  # another width than today's
        "a_column_of_the_future": pa.array(["x", "y"]),
        "root_id": pa.array([0, 0], pa.int32()),
        "path": pa.array(["", "head"]),
        "raw_path": pa.array(["", "head"]),
        "aliases": pa.array([[], ["h"]], pa.list_(pa.string())),
        "name": pa.array(["GPT", None]),
        "type": pa.array(["GPT", "Linear"]),
        "parent_id": pa.array([None, 0], pa.int32()),
        "parameters": pa.array([10, 5]),
        "buffers": pa.array([0, 0]),
    }
    write_columns(
        tmp_path / "modules.arrow", {key: each for key, each in columns.items() if key not in leave_out}
    )
    return read_stream(tmp_path / "modules.arrow", schema("modules"))


def test_file_without_a_column_that_must_be_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DamagedRecordingError) as caught:
        read_modules(tmp_path, leave_out=["path"])
    assert str(caught.value) == (
        f"{tmp_path}/modules.arrow: its columns are not those of the table: there is no column 'path'. "
        "Delete the file to read the other tables."
    )


def test_compacted_stream_has_large_batches_and_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modtrace.store.stream.LARGE_BATCH_ROWS", 100)
    path = tmp_path / "scalars.arrow"
    batches = [{"step": [at], "name": [f"word {at % 40}"], "value": [at / 2]} for at in range(250)]
    write_stream(path, "scalars", batches)
    before = read_stream(path, schema("scalars")).to_pylist()
    assert compact(path) == path.stat().st_size
    after = read_stream(path, schema("scalars"))
    assert [len(each) for each in after.column("step").chunks] == [100, 100, 50]
    assert after.to_pylist() == before
    assert read_messages(path).is_ended


def test_compacted_stream_leaves_out_columns_without_a_value(tmp_path: Path) -> None:
    path = tmp_path / "steps.arrow"
    batches = [{"step": [at], "kind": ["train"], "start_ns": [at]} for at in range(3)]
    write_stream(path, "steps", [*batches, {"step": [3], "kind": ["train"], "start_ns": [3], "end_ns": [9]}])
    before = read_stream(path, schema("steps"))
    compact(path)
    with ipc.open_stream(path.read_bytes()) as stream:
        assert stream.schema.names == ["step", "kind", "start_ns", "end_ns"]  # without overhead_ns
    assert read_stream(path, schema("steps")).to_pylist() == before.to_pylist()


def test_compaction_that_fails_leaves_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scalars.arrow"
    write_stream(path, "scalars", SCALARS)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("modtrace.store.stream.os.write", full)
    with pytest.raises(OSError, match="No space left"):
        compact(path)
    assert [each.name for each in tmp_path.iterdir()] == ["scalars.arrow"]
    assert read_stream(path, schema("scalars")).to_pylist() == ROWS


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("batches", [0, 1, 2])
def test_nothing_of_a_batch_that_was_broken_off_stays_and_no_marker_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int, error: BaseException
) -> None:
    path, buffer, write = tmp_path / "scalars.arrow", TableBuffer("scalars"), os.write
    stream = TableStream(path, schema("scalars"))

    def write_half(fd: int, data: memoryview) -> int:
        write(fd, data[: len(data) // 2])
        raise error

    for columns in SCALARS[:batches]:
        buffer.append(columns)
        stream.write(buffer.take())
    whole = path.read_bytes()
    buffer.append(SCALARS[2])
    with monkeypatch.context() as patch:
        patch.setattr("modtrace.store.stream.os.write", write_half)
        with pytest.raises(type(error)):
            stream.write(buffer.take())
    assert stream.finish() is False
    assert path.read_bytes() == whole
    assert read_stream(path, schema("scalars")).to_pylist() == ROWS[: [0, 2, 3][batches]]


AT_EXIT = """
import atexit, threading

def write_and_read():
    sink = CheckedSink(writer, FailureReporter(writer, threading.RLock(), strict=True, step=lambda: 0))
    rows = np.arange(110_000)
    sink.write("uses", {"consumer_op": rows, "tensor_id": rows})
    sink.close()
    reader = FolderReader("long.modtrace")
    print(reader.table("uses").num_rows, reader.meta.marks)

atexit.register(write_and_read)
import numpy as np
from modtrace.recording.arrow.checked_sink import CheckedSink
from modtrace.recording.failure_reporter import FailureReporter
from modtrace.recording.meta import RunMeta
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

writer = FolderWriter("long.modtrace", RunMeta())
"""


def test_no_row_of_a_long_table_is_lost_at_the_end_of_the_interpreter_where_no_thread_can_be_started(
    tmp_path: Path,
) -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "110000 ()\n", done.stderr
