"""The ring of tensors on their way to the disk: what it has room for, and what it hands over at once."""

from itertools import islice

import pytest

from modtrace.store.tensor_ring import TensorPart, TensorRing


def put(ring: TensorRing, size_bytes: int, shard: int = 0, *, is_last: bool = True) -> int | None:
    """Appends a part; returns where it is, or None where there is no room."""
    start = ring.place(size_bytes)
    if start is not None:
        ring.append(TensorPart(shard, 0, "t", "uint8", (size_bytes,), 0, start, size_bytes, True, is_last))
    return start


def batches(ring: TensorRing) -> list[list[int]]:
    """The sizes of what is handed over, until it ends."""
    ring.close()
    return [[each.size_bytes for each in batch] for batch in ring.batches()]


def test_parts_begin_at_whole_lines_of_64_bytes_and_take_512_at_least() -> None:
    ring = TensorRing(4100)
    assert ring.size_bytes == 4096
    assert [put(ring, size) for size in (1, 600, 0, 513, 2000)] == [0, 512, 1152, 1664, None]
    assert [put(ring, 1) for _ in range(4)] == [2240, 2752, 3264, None]


def test_part_lies_in_one_piece_and_waits_for_the_one_in_its_place() -> None:
    ring = TensorRing(4096)
    assert [put(ring, 1500) for _ in range(3)] == [0, 1536, None]
    assert len(next(islice(ring.batches(), 1))) == 2
    ring._release(1)
    assert put(ring, 1500) == 4096
    assert put(ring, 1) is None


def test_what_is_larger_than_the_ring_has_never_room() -> None:
    assert TensorRing(4096).place(4096) == 0
    assert TensorRing(4096).place(4097) is None


def test_batch_is_of_one_shard_or_one_part() -> None:
    ring = TensorRing(2**20)
    for size, shard, is_last in ((1, 0, True), (2, 0, True), (3, 1, True), (4, 1, False), (5, 1, True)):
        put(ring, size, shard, is_last=is_last)
    assert batches(ring) == [[1, 2], [3], [4], [5]]


def test_batch_is_bounded_so_that_there_is_room_again_soon() -> None:
    ring = TensorRing(2**20)
    for _ in range(300):
        put(ring, 1)
    assert [len(each) for each in batches(ring)] == [256, 44]
    ring = TensorRing(2**26)
    for _ in range(5):
        put(ring, 5 * 2**20)
    assert [len(each) for each in batches(ring)] == [2, 2, 1]


def test_who_waits_for_room_is_woken_when_a_batch_is_done() -> None:
    ring = TensorRing(4096)
    put(ring, 4096)
    found = ring.batches()
    next(found)
    assert not ring._room.is_set()
    ring.close()
    assert list(found) == []
    assert ring._room.is_set()


def test_memory_that_was_not_taken_is_not_read() -> None:
    with pytest.raises(AssertionError, match=r"allocate\(\) was not called"):
        TensorRing(4096).view(0, 1)
