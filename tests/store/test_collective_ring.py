"""The newest collectives of a killed process are read from its file, whatever is left of that."""

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modtrace.recording.arrow.batches import to_batch
from modtrace.recording.meta import RunMeta
from modtrace.recording.schema import schema
from modtrace.store.collective_ring import CollectiveRing, read_ring, with_newest
from modtrace.store.layout import RING
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

TEXTS = b"\x1f".join([b"all_reduce", b"0:default", b"0-1", b"float32", b"forward", b"blocks.3"])


def begin(ring: CollectiveRing, number: int) -> int:
    return ring.begin((1000 + number, 0, number, 8, 16, 7, 0, -1), TEXTS)


def test_rows_are_those_that_were_written(tmp_path: Path) -> None:
    ring = CollectiveRing(tmp_path)
    first, _ = begin(ring, 1), begin(ring, 2)
    ring.end(first, 1500)
    ring.close(keep=True)
    rows = read_ring(tmp_path)
    assert [(row["seq_id"], row["end_ns"]) for row in rows] == [(1, 1500), (2, None)]
    wanted = {
        "name": "all_reduce",
        "group": "0:default",
        "ranks": "0-1",
        "dtype": "float32",
        "phase": "forward",
    }
    wanted |= {"path": "blocks.3", "bytes_read": 8, "bytes_written": 16, "step": 7, "thread": 0, "peer": None}
    assert {name: rows[0][name] for name in wanted} == wanted


def test_oldest_are_overwritten_and_cannot_end_others(tmp_path: Path) -> None:
    ring = CollectiveRing(tmp_path)
    first = begin(ring, 0)
    for number in range(1, 3000):
        begin(ring, number)
    ring.end(first, 9)
    ring.close(keep=True)
    rows = read_ring(tmp_path)
    assert [row["seq_id"] for row in rows] == [*range(3000 - 1024, 3000)]
    assert all(row["end_ns"] is None for row in rows)


def test_reader_adds_what_no_table_has_until_the_recording_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    writer = FolderWriter(path, RunMeta())
    ring = writer.open_ring()
    assert ring is not None
    begin(ring, 1)
    begin(ring, 2)
    row = {"name": "all_reduce", "group": "0:default", "seq_id": 1, "start_ns": 1001, "step": 6}
    writer.write("collectives", {name: [value] for name, value in row.items()})
    writer.end_step(0, force=True)
    table = FolderReader(path).table("collectives")
    assert table.select(["seq_id", "step", "path"]).to_pylist() == [
        {"seq_id": 1, "step": 6, "path": None},
        {"seq_id": 2, "step": 7, "path": "blocks.3"},
    ]
    writer.close()
    assert not (writer.folder / RING).exists()
    assert len(FolderReader(path).table("collectives")) == 1


def test_collective_with_a_root_is_not_added_twice_and_one_without_a_number_is_told_by_its_time(
    tmp_path: Path,
) -> None:
    """The file has no root, which the table's row has."""
    ring = CollectiveRing(tmp_path)
    texts = TEXTS.replace(b"all_reduce", b"broadcast")
    ring.begin((1001, 0, 1, 8, 8, 0, 0, -1), texts)
    for start_ns in (2001, 2002):
        ring.begin((start_ns, 0, -1, 8, 8, 0, 0, -1), texts)
    ring.close(keep=True)
    row = {"name": "broadcast", "group": "0:default", "seq_id": 1, "peer": 0, "start_ns": 1001, "step": 0}
    first = to_batch("collectives", {name: [value] for name, value in row.items()})
    table = with_newest(pa.Table.from_batches([first]), tmp_path)
    assert table["start_ns"].to_pylist() == [1001, 2001, 2002]


def test_oldest_that_is_left_can_end(tmp_path: Path) -> None:
    ring = CollectiveRing(tmp_path)
    numbers = [begin(ring, number) for number in range(2000)]
    ring.end(numbers[-1024], 9)
    ring.end(numbers[-1025], 8)
    ring.close(keep=True)
    assert [row["end_ns"] for row in read_ring(tmp_path)][:2] == [9, None]


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(0, 600), st.integers(0, 2000))
def test_damage_loses_rows_and_never_raises(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("ring")
    ring = CollectiveRing(folder)
    for number in range(4):
        begin(ring, number)
    ring.close(keep=True)
    content = bytearray((folder / RING).read_bytes())
    content[at : at + len(noise)] = noise
    (folder / RING).write_bytes(content[: len(content) - cut])
    empty = schema("collectives").empty_table()
    assert with_newest(empty, folder).schema.equals(empty.schema)
