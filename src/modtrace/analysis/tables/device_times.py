"""Replaces the host times of calls and ops with the times at which a device worked on them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from .calls import Calls
from .chosen_step import ChosenSteps
from .columns import Column, column_of, find_rows


def has_device_times(calls: Calls) -> bool:
    """Returns whether device times are known for any call of the step."""
    return bool((_is_known(calls) & calls.in_step).any())


def on_device(calls: Calls) -> Calls:
    """Returns the calls with device times, if any are known; a call without them counts as unfinished.

    Measuring on a device happens after a call has ended there, so no overhead is subtracted.
    """
    if not has_device_times(calls):
        return calls
    known = _is_known(calls)
    return replace(
        calls,
        start_ns=np.where(known, calls.device_start_ns, calls.start_ns),
        duration_ns=np.where(known, np.maximum(calls.device_end_ns - calls.device_start_ns, 0), 0),
        overhead_ns=np.zeros(len(calls), np.int64),
        ended=known,
    )


def steps_on_device(steps: ChosenSteps, calls: Calls) -> ChosenSteps:
    """Returns the steps from their first to their last device times, if they have ended and any device time is known.

    Of several steps, the times of one without device times are not known.
    """
    if not has_device_times(calls) or not steps.ended.any():
        return steps
    rows = np.flatnonzero(_is_known(calls) & calls.in_step)
    step = find_rows(steps.numbers, calls.column("step")[rows])
    start_ns = np.full(len(steps.numbers), np.iinfo(np.int64).max)
    end_ns = np.full(len(steps.numbers), -1, np.int64)
    np.minimum.at(start_ns, step, calls.device_start_ns[rows])
    np.maximum.at(end_ns, step, calls.device_end_ns[rows])
    is_known = steps.ended & (end_ns >= 0)
    return replace(
        steps,
        start_ns=np.where(is_known, start_ns, -1),
        end_ns=np.where(is_known, end_ns, -1),
        overhead_ns=np.zeros(len(steps.numbers), np.int64),
    )


def _is_known(calls: Calls) -> Column:
    known: Column = (calls.device_start_ns >= 0) & (calls.device_end_ns >= 0)
    return known


def durations_on_device(table: pa.Table) -> tuple[Column, Column] | None:
    """Returns the device time of each op of a step and whether it is known; None if no op has one."""
    start_ns, end_ns = column_of(table, "device_start_ns"), column_of(table, "device_end_ns")
    known = (start_ns >= 0) & (end_ns >= 0)
    return (np.where(known, np.maximum(end_ns - start_ns, 0), 0), known) if known.any() else None
