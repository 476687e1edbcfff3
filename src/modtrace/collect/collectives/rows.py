"""Holds collectives until they are written, and makes the columns of `collectives` of them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...recording.arrow.arrays import Coded
from ...recording.protocols import TEXT_BYTES
from ...torch_internals.collectives import reduction_of, root_of, size_of
from ..log.segments import CallRef, Segment

#: More than the collectives in torch's log, which are 2,000 by default.
_MOST_IN_LOG = 2**12

#: By what a called collective is found in torch's log: its number, or if that is not known its name and bytes.
CalledKey = int | tuple[str, int]


@dataclass(eq=False, slots=True)
class KnownGroup:
    """A process group of this process."""

    name: str
    ranks: tuple[int, ...]  # global ranks, by group rank; empty if they are not known
    shown_ranks: str | None
    #: How many messages its backend has counted as collectives; None if it does not count them.
    messages: int | None
    is_numbered: bool  # whether its collectives have the same numbers on all ranks
    shows_ends: bool  # whether `Work.wait` returns when a collective is complete, and not only ordered
    before: int = 0  # collectives before the recording, and messages where they count
    called: int = 0  # collectives, and messages where they count, that were seen to be called since
    last: int = 0  # the number that the backend had counted before the last of them
    message_numbers: dict[tuple[str, int], int] = field(default_factory=dict)  # the last, by kind and peer
    #: The newest that were seen to be called and are yet to be found in torch's log.
    called_keys: deque[CalledKey] = field(default_factory=lambda: deque(maxlen=_MOST_IN_LOG))

    def global_rank(self, rank: Any) -> int | None:
        """Returns the global rank of a rank in the group; None if it is not known."""
        return self.ranks[rank] if isinstance(rank, int) and 0 <= rank < len(self.ranks) else None


@dataclass(frozen=True, eq=False)
class CollectiveSite:
    """What the collectives of one place share."""

    name: str
    group: str
    ranks: str | None
    dtype: Any = None  # torch's, or its name
    phase: str | None = None
    path: str | None = None

    @cached_property
    def texts(self) -> bytes:
        """The texts for the ring; of a long path the end, as it has the layer."""
        fields = (self.name, self.group, self.ranks, _name_of(self.dtype), self.phase)
        front = "\x1f".join([*(text or "" for text in fields), ""]).encode()
        return (front + (self.path or "").encode()[-max(TEXT_BYTES - len(front), 0) :])[:TEXT_BYTES]


@dataclass(eq=False, slots=True)
class Row:
    """A collective that is not written yet."""

    site: CollectiveSite
    start_ns: int
    seq_id: int | None
    bytes_read: int = 0
    bytes_written: int = 0
    thread: int | None = None  # None: C++ code started it
    options: Any = None  # those of torch
    group: KnownGroup | None = None
    peer: int | None = None
    #: The outermost call in which it was started, with the number of its events then.
    segment: Segment | None = None
    events: int = 0
    call: CallRef | None = None  # the call, if it is known at once
    end_ns: int | None = None
    wait_ns: int | None = None
    kept_as: int = -1  # its number in the ring
    step: int = 0
    is_done: bool = False  # whether torch's log has it as complete, without a time

    def numbers(self) -> tuple[int, ...]:
        """Returns its numbers for the ring."""
        return (
            self.start_ns,
            0 if self.end_ns is None else self.end_ns,
            -1 if self.seq_id is None else self.seq_id,
            self.bytes_read,
            self.bytes_written,
            self.step,
            -1 if self.thread is None else self.thread,
            -1 if self.peer is None else self.peer,
        )

    def call_id(self) -> int | None:
        """Returns the id of its call, whose segment has ended."""
        call = self.call if self.segment is None else self.segment.call_after(self.events - 1)
        return None if call is None else call.call_id


def make_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the columns of rows whose steps are known; calls are freed, which keep all surrounding calls alive."""
    codes: dict[CollectiveSite, int] = {}
    of_rows = np.array([codes.setdefault(row.site, len(codes)) for row in rows])
    columns: dict[str, Any] = {
        name: Coded([getattr(site, name) for site in codes], of_rows)
        for name in ("path", "phase", "name", "group", "ranks")
    }
    columns["dtype"] = Coded([_name_of(site.dtype) for site in codes], of_rows)
    columns["call_id"] = [row.call_id() for row in rows]
    columns["reduce_op"] = [None if row.options is None else reduction_of(row.options) for row in rows]
    columns["peer"] = [row.peer if row.options is None else _root_of(row) for row in rows]
    for row in rows:
        row.call = row.segment = row.options = None
    numbers = ("step", "seq_id", "bytes_read", "bytes_written", "thread", "start_ns", "end_ns", "wait_ns")
    return columns | {name: [getattr(row, name) for row in rows] for name in numbers}


def _root_of(row: Row) -> int | None:
    return None if row.group is None else row.group.global_rank(root_of(row.options))


def _name_of(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def count_bytes(tensors: Any) -> int:
    """Returns the bytes of a tensor, or of nested lists of them; of a sparse one those of its indices and values."""
    if isinstance(tensors, (list, tuple)):
        return sum(map(count_bytes, tensors))
    return 0 if tensors is None else size_of(tensors)


def first_tensor(tensors: Any) -> Any:
    """Returns the first tensor in nested lists; None if there is none."""
    while isinstance(tensors, (list, tuple)):
        tensors = tensors[0] if tensors else None
    return tensors
