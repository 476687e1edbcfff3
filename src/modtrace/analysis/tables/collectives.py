"""Reads the collectives of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from time import perf_counter_ns

from ...recording.protocols import LAST, RecordingData
from ...recording.suggestions import numbers_of

#: The names of messages; all others are collectives, in which every rank of the group takes part.
MESSAGES = SEND, RECV = "send", "recv"

#: Collectives that return on no rank before all ranks have come.
SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})


#: The newest rows of a rank that are read; what ranks wait for shows in them.
_MOST_ROWS = 10_000


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A rank's side of a collective or message; a row of `collectives`."""

    rank: int
    step: int
    call_id: int | None
    path: str | None
    phase: str | None
    name: str
    group: str
    seq_id: int | None
    peer: int | None
    dtype: str | None
    bytes_read: int | None
    bytes_written: int | None
    start_ns: int
    end_ns: int | None
    wait_ns: int | None


_COLUMNS = (
    "step", "call_id", "path", "phase", "name", "group", "seq_id", "peer", "dtype", "bytes_read", "bytes_written",
    "start_ns", "end_ns", "wait_ns",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RankCollectives:
    """The collectives of several ranks."""

    of_ranks: dict[int, list[Collective]]  # by rank, in the order in which they began
    #: By rank and group, the number of its last collective, from when it was first seen to when it was last seen.
    last: dict[int, dict[str, Collective]]
    members: dict[
        str, tuple[int, ...]
    ]  # the global ranks of each group; of one that is not known, those that used it
    read_ns: int  # how long reading took: the first table may be older than the last by this

    @cached_property
    def numbered(self) -> dict[tuple[int, str], dict[int, Collective]]:
        """By rank and group, the collectives by number, without messages."""
        found: dict[tuple[int, str], dict[int, Collective]] = {}
        for rank, rows in self.of_ranks.items():
            for row in rows:
                if row.name not in MESSAGES and row.seq_id is not None:
                    found.setdefault((rank, row.group), {})[row.seq_id] = row
        return found


def read_collectives(ranks: Sequence[tuple[int, RecordingData]]) -> RankCollectives:
    """Returns the newest collectives of ranks, given with their numbers."""
    of_ranks: dict[int, list[Collective]] = {}
    last: dict[int, dict[str, Collective]] = {}
    users: dict[str, set[int]] = {}
    shown: dict[str, str] = {}
    began_ns = perf_counter_ns()
    tables = [(rank, data.table("collectives")) for rank, data in ranks]
    read_ns = perf_counter_ns() - began_ns
    for rank, table in tables:
        newest = table.slice(max(table.num_rows - _MOST_ROWS, 0)).select([*_COLUMNS, "ranks"]).to_pylist()
        shown |= {row["group"]: row["ranks"] for row in newest if row["ranks"]}
        rows = [Collective(rank=rank, **{name: row[name] for name in _COLUMNS}) for row in newest]
        last[rank] = {row.group: row for row in rows if row.name == LAST}
        of_ranks[rank] = sorted((row for row in rows if row.name != LAST), key=attrgetter("start_ns"))
        for row in rows:
            users.setdefault(row.group, set()).add(rank)
    members = {
        group: numbers_of(shown[group]) if group in shown else tuple(sorted(found))
        for group, found in users.items()
    }
    return RankCollectives(of_ranks=of_ranks, last=last, members=members, read_ns=read_ns)
