"""Finds code that torch.compile compiles again and again."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from ...recording.suggestions import count_of
from ..tables.columns import column_of
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import Finding


@check("recompiled", about="code that torch.compile compiles again after the first steps")
def RECOMPILED(run: SampledSteps, steps: float = 3, warm_up: float = 2) -> Iterator[Finding]:
    """Finds training steps that waited for a compilation of code that had been compiled before.

    Args:
        run: the recording.
        steps: in how many steps at least. One is usual: where a size changes for the first time, torch.compile compiles
            code for all sizes.
        warm_up: the first training steps, which do not count.
    """
    counted = run.training[int(warm_up) :]
    rows = run.find("compilations", step=counted).to_pylist()
    again = [row for row in rows if row["failed_guards"]]
    held_up = sorted({row["step"] for row in again})
    if len(held_up) < steps:
        return
    took_ns = sum(row["end_ns"] - row["start_ns"] for row in again if row["end_ns"] is not None)
    function, _ = Counter(row["function"] or "" for row in again).most_common(1)[0]
    reasons = Counter(row["failed_guards"][0].partition(": ")[2] for row in again)
    steps_ns = column_of(run.steps, "end_ns") - column_of(run.steps, "start_ns")
    of_counted = int(steps_ns[np.isin(column_of(run.steps, "step"), counted)].sum())
    held = f"{len(held_up)} of {count_of(len(counted), 'step')}"
    yield Finding(
        severity="warning",
        text=f"torch.compile compiles again in {held}, first in step {held_up[0]}: "
        f"{100 * took_ns / max(of_counted, 1):.0f} % of their time",
        remedy="keep shapes and the numbers that code reads the same: pad batches, mark_dynamic(), tensors in place of "
        "Python numbers; modtrace show names every reason",
        evidence=(
            f"mostly {function}",
            *(f"{count} x because this failed: {reason}" for reason, count in reasons.most_common(2)),
        ),
        rests_on=count_of(len(counted), "training step"),
        step=held_up[0],
    )
