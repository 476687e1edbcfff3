"""Tells which ranks of a run were recorded, how far each came, and how long its steps took."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.protocols import RecordingData
from ..tables.columns import column_of


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank of a run."""

    rank: int
    attempt: int  # how often it was restarted
    steps: int
    last_step: int | None  # None if it has no complete step
    step_ns: float  # the median time of its steps, without what modtrace spent measuring; NaN if unknown
    is_closed: bool  # False: the process ended without closing the recording, or still runs
    marks: tuple[str, ...]  # what is missing from its recording


@dataclass(frozen=True, kw_only=True)
class RanksOverview:
    """The ranks of a run."""

    world_size: int
    ranks: tuple[RankState, ...]
    missing: tuple[int, ...]  # ranks that have no folder
    #: For each range of steps that some ranks lack: its first and its last step, and those ranks.
    lacking: tuple[tuple[int, int, tuple[int, ...]], ...]


def read_overview(ranks: Sequence[tuple[int, RecordingData]]) -> RanksOverview:
    """Returns what is known of the ranks, given with their numbers in ascending order."""
    states, steps = [], []
    for rank, data in ranks:
        table, meta = data.table("steps"), data.meta
        step = column_of(table, "step")
        ended = to_numpy(table["end_ns"].is_valid())
        took = (
            column_of(table, "end_ns")
            - column_of(table, "start_ns")
            - np.maximum(column_of(table, "overhead_ns"), 0)
        )
        steps.append(set(step.tolist()))
        states.append(
            RankState(
                rank=rank,
                attempt=meta.attempt,
                steps=len(step),
                last_step=int(step.max()) if len(step) else None,
                step_ns=float(np.median(took[ended])) if ended.any() else np.nan,
                is_closed=not any(mark.startswith("not closed") for mark in meta.marks),
                marks=meta.marks,
            )
        )
    world_size = max([data.meta.world_size for _, data in ranks], default=0)
    numbers = [rank for rank, _ in ranks]
    return RanksOverview(
        world_size=world_size,
        ranks=tuple(states),
        missing=tuple(sorted({*range(world_size)}.difference(numbers))),
        lacking=tuple(_find_lacking(numbers, steps)),
    )


def _find_lacking(ranks: Sequence[int], steps: Sequence[set[int]]) -> list[tuple[int, int, tuple[int, ...]]]:
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for step in sorted(set().union(*steps)):
        without = tuple(rank for rank, there in zip(ranks, steps, strict=True) if step not in there)
        if found and found[-1][2] == without and found[-1][1] == step - 1:
            found[-1] = (found[-1][0], step, without)
        else:
            found.append((step, step, without))
    return [lacking for lacking in found if lacking[2]]
