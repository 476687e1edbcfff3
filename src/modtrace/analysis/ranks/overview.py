"""Tells which ranks of a run were recorded, how far each came, and how long its steps took."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.protocols import RecordingData
from ..tables.columns import column_of
from ..tables.rank_values import TRAIN


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank of a run."""

    rank: int
    attempt: int  # how often it was restarted
    steps: int
    last_step: int | None  # None if it has no complete step
    #: The median time of its training steps, or of all if there are none, without that of measuring; NaN if unknown.
    step_ns: float
    seed: int | None  # of torch, that was set last; None if unknown
    is_closed: bool  # False: the process ended without closing the recording, or still runs
    marks: tuple[str, ...]  # what is missing from its recording


@dataclass(frozen=True, kw_only=True)
class RanksOverview:
    """The ranks of a run."""

    world_size: int
    ranks: tuple[RankState, ...]
    missing: tuple[int, ...]  # ranks that have no folder
    #: The ranks that have recorded fewer training steps than another, and how many fewer.
    lacking: tuple[tuple[int, int], ...]


def read_overview(ranks: Sequence[tuple[int, RecordingData]], missing: Sequence[int] = ()) -> RanksOverview:
    """Returns what is known of the ranks, given with their numbers in ascending order; `missing` have no folder."""
    states, trained = [], []
    for rank, data in ranks:
        table, meta = data.table("steps"), data.meta
        step, kind = column_of(table, "step"), table["kind"].to_pylist()
        overhead_ns = np.maximum(column_of(table, "overhead_ns"), 0)
        took_ns = column_of(table, "end_ns") - column_of(table, "start_ns") - overhead_ns
        is_training = np.array([one == TRAIN for one in kind], bool)
        shown = took_ns[is_training] if is_training.any() else took_ns
        trained.append(int(is_training.sum()))
        states.append(
            RankState(
                rank=rank,
                attempt=meta.attempt,
                steps=len(step),
                last_step=int(step.max()) if len(step) else None,
                step_ns=float(np.median(shown)) if len(shown) else np.nan,
                seed=(meta.flags or {}).get("seed"),
                is_closed=not any(mark.startswith("not closed") for mark in meta.marks),
                marks=meta.marks,
            )
        )
    most = max(trained, default=0)
    return RanksOverview(
        world_size=max([data.meta.world_size for _, data in ranks], default=0),
        ranks=tuple(states),
        missing=tuple(missing),
        lacking=tuple(
            (number, most - own) for (number, _), own in zip(ranks, trained, strict=True) if own < most
        ),
    )
