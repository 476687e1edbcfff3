"""Tells which ranks wait for which: in what hangs, and in every step."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ...recording.meta import RUN_ENDED
from ...recording.protocols import RecordingData
from ..tables.collectives import Collective, read_collectives
from .overview import RanksOverview
from .stalls import Mismatch, Stall, find_mismatch, find_stalls
from .stragglers import Straggler, find_straggler


@dataclass(frozen=True, kw_only=True)
class RankTraffic:
    """The collectives of a rank in a step: medians over the steps that have some."""

    rank: int
    collectives: float  # messages included
    bytes_written: float  # of the tensors that these fill
    wait_ns: float | None  # how long the program waits for them; None if none was seen to be waited for


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What ranks wait for."""

    traffic: tuple[RankTraffic, ...]  # of the ranks that have started any
    mismatch: Mismatch | None
    stalls: tuple[Stall, ...]
    straggler: Straggler | None


def read_waiting(ranks: Sequence[tuple[int, RecordingData]], overview: RanksOverview) -> Waiting:
    """Returns what ranks wait for, given with their numbers in ascending order."""
    collectives = read_collectives(ranks)
    has_failed = any(
        not state.is_closed or any(mark.startswith(RUN_ENDED) for mark in state.marks)
        for state in overview.ranks
    )
    step_ns = median([state.step_ns for state in overview.ranks if state.step_ns > 0] or [0.0])
    return Waiting(
        traffic=tuple(_sum_up(rank, rows) for rank, rows in collectives.of_ranks.items() if rows),
        mismatch=find_mismatch(collectives, has_failed=has_failed),
        stalls=tuple(find_stalls(collectives)),
        straggler=find_straggler(ranks, collectives, step_ns) if len(ranks) > 1 else None,
    )


def _sum_up(rank: int, rows: Sequence[Collective]) -> RankTraffic:
    of_steps = defaultdict(list)
    for row in rows:
        of_steps[row.step].append(row)
    waits = [
        sum(row.wait_ns or 0 for row in of_step)
        for of_step in of_steps.values()
        if any(row.wait_ns is not None for row in of_step)
    ]
    return RankTraffic(
        rank=rank,
        collectives=median(map(len, of_steps.values())),
        bytes_written=median(sum(row.bytes_written or 0 for row in of_step) for of_step in of_steps.values()),
        wait_ns=median(waits) if waits else None,
    )
