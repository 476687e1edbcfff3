"""Says how much of a recording goes into a report, so that its file does not become too large."""

from dataclasses import dataclass

import numpy as np

from ..tables.columns import Column

#: Of each large table, the part of the file that it may take, and the bytes of one row there, compressed: measured on a
#: GPT with ops, where `nodes` counts the edges of a node too. The parts are more than one together, because hardly a
#: recording has much of everything; where it has, smaller limits are tried.
_ROOM = {"nodes": (0.6, 20), "spans": (0.6, 12), "values": (0.9, 2.5), "histograms": (0.3, 30)}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many rows the large tables may have."""

    nodes: int
    spans: int
    values: int  # numbers: sites times steps times statistics
    histograms: int

    @classmethod
    def of(cls, size_bytes: float) -> "Limits":
        """Returns the limits for a file of this size."""
        return cls(**{name: int(size_bytes * part / row) for name, (part, row) in _ROOM.items()})


def thin(steps: Column, rows_of_step: float, most: int, kept: int | None) -> Column:
    """Returns evenly chosen steps that have at most `most` rows together, and `kept`.

    Args:
        steps: the numbers of the steps.
        rows_of_step: the rows that each step has.
        most: how many rows there may be.
        kept: the number of a step.
    """
    room = min(len(steps), int(most / max(rows_of_step, 1e-9)))
    is_shown = steps == kept
    if len(steps):
        is_shown[np.linspace(0, len(steps) - 1, max(room, 1)).round().astype(int)] = True
    found: Column = steps[is_shown]
    return found


def choose_window(steps: Column, rows: Column, most: int, kept: int | None) -> tuple[int, int] | None:
    """Returns the first and the last of the steps around `kept` with at most `most` rows together; None for no step.

    Args:
        steps: the numbers of the steps.
        rows: how many rows each has.
        most: how many rows there may be.
        kept: the number of the step that is included first.
    """
    found = np.flatnonzero(steps == kept)
    if not len(found) or rows[found[0]] > most:
        return None
    first = last = int(found[0])
    taken = int(rows[first])
    while True:
        before = first > 0 and taken + rows[first - 1] <= most
        if before:
            first -= 1
            taken += int(rows[first])
        after = last + 1 < len(steps) and taken + rows[last + 1] <= most
        if after:
            last += 1
            taken += int(rows[last])
        if not before and not after:
            return int(steps[first]), int(steps[last])
