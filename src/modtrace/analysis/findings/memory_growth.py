"""Finds memory that grows from step to step."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from ..tables.columns import Column, column_of
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .names import format_size
from .needs import require_steps

#: The steps among which a trend is sought, spread over all; all pairs of them are compared.
_POINTS = 60

#: A trend needs as many steps, of which the first ones are left out: caches fill and allocators keep what they got.
_FEWEST = 12

_MB = 1e6


@check("memory-growth", about="memory that grows from step to step", needs="steps")
def MEMORY_GROWTH(run: SampledSteps, share: float = 0.02, resident_mb: float = 24) -> Iterator[Finding]:
    """Finds a trend that goes on to the last step.

    The slope is the median of the slopes of all pairs of steps (Theil 1950, Sen 1968), which outliers and a single jump
    leave as it is.

    Args:
        run: the recording.
        share: by how much memory has to grow over the recorded steps, as a share of what it was.
        resident_mb: ... and of a process by how many MB, as its allocator keeps what was freed.
    """
    steps = run.steps
    number = column_of(steps, "step").astype(np.float64)
    require_steps(len(number), _FEWEST, "")
    found = [
        growth
        for name, what, least in (
            ("device_bytes", "memory of tensors on the device", 1.0),
            ("resident_bytes", "memory of the process", resident_mb),
        )
        if (growth := _find_growth(number, column_of(steps, name), what, share, least)) is not None
    ]
    if not found and (column_of(steps, "resident_bytes") < 0).all():
        raise CannotCheck("the memory of the process was not recorded")
    yield from found


def _find_growth(number: Column, size: Column, what: str, share: float, least_mb: float) -> Finding | None:
    known = np.flatnonzero(size >= 0)
    late = known[len(known) // 4 :]
    if len(late) < _FEWEST * 3 // 4:
        return None
    chosen = late[np.unique(np.linspace(0, len(late) - 1, _POINTS).astype(np.int64))]
    slope = _slope(number[chosen], size[chosen])
    second = _slope(number[chosen[len(chosen) // 2 :]], size[chosen[len(chosen) // 2 :]])
    first, last = number[chosen[0]], number[chosen[-1]]
    grown = slope * (last - first)
    start = float(np.median(size[chosen[:3]]))
    if grown < max(share * start, least_mb * _MB) or second < slope / 3:
        return None
    end = float(np.median(size[chosen[-3:]]))
    return Finding(
        severity="warning",
        text=f"{what} grows by {format_size(slope)} a step: {format_size(start)} to {format_size(end)}",
        remedy="look for a list that keeps losses or outputs with their graphs (.item(), detach()), a state that is "
        "carried over steps, or a cache",
        evidence=(
            f"steps {int(first)} to {int(last)}; it still grows by {format_size(second)} a step at their end",
        ),
        rests_on=f"{len(chosen)} of {len(known)} steps",
        step=int(first),
    )


def _slope(x: Column, y: Column) -> float:
    """Returns the median of the slopes of all pairs of points."""
    one, other = np.array([*combinations(range(len(x)), 2)]).T
    return float(np.median((y[other] - y[one]) / (x[other] - x[one])))
