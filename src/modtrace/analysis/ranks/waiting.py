"""Tells which ranks wait for which: in what hangs, and in every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ...recording.meta import RUN_ENDED
from ...recording.protocols import RecordingData
from ..tables.collectives import read_collectives
from .overview import RanksOverview
from .stalls import Stall, find_stalls
from .stragglers import Straggler, find_straggler


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What ranks wait for."""

    collectives: int  # that were recorded, of all ranks
    bytes_written: int  # of the tensors that these filled
    wait_ns: int  # how long the program was seen to wait for them
    stalls: tuple[Stall, ...]  # empty if all ranks have closed their recordings
    straggler: Straggler | None


def read_waiting(ranks: Sequence[tuple[int, RecordingData]], overview: RanksOverview) -> Waiting:
    """Returns what ranks wait for, given with their numbers in ascending order."""
    collectives = read_collectives(ranks)
    rows = [row for of_rank in collectives.of_ranks.values() for row in of_rank]
    failed = {
        state.rank for state in overview.ranks if any(mark.startswith(RUN_ENDED) for mark in state.marks)
    }
    step_ns = median([state.step_ns for state in overview.ranks if state.step_ns > 0] or [0.0])
    return Waiting(
        collectives=len(rows),
        bytes_written=sum(row.bytes_written or 0 for row in rows),
        wait_ns=sum(row.wait_ns or 0 for row in rows),
        stalls=tuple(find_stalls(collectives, failed)),
        straggler=find_straggler(ranks, collectives, step_ns) if len(ranks) > 1 else None,
    )
