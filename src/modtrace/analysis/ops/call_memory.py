"""What the calls of a step allocate, by module and phase."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...recording.phase import PHASES
from ..step.calls import Column, Rows
from ..step.ops import PlacedCalls


@dataclass(frozen=True, kw_only=True)
class CallMemory:
    """The calls of a module in one phase, with what runs inside them."""

    calls: int = 0
    allocated_bytes: int | None = None  # by the call that allocates most; None: not known of one of them
    peak_bytes: int | None = None  # of the call with the highest peak; None: not known of one of them


NO_CALL_MEMORY = CallMemory()


def find_call_memory(placed: PlacedCalls) -> Mapping[tuple[int, str], CallMemory]:
    """The memory of the step's calls, by where they stand and phase."""
    rows = np.flatnonzero(placed.calls.in_step)
    keys = np.stack([placed.where[rows], placed.calls.phase[rows]])
    distinct, group, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    allocated = _find_largest(placed.column("allocated_bytes")[rows], group, len(counts))
    peak = _find_largest(placed.column("peak_bytes")[rows], group, len(counts))
    return {
        (where, PHASES[phase]): CallMemory(
            calls=int(counts[at]), allocated_bytes=allocated[at], peak_bytes=peak[at]
        )
        for at, (where, phase) in enumerate(distinct.T.tolist())
    }


def _find_largest(values: Column, group: Rows, groups: int) -> list[int | None]:
    """The largest value of each group; None where one is -1, which is not known."""
    largest, smallest = np.full(groups, -1, np.int64), np.full(groups, np.iinfo(np.int64).max)
    np.maximum.at(largest, group, values)
    np.minimum.at(smallest, group, values)
    return [None if low < 0 else high for low, high in zip(smallest.tolist(), largest.tolist(), strict=True)]
