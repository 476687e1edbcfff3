"""Chooses the steps of which views show the medians, or the single step that they show."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...recording.options.schedule import to_step_range
from ...recording.protocols import RecordingData
from .chosen_step import ChosenSteps, StepSample, choose_step
from .columns import Column, column_of, find_rows
from .quartiles import find_medians, find_quartiles
from .sampled_steps import sample_steps

#: Of fewer steps no median is shown unless they are requested: of two it is no better than one of them.
_FEWEST_STEPS = 3


def choose_steps(
    data: RecordingData,
    step: int | None = None,
    steps: Any = None,
    *,
    tables: Sequence[str] = ("calls",),
) -> ChosenSteps:
    """Returns the requested step or steps, or else the newest comparable training steps.

    If there are no three such steps, it is the one that `choose_step` chooses.

    Args:
        data: the recording.
        step: the number of the step that is shown alone.
        steps: the range of the steps whose medians are shown, as `to_step_range` takes it.
        tables: the tables of which rows of all these steps are read, which limits their number.

    Raises:
        TypeError, ValueError: there are no such steps, or both `step` and `steps` are given.
    """
    run, numbers = sample_steps(data), np.empty(0, np.int64)
    if step is None:
        numbers = run.limit(run.numbers if steps is None else run.numbers_in(to_step_range(steps)), *tables)
    elif steps is not None:
        raise ValueError(f"steps={steps!r}: a single step is requested too, step={step!r}; give one of them")
    if len(numbers) < (_FEWEST_STEPS if steps is None else 2):
        only = int(numbers[0]) if steps is not None and len(numbers) else step
        # A recording that was cut off may have lost all rows of a step except those of ops.
        also = [only for name in tables if only is not None and only in column_of(data.table(name), "step")]
        return ChosenSteps.single(choose_step(data.table("steps"), data.table("calls"), only, also=also))
    return take_steps(data, numbers)


def take_steps(data: RecordingData, numbers: Column) -> ChosenSteps:
    """Returns several steps that have ended; their numbers ascend."""
    run = sample_steps(data)
    rows = find_rows(column_of(run.steps, "step"), numbers)
    start_ns, end_ns, overhead_ns = (
        column_of(run.steps, name)[rows] for name in ("start_ns", "end_ns", "overhead_ns")
    )
    last = choose_step(data.table("steps"), data.table("calls"), int(numbers[-1]))
    chosen = ChosenSteps(
        shown=last,
        numbers=numbers,
        start_ns=start_ns,
        end_ns=end_ns,
        overhead_ns=np.maximum(overhead_ns, 0),
    )
    known = chosen.ended[None]
    [duration_ns] = find_quartiles(chosen.duration_ns[None], known)
    [measuring_ns] = find_medians(chosen.overhead_ns[None], known).tolist()
    sample = StepSample(
        steps=tuple(numbers.tolist()), duration_ns=duration_ns, overhead_ns=round(measuring_ns)
    )
    return replace(chosen, shown=None if last is None else replace(last, sample=sample))
