"""Finds the collectives to which some ranks of a run have not come, as when it hung or was killed."""

from collections.abc import Iterator, Set
from dataclasses import dataclass

from ...recording.protocols import UNKNOWN
from ..tables.collectives import MESSAGES, RECV, SEND, Collective, RankCollectives

#: A rank was seen to wait if it lived for this long without an answer. Each rank looks twice a second.
_WAITED_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A collective, or a message, to which not all ranks have come when their recordings ended."""

    name: str
    group: str
    seq_id: int
    came: tuple[int, ...]
    absent: tuple[int, ...]
    where: Collective  # it, on the lowest rank that was seen to wait
    #: What each absent rank did last in the group, of a message at all; None if it has done nothing.
    last: tuple[tuple[int, Collective | None], ...]


def find_stalls(collectives: RankCollectives, failed: Set[int]) -> list[Stall]:
    """Returns where ranks were seen to wait for others, that which waits for the longest first.

    Args:
        collectives: what ranks sent each other.
        failed: the ranks that an exception has ended, as when they have waited for too long.
    """
    seen = {rank: _last_seen(rows) for rank, rows in collectives.of_ranks.items()}
    found = [
        stall
        for stall in (*_find_in_groups(collectives), *_find_messages(collectives))
        if stall.where.rank in failed or seen[stall.where.rank] - stall.where.start_ns >= _WAITED_NS
    ]
    return sorted(found, key=lambda stall: stall.where.start_ns)


def _last_seen(rows: list[Collective]) -> int:
    """Returns when a process that was killed was last seen to live; 0 for another."""
    return max((row.start_ns for row in rows if row.name == UNKNOWN), default=0)


def _find_in_groups(collectives: RankCollectives) -> Iterator[Stall]:
    for group, members in collectives.members.items():
        rows = {
            rank: {
                row.seq_id: row
                for row in sorted(collectives.of_ranks[rank], key=lambda row: row.name != UNKNOWN)
                if row.group == group and row.name not in MESSAGES and row.seq_id is not None
            }
            for rank in members
            if rank in collectives.of_ranks  # else it was not recorded
        }
        last = {rank: max(of_rank, default=0) for rank, of_rank in rows.items()}
        least = min(last.values(), default=0)
        came = tuple(rank for rank, number in last.items() if number > least)
        absent = tuple(rank for rank, number in last.items() if number == least)
        where = next((row for rank in came if (row := rows[rank].get(least + 1)) is not None), None)
        if where is not None:
            yield Stall(
                name=where.name,
                group=group,
                seq_id=least + 1,
                came=came,
                absent=absent,
                where=where,
                last=tuple((rank, rows[rank].get(least)) for rank in absent),
            )


def _find_messages(collectives: RankCollectives) -> Iterator[Stall]:
    """Yields messages that were not sent, of each rank the first that it waits for."""
    for rank, rows in collectives.of_ranks.items():
        for row in rows:
            if row.name != RECV or row.end_ns is not None or row.peer not in collectives.of_ranks:
                continue
            of_peer = collectives.of_ranks[row.peer]
            sent = {one.seq_id for one in of_peer if one.name == SEND and one.peer == rank}
            if row.seq_id is not None and row.seq_id > max(filter(None, sent), default=0):
                last = next((one for one in reversed(of_peer) if one.name != UNKNOWN), None)
                yield Stall(
                    name=RECV,
                    group=row.group,
                    seq_id=row.seq_id,
                    came=(rank,),
                    absent=(row.peer,),
                    where=row,
                    last=((row.peer, last),),
                )
                break
