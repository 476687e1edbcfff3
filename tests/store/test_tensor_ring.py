"""The ring of tensors on their way to the disk: what it has room for, and what it hands over at once."""

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


def test_batch_is_bounded_so_that_there_is_room_again_soon() -> None:
    ring = TensorRing(2**20)
    for _ in range(300):
        put(ring, 1)
    assert [len(each) for each in batches(ring)] == [256, 44]
    ring = TensorRing(2**26)
    for _ in range(5):
        put(ring, 5 * 2**20)
    assert [len(each) for each in batches(ring)] == [2, 2, 1]
