"""Joins the small batches of a stream into large ones, which are read 30 times as fast."""

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc

from ..recording.arrow.dictionary_codes import share_dictionaries
from .stream import TableStream

LARGE_BATCH_ROWS = 65_536
_BYTES = 64 * 2**20  # bounds the memory if rows contain long lists


def compact(path: Path) -> int:
    """Replaces the stream at `path`, which must be complete, by one with the same rows in large batches.

    Returns:
        the size of the new file in bytes.

    Raises:
        OSError: it cannot be written. The old stream is unchanged.
    """
    compacted = path.with_name(path.name + ".tmp")
    compacted.unlink(missing_ok=True)
    try:
        _write_large(path, compacted)
        os.replace(compacted, path)
    finally:
        compacted.unlink(missing_ok=True)
    return path.stat().st_size


def _write_large(path: Path, compacted: Path) -> None:
    with pa.memory_map(str(path)) as mapped:
        source = ipc.open_stream(mapped)
        target = TableStream(compacted, source.schema)
        try:
            for group in _groups(source):
                table = share_dictionaries(pa.Table.from_batches(group))
                for batch in table.combine_chunks().to_batches():
                    target.write(batch)
        except BaseException:
            target.abandon()
            raise
        target.finish()


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        group.append(batch)
        rows += batch.num_rows
        size_bytes += batch.get_total_buffer_size()
        if rows >= LARGE_BATCH_ROWS or size_bytes >= _BYTES:
            yield group
            group, rows, size_bytes = [], 0, 0
    if group:
        yield group
