"""Keeps the newest collectives of a process in a file, so that they survive its killing before their step ends."""

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..recording.arrow.batches import to_batch
from ..recording.arrow.checked_sink import check_rows
from ..recording.arrow.dictionary_codes import share_dictionaries
from ..recording.protocols import TEXT_BYTES
from .layout import RING

_RECORDS, _SLOTS = 1024, 64
_MARK = b"modtrace ring 2\n"

#: How many have begun, behind the mark; `_called.c` counts, too.
_COUNT = struct.Struct("<q")
_RECORDS_AT = len(_MARK) + _COUNT.size

#: A record: its number, start and end in nanoseconds (0: not yet), the number within the group, bytes read and written,
#: step, thread and peer (-1: none); then the texts, with "\x1f" between them.
_RECORD = struct.Struct(f"<qqqqqqiii{TEXT_BYTES}s")
_NUMBERS = ("start_ns", "end_ns", "seq_id", "bytes_read", "bytes_written", "step", "thread", "peer")
_TEXTS = ("name", "group", "ranks", "dtype", "phase", "path")
_END = struct.Struct("<q")
_END_AT = 16  # within a record
_SIZE = _RECORDS_AT + (_RECORDS + _SLOTS) * _RECORD.size
_UNKNOWN = -1

#: How many of the table's last rows are searched for those of the file; rows are written step by step.
_NEWEST = 8 * _RECORDS


class CollectiveRing:
    """The file, to which one process writes without a system call.

    Threads may begin collectives at the same time: if two get one number, the later one is kept.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the file.

        Raises:
            OSError: it cannot be made.
        """
        self._path = folder / RING
        try:
            with self._path.open("w+b") as file:
                # With zeros, as writing to a page for which the disk has no room would kill the process.
                file.write(bytes(_SIZE))
                file.flush()
                os.fsync(file.fileno())
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0)
        except OSError:
            with contextlib.suppress(OSError):
                self._path.unlink()
            raise
        self._map[: len(_MARK)] = _MARK

    @property
    def memory(self) -> mmap.mmap | bytearray:
        """The memory of the file; once it is closed, memory that nobody reads."""
        return bytearray(_SIZE) if self._map is None else self._map

    @property
    def _begun(self) -> int:
        return int(_COUNT.unpack_from(self.memory, len(_MARK))[0])

    def begin(self, new: Sequence[int], texts: bytes) -> int:
        """Writes a collective, and returns its number, for `end`; see `RecentCollectives`."""
        number = self._begun
        self._write(_COUNT, len(_MARK), number + 1)
        self._write(_RECORD, _at(number), number + 1, *new, texts)
        return number

    def set_last(self, slot: int, last: Sequence[int], texts: bytes) -> None:
        """Writes the number of a group's last collective; of more groups than there are slots, nothing."""
        if slot < _SLOTS:
            self._write(_RECORD, _RECORDS_AT + (_RECORDS + slot) * _RECORD.size, 1, *last, texts)

    def end(self, number: int, now_ns: int) -> None:
        """Writes that a collective is complete."""
        if number >= self._begun - _RECORDS:
            self._write(_END, _at(number) + _END_AT, now_ns)

    def _write(self, form: struct.Struct, at: int, *values: Any) -> None:
        mapped = self._map
        with contextlib.suppress(ValueError):  # another thread has closed it
            if mapped is not None:
                form.pack_into(mapped, at, *values)

    def close(self, *, keep: bool = False) -> None:
        """Closes the file, and deletes it unless it is to be kept. A second call does nothing."""
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # code in C has `memory` still
                mapped.close()
            with contextlib.suppress(OSError):
                if not keep:
                    self._path.unlink()


def _at(number: int) -> int:
    return _RECORDS_AT + number % _RECORDS * _RECORD.size


def read_ring(folder: Path) -> list[dict[str, Any]]:
    """Returns the collectives in the file of a rank's folder as rows of `collectives`, in the order they began.

    The list is empty if there is no file.
    """
    with contextlib.suppress(OSError):
        content = (folder / RING).read_bytes()
        if content.startswith(_MARK):
            return sorted(_read_records(content), key=lambda row: row["start_ns"])
    return []


def with_newest(table: pa.Table, folder: Path) -> pa.Table:
    """Returns the table `collectives` of a run that was not closed, with those in the file that it lacks."""
    newest = table.slice(max(table.num_rows - _NEWEST, 0)).select([*_KEYS]).to_pylist()
    there = {*map(_identify, newest)}
    rows = {_identify(row): row for row in read_ring(folder)}
    new = [row for key, row in rows.items() if key not in there]
    if not new:
        return table
    columns = {name: [row[name] for row in new] for name in new[0]}
    with contextlib.suppress(ValueError):  # damaged texts
        accepted, _ = check_rows("collectives", columns)
        if accepted:
            added = pa.Table.from_batches([to_batch("collectives", accepted)])
            return share_dictionaries(pa.concat_tables([table, added]))
    return table


_KEYS = ("group", "name", "seq_id", "peer", "start_ns")


def _identify(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what tells a collective from others; the file has no root, and a group may have no numbers."""
    peer = row["peer"] if row["name"] in ("send", "recv") else None
    return row["group"], row["name"], row["seq_id"], peer, row["start_ns"] if row["seq_id"] is None else None


def _read_records(content: bytes) -> Iterator[dict[str, Any]]:
    for at in range(_RECORDS_AT, len(content) - _RECORD.size + 1, _RECORD.size):
        number, *numbers, texts = _RECORD.unpack_from(content, at)
        if number <= 0:
            continue
        parts = texts.partition(b"\0")[0].decode(errors="replace").split("\x1f")
        row: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=True))
        row |= dict.fromkeys(_TEXTS) | {name: part or None for name, part in zip(_TEXTS, parts, strict=False)}
        row["end_ns"] = row["end_ns"] or None
        for name in ("seq_id", "peer", "thread"):
            row[name] = None if row[name] == _UNKNOWN else row[name]
        if row["name"] and row["group"]:
            yield row
