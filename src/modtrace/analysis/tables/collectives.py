"""Reads the collectives of ranks, and says which of them are one."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...recording.protocols import RecordingData
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
    members: dict[
        str, tuple[int, ...]
    ]  # the global ranks of each group; of one that is not known, those that used it


def read_collectives(ranks: Sequence[tuple[int, RecordingData]]) -> RankCollectives:
    """Returns the newest collectives of ranks, given with their numbers."""
    of_ranks: dict[int, list[Collective]] = {}
    members: dict[str, tuple[int, ...]] = {}
    users: dict[str, set[int]] = {}
    for rank, data in ranks:
        table = data.table("collectives")
        table = table.slice(max(table.num_rows - _MOST_ROWS, 0))
        of_ranks[rank] = rows = [
            Collective(rank=rank, **row) for row in table.select([*_COLUMNS]).to_pylist()
        ]
        rows.sort(key=lambda row: row.start_ns)
        shown = table.select(["group", "ranks"]).to_pylist()
        members |= {row["group"]: numbers_of(row["ranks"]) for row in shown if row["ranks"]}
        for row in rows:
            users.setdefault(row.group, set()).add(rank)
    members = {group: members.get(group, tuple(sorted(found))) for group, found in users.items()}
    return RankCollectives(of_ranks=of_ranks, members=members)
