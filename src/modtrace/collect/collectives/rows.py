"""Holds collectives until they are written, and makes the columns of `collectives` of them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ...recording.arrow.arrays import Coded
from ...recording.protocols import TEXT_BYTES
from ...torch_internals.collectives import reduction_of, root_of
from ..log.segments import CallRef, Segment

#: More than the collectives in torch's log, which are 2,000 by default.
MOST_IN_LOG = 2**12

#: By what a called collective is found in torch's log: its number, or if that is not known its name and bytes.
CalledKey = int | tuple[str, int]

#: Numbers of called collectives, one row each, as in _called.h; -1 is not known, and a time of 0 has not come yet.
Numbers = npt.NDArray[np.int64]
WIDTH = 12
(
    SITE, GROUP, START_NS, END_NS, WAIT_NS, NUMBER, BYTES_READ, BYTES_WRITTEN, THREAD, PEER, PLACE, _KEPT_AS
) = range(WIDTH)  # fmt: skip


@dataclass(eq=False, slots=True)
class KnownGroup:
    """A process group of this process."""

    name: str
    ranks: tuple[int, ...]  # global ranks, by group rank; empty if they are not known
    shown_ranks: str | None
    index: int = 0  # among all of the recording
    is_numbered: bool = False  # whether its collectives have the same numbers on all ranks
    before: int = 0  # collectives before the recording, and messages where they count
    message_numbers: dict[tuple[str, int], int] = field(default_factory=dict)  # the last, by kind and peer
    #: The newest that were seen to be called and are yet to be found in torch's log.
    called_keys: deque[CalledKey] = field(default_factory=lambda: deque(maxlen=MOST_IN_LOG))

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


@dataclass(eq=False)
class CalledBatch:
    """Collectives of one step that Python code called, in the order in which they began."""

    first: int  # the number of the first one among all calls of the recording
    content: bytearray  # their numbers; those that are written into it are written to the recording
    places: Sequence[Segment | CallRef | None]  # where they were called, by their numbers `PLACE`
    options: Sequence[Any]  # those of torch, for each
    step: int = 0

    def __len__(self) -> int:
        return len(self.options)

    def starts_ns(self) -> list[int]:
        """Returns when they began."""
        starts_ns: list[int] = to_numbers(self.content)[:, START_NS].tolist()
        return starts_ns

    def end(self, call: int, wait_ns: int, end_ns: int) -> None:
        """Notes that the program has waited for a collective, if it is one of these."""
        row = call - self.first
        if 0 <= row < len(self):
            to_numbers(self.content)[row, [WAIT_NS, END_NS]] = wait_ns, end_ns

    def cut(self, start: int, stop: int) -> "CalledBatch":
        """Returns some of them. What the others refer to is not kept alive by these."""
        if (start, stop) == (0, len(self)):
            return self
        numbers = to_numbers(self.content)[start:stop]
        used = {*numbers[:, PLACE].tolist()}
        places = [place if at in used else None for at, place in enumerate(self.places)]
        return CalledBatch(self.first + start, bytearray(numbers.tobytes()), places, self.options[start:stop])


def to_numbers(content: bytes | bytearray) -> Numbers:
    """Returns numbers that C has noted, one row for each collective."""
    return np.frombuffer(content, np.int64).reshape(-1, WIDTH)


def make_called_columns(
    batches: Sequence[CalledBatch], sites: Sequence[CollectiveSite], groups: Sequence[KnownGroup | None]
) -> dict[str, Any]:
    """Returns the columns of collectives whose steps are known, and whose segments have ended.

    Args:
        batches: the collectives.
        sites: the sites, by their numbers `SITE`.
        groups: the process groups, by their numbers `GROUP`.
    """
    numbers = to_numbers(b"".join(batch.content for batch in batches))
    used, of_rows = np.unique(numbers[:, SITE], return_inverse=True)
    columns = _site_columns([sites[site] for site in used.tolist()], of_rows)
    columns["step"] = np.repeat([batch.step for batch in batches], [len(batch) for batch in batches])
    call_ids = np.concatenate([_find_call_ids(batch) for batch in batches])
    columns["call_id"] = _masked(call_ids, call_ids < 0)
    reductions: list[str | None] = [None] * len(numbers)
    peers = numbers[:, PEER].copy()
    for row, options in enumerate(chain.from_iterable(batch.options for batch in batches)):
        if options is not None:
            reductions[row] = reduction_of(options)
            root = root_of(options)
            group = None if root is None else groups[numbers[row, GROUP]]
            rank = None if group is None else group.global_rank(root)
            peers[row] = -1 if rank is None else rank
    columns["reduce_op"] = reductions
    columns["peer"] = _masked(peers, peers < 0)
    columns["seq_id"] = _masked(numbers[:, NUMBER], numbers[:, NUMBER] < 0)
    for name, at in (("end_ns", END_NS), ("wait_ns", WAIT_NS)):
        columns[name] = _masked(numbers[:, at], numbers[:, at] == 0)
    plain = (
        ("start_ns", START_NS), ("thread", THREAD), ("bytes_read", BYTES_READ), ("bytes_written", BYTES_WRITTEN)
    )  # fmt: skip
    return columns | {name: numbers[:, at] for name, at in plain}


def _find_call_ids(batch: CalledBatch) -> npt.NDArray[np.int64]:
    """Returns the id of each collective's call; -1 for none. Neighbouring ones have one place."""
    numbers = to_numbers(batch.content)
    found = np.full(len(numbers), -1)
    placed = np.flatnonzero(numbers[:, PLACE] >= 0)
    ends = np.searchsorted(numbers[placed, PLACE], np.arange(len(batch.places)), side="right")
    for place, rows in zip(batch.places, np.split(placed, ends), strict=False):
        if isinstance(place, CallRef):
            found[rows] = -1 if place.call_id is None else place.call_id
        elif place is not None:
            found[rows] = place.call_ids_at(numbers[rows, START_NS])
    return found


@dataclass(eq=False, slots=True)
class Row:
    """A collective that C++ code started, or the last number of a group, that is not written yet."""

    site: CollectiveSite
    start_ns: int
    seq_id: int | None
    bytes_read: int = 0
    bytes_written: int = 0
    call: CallRef | None = None
    end_ns: int | None = None
    step: int = 0
    is_done: bool = False  # whether torch's log has it as complete, without a time

    def numbers(self) -> tuple[int, ...]:
        """Returns its numbers for the ring."""
        seq_id, end_ns = -1 if self.seq_id is None else self.seq_id, self.end_ns or 0
        return self.start_ns, end_ns, seq_id, self.bytes_read, self.bytes_written, self.step, -1, -1


def make_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the columns of rows whose steps are known; calls are freed, which keep all surrounding calls alive."""
    codes: dict[CollectiveSite, int] = {}
    of_rows = np.array([codes.setdefault(row.site, len(codes)) for row in rows])
    columns = _site_columns([*codes], of_rows)
    columns["call_id"] = [None if row.call is None else row.call.call_id for row in rows]
    for row in rows:
        row.call = None
    numbers = ("step", "seq_id", "bytes_read", "bytes_written", "start_ns", "end_ns")
    return columns | {name: [getattr(row, name) for row in rows] for name in numbers}


def _site_columns(sites: Sequence[CollectiveSite], of_rows: npt.NDArray[Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: Coded([getattr(site, name) for site in sites], of_rows)
        for name in ("path", "phase", "name", "group", "ranks")
    }
    columns["dtype"] = Coded([_name_of(site.dtype) for site in sites], of_rows)
    return columns


def _masked(values: npt.NDArray[Any], is_missing: npt.NDArray[np.bool_]) -> Any:
    return np.ma.masked_array(values, is_missing)


def _name_of(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
