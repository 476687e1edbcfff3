"""Finds the complete messages of an Arrow stream, before Arrow reads any of them.

The layout is that of https://arrow.apache.org/docs/format/Columnar.html: each message is a marker, the length of its
metadata, the metadata (a flatbuffer, of which four fields are read here) and its body.
"""

import struct
from typing import NamedTuple

_MARKER = b"\xff\xff\xff\xff"
_PREFIX_BYTES = 8  # the marker, and the length of the metadata
_NOT_WRITTEN = bytes(4)

# Numbers of fields and types of headers, as in Message.fbs.
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_DICTIONARY_DATA = 1
_COMPRESSION = 3


class Damage(Exception):
    """Raised if the bytes at `start` of a stream are not a message as we write them."""

    def __init__(self, start: int, batch: int, why: str) -> None:
        super().__init__(why)
        self.start = start
        self.batch = batch


class Messages(NamedTuple):
    """The complete messages at the beginning of a stream."""

    stop: int  # the end of the last message, without the end-of-stream marker
    batches: tuple[int, ...]  # the beginning of each batch, including the dictionaries before it
    is_ended: bool  # whether the end-of-stream marker follows, and nothing after it


def find_messages(data: memoryview) -> Messages:
    """Returns the complete messages.

    A message that extends beyond the end of the file was never finished. Neither was one that begins with zeros, which
    remain if a file was extended and power failed before its pages were written.

    Raises:
        Damage: there is something other than a message, or a compressed message. We never write these, and the memory
            for reading one is unknown.
    """
    at = start = 0
    batches: list[int] = []
    while True:
        front = bytes(data[at : at + _PREFIX_BYTES])
        is_unwritten = at > 0 and front[:4] == _NOT_WRITTEN
        if is_unwritten or (len(front) < _PREFIX_BYTES and _MARKER.startswith(front[:4])):
            return Messages(start, tuple(batches), is_ended=False)
        if not front.startswith(_MARKER):
            raise Damage(start, len(batches), f"no message begins at byte {at}")
        length = int.from_bytes(front[4:], "little", signed=True)
        body = at + _PREFIX_BYTES + length
        if not length:
            if body != len(data):
                raise Damage(at, len(batches), f"the stream ends at byte {body} of {len(data)}")
            return Messages(at, tuple(batches), is_ended=True)
        if body > len(data):
            return Messages(start, tuple(batches), is_ended=False)
        try:
            kind, body_length = _read_metadata(bytes(data[at + _PREFIX_BYTES : body]))
        except (struct.error, LookupError) as error:
            raise Damage(start, len(batches), f"{error} (byte {at})") from error
        if kind not in ((_DICTIONARY, _BATCH) if at else (_SCHEMA,)):
            raise Damage(start, len(batches), f"a message is of type {kind} (byte {at})")
        at = body + body_length
        if at > len(data):
            return Messages(start, tuple(batches), is_ended=False)
        if kind != _DICTIONARY:
            if kind == _BATCH:
                batches.append(start)
            start = at


def _read_metadata(metadata: bytes) -> tuple[int, int]:
    """Returns the type of a message, and the length of its body."""
    message = _unpack("<I", metadata, 0)
    kind, length = _field(metadata, message, _HEADER_TYPE), _field(metadata, message, _BODY_LENGTH)
    header_type = _unpack("<B", metadata, kind) if kind else 0
    body_length = _unpack("<q", metadata, length) if length else 0
    if body_length < 0:
        raise LookupError(f"a message has a body of {body_length} bytes")
    if header_type in (_DICTIONARY, _BATCH):
        batch = _table(metadata, message, _HEADER)
        if header_type == _DICTIONARY:
            batch = _table(metadata, batch, _DICTIONARY_DATA)
        if _field(metadata, batch, _COMPRESSION):
            raise LookupError("a message is compressed")
    return header_type, body_length


def _table(metadata: bytes, table: int, number: int) -> int:
    """Returns the position of the table that a field refers to."""
    at = _field(metadata, table, number)
    if not at:
        raise LookupError("a message has no header")
    return at + _unpack("<I", metadata, at)


def _field(metadata: bytes, table: int, number: int) -> int:
    """Returns the position of a field of a table; 0 if the table does not have it."""
    vtable = table - _unpack("<i", metadata, table)
    at = 4 + 2 * number
    if at + 2 > _unpack("<H", metadata, vtable):
        return 0
    offset = _unpack("<H", metadata, vtable + at)
    return table + offset if offset else 0


def _unpack(form: str, metadata: bytes, at: int) -> int:
    if at < 0:
        raise LookupError("a message refers to what lies before it")
    [value] = struct.unpack_from(form, metadata, at)
    return int(value)
