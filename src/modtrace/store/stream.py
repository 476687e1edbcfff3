"""Writes a table's Arrow stream so that rows survive the process once written, and joins the stream's small batches."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import ipc

from ..recording.arrow.dictionary_codes import share_dictionaries

#: Strings are written once: a batch contains only those that are new in its stream (a delta), and codes.
_OPTIONS = ipc.IpcWriteOptions(emit_dictionary_deltas=True)

# Smaller parts of a batch are joined, because each call into Python takes 0.5 us and a small batch has 45 parts.
_SMALL_BYTES = 2**16


class TableStream:
    """The file of a table, to which complete batches are appended.

    Arrow encodes into memory, and the bytes are written to the file when the batch is complete. So no buffer exists
    that a destructor, or that of a forked child, could flush.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Creates the file, which must not exist.

        Raises:
            OSError: it cannot be made.
        """
        self.rows = 0
        self.batches = 0
        self.size_bytes = 0  # the bytes of complete batches
        self._is_whole = True  # whether the file has all batches that the encoder has seen
        self._collector = _Collector()
        self._encoded = pa.BufferedOutputStream(pa.PythonFile(self._collector, mode="w"), _SMALL_BYTES)
        self._writer = ipc.new_stream(self._encoded, schema, options=_OPTIONS)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch completely, or not at all.

        Raises:
            OSError: it cannot be written. Do not write to the stream again, because its dictionaries include the
                strings of the failed batch.
        """
        self._is_whole = False
        self._writer.write_batch(batch)
        self._write_encoded()
        self._is_whole = True
        self.rows += batch.num_rows
        self.batches += 1

    def finish(self) -> bool:
        """Writes the end-of-stream marker and closes the file.

        Returns:
            whether the marker was written. It is not if a batch failed: the encoder then holds parts of that batch, and
            after a failed first batch, which contains the schema, the marker alone would not be a stream.

        Raises:
            OSError: the marker cannot be written. The file is closed all the same.
        """
        try:
            if self._is_whole:
                self._writer.close()
                self._write_encoded()
        finally:
            self.abandon()
        return self._is_whole

    def abandon(self) -> None:
        """Closes the file without writing."""
        os.close(self._fd)

    def _write_encoded(self) -> None:
        self._encoded.flush()
        written = 0
        try:
            for part in self._collector.take():
                left = memoryview(part)
                while left:
                    done = os.write(self._fd, left)
                    written, left = written + done, left[done:]
        except BaseException:  # a full disk, or KeyboardInterrupt between two parts
            with contextlib.suppress(OSError):  # readers ignore what is incomplete
                os.ftruncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += written


class _Collector:
    """The file object that Arrow's writer writes to. It keeps large columns without copying them."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[pa.Buffer | bytes] = []

    def write(self, data: pa.Buffer | bytes) -> int:
        self._parts.append(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing, because nothing is buffered."""

    def close(self) -> None:
        """Does nothing, because no file is open here."""

    def take(self) -> list[pa.Buffer | bytes]:
        taken, self._parts = self._parts, []
        return taken


LARGE_BATCH_ROWS = 65_536
_BYTES = 64 * 2**20  # of a batch at most, because rows may contain long lists


def compact(path: Path) -> int:
    """Replaces the stream at `path`, which must be complete, by one with the same rows in large batches.

    Columns that are null in every row are left out, and read as null again: a number takes eight bytes a row even if it
    is null, and most columns of a table are about things that a run has not recorded.

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
        used = _find_used_columns(ipc.open_stream(mapped))
        mapped.seek(0)
        source = ipc.open_stream(mapped, options=ipc.IpcReadOptions(included_fields=used))
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


def _find_used_columns(source: ipc.RecordBatchStreamReader) -> list[int]:
    """Returns the numbers of the columns that have a value in any row, from the null counts in the stream."""
    unused = set(range(len(source.schema)))
    for batch in source:
        unused = {at for at in unused if batch.column(at).null_count == batch.num_rows}
    return [at for at in range(len(source.schema)) if at not in unused] or [0]


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
