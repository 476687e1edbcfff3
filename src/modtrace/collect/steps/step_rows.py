"""Makes the rows of ended steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .call_rows import intervals_of
from .step import Step


def step_columns(steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the columns of `steps`.

    Call it before the values of the steps are freed, since it reads the overhead there.
    """
    columns = {
        "step": [step.number for step in steps],
        "kind": [step.kind for step in steps],
        "start_ns": [step.start_ns for step in steps],
        "end_ns": [step.end_ns for step in steps],
    }
    if any(step.values for step in steps):
        columns["overhead_ns"] = [_overhead_ns(step) for step in steps]
    return columns


def _overhead_ns(step: Step) -> int:
    """Returns the time spent measuring between the step's start and end, on all threads."""
    _, begin, end = intervals_of([step])
    within = np.minimum(end, step.end_ns) - np.maximum(begin, step.start_ns)
    return int(np.maximum(within, 0).sum())
