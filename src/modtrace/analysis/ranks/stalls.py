"""Finds the collectives to which some ranks of a run have not come, as when it hung or was killed."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...recording.protocols import LAST
from ..tables.collectives import RECV, SEND, Collective, RankCollectives

#: A rank has been at a collective in vain if it lived for this long since: two looks of `collect/collectives`, so that
#: a rank that has come has been seen there.
_IN_VAIN_NS = 1_000_000_000

#: Collectives for which all ranks give tensors of one size and dtype.
_OF_EQUAL_SIZE = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A collective, or a message, to which not all ranks have come when their recordings ended."""

    name: str  # `last` where only its number is known
    group: str
    seq_id: int
    came: tuple[int, ...]
    absent: tuple[int, ...]
    where: Collective  # its row on a rank that was there in vain
    in_vain_ns: int  # how long that rank was seen to live since
    #: What each absent rank did last in the group, or for a message in any group; None if it has done nothing.
    last: tuple[tuple[int, Collective | None], ...]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Ranks that call different collectives of a group under one number, or with tensors of other sizes."""

    group: str
    seq_id: int
    calls: tuple[Collective, ...]  # one of each kind, with the lowest rank that called it
    ranks: tuple[tuple[int, ...], ...]  # for each of these, the ranks that called it


def find_stalls(collectives: RankCollectives) -> list[Stall]:
    """Returns where ranks were in vain, first those for ranks that are not themselves at another collective in vain."""
    found = [*_find_in_groups(collectives), *_find_messages(collectives)]
    waiting = {rank for stall in found for rank in stall.came}
    return sorted(found, key=lambda stall: (waiting.issuperset(stall.absent), -stall.in_vain_ns))


def find_mismatch(collectives: RankCollectives, *, has_failed: bool) -> Mismatch | None:
    """Returns the first collective that is not the same on all ranks; None if there is none.

    Args:
        collectives: what ranks sent each other.
        has_failed: the run did not end well, so that sizes are compared, too.
    """
    found = []
    for group, members in collectives.members.items():
        by_number: dict[int, dict[int, Collective]] = {}
        for rank in members:
            for number, row in collectives.numbered.get((rank, group), {}).items():
                by_number.setdefault(number, {})[rank] = row
        for number, rows in sorted(by_number.items()):
            kinds: dict[object, list[int]] = {}
            for rank, row in rows.items():
                kinds.setdefault(_kind(row, with_size=has_failed), []).append(rank)
            if len(kinds) > 1:
                calls = tuple(rows[ranks[0]] for ranks in kinds.values())
                ranks = tuple(tuple(ranks) for ranks in kinds.values())
                found.append(Mismatch(group=group, seq_id=number, calls=calls, ranks=ranks))
                break
    return min(found, key=lambda one: one.calls[0].start_ns, default=None)


def _kind(row: Collective, *, with_size: bool) -> object:
    if with_size and row.name in _OF_EQUAL_SIZE:
        return row.name, row.dtype, row.bytes_read
    return row.name


def _in_vain(row: Collective, collectives: RankCollectives) -> int:
    """Returns how long the rank was seen to live since it came to a collective; 0 if too short."""
    seen_ns = max((last.end_ns or 0 for last in collectives.last[row.rank].values()), default=0)
    in_vain_ns = seen_ns - row.start_ns
    return 0 if in_vain_ns < _IN_VAIN_NS + collectives.read_ns else in_vain_ns


def _find_in_groups(collectives: RankCollectives) -> Iterator[Stall]:
    for group, members in collectives.members.items():
        # Where a rank's last number is not known, it may have come.
        known = [rank for rank in members if collectives.last.get(rank)]
        rows = {rank: dict(collectives.numbered.get((rank, group), {})) for rank in known}
        for rank in known:
            last = collectives.last[rank].get(group)
            if last is not None and last.seq_id is not None:
                rows[rank].setdefault(last.seq_id, last)
        numbers = {rank: max(of_rank, default=0) for rank, of_rank in rows.items()}
        least = min(numbers.values(), default=0)
        candidates = []
        for of_rank in rows.values():
            ahead = [row for number, row in sorted(of_rank.items()) if number > least]
            first = next((row for row in ahead if row.end_ns is None or row.name == LAST), None)
            if first is not None and (in_vain_ns := _in_vain(first, collectives)):
                candidates.append((first, in_vain_ns))
        if not candidates:
            continue
        where, in_vain_ns = min(candidates, key=lambda one: (one[0].seq_id or 0, one[0].rank))
        number = where.seq_id or 0
        if where.name == LAST:  # what came before it is not known either
            number = least + 1
        absent = tuple(rank for rank in known if numbers[rank] == least)
        yield Stall(
            name=where.name,
            group=group,
            seq_id=number,
            came=tuple(rank for rank in known if numbers[rank] >= number),
            absent=absent,
            where=where,
            in_vain_ns=in_vain_ns,
            last=tuple((rank, rows[rank].get(least) if least else None) for rank in absent),
        )


def _find_messages(collectives: RankCollectives) -> Iterator[Stall]:
    """Yields messages that were not sent, of each rank the first that it waits for."""
    sent: dict[tuple[int, int | None, str], int] = {}  # the last number, by sender, receiver and group
    for rank, rows in collectives.of_ranks.items():
        for row in rows:
            if row.name == SEND and row.seq_id is not None:
                sent[rank, row.peer, row.group] = row.seq_id
    for rank, rows in collectives.of_ranks.items():
        for row in rows:
            sender = row.peer
            if row.end_ns is not None:
                continue
            # What a rank has sent may not be known where its last number is not.
            if row.name != RECV or sender is None or row.seq_id is None or not collectives.last.get(sender):
                continue
            in_vain_ns = _in_vain(row, collectives)
            if row.seq_id <= sent.get((sender, rank, row.group), 0) or not in_vain_ns:
                continue
            yield Stall(
                name=RECV,
                group=row.group,
                seq_id=row.seq_id,
                came=(rank,),
                absent=(sender,),
                where=row,
                in_vain_ns=in_vain_ns,
                last=((sender, next(reversed(collectives.of_ranks[sender]), None)),),
            )
            break
