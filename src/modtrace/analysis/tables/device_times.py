"""Replaces the host times of calls and ops with the times at which a device worked on them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from .calls import Calls
from .chosen_step import ShownStep
from .columns import Column, column_of


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


def step_on_device(step: ShownStep | None, calls: Calls) -> ShownStep | None:
    """Returns the step from its first to its last device time, if it has ended and any device time is known."""
    if step is None or step.end_ns is None or not has_device_times(calls):
        return step
    known = _is_known(calls) & calls.in_step
    first_ns, last_ns = calls.device_start_ns[known].min(), calls.device_end_ns[known].max()
    return replace(step, start_ns=int(first_ns), end_ns=int(last_ns), overhead_ns=0)


def _is_known(calls: Calls) -> Column:
    known: Column = (calls.device_start_ns >= 0) & (calls.device_end_ns >= 0)
    return known


def durations_on_device(table: pa.Table) -> tuple[Column, Column] | None:
    """Returns the device time of each op of a step and whether it is known; None if no op has one."""
    start_ns, end_ns = column_of(table, "device_start_ns"), column_of(table, "device_end_ns")
    known = (start_ns >= 0) & (end_ns >= 0)
    return (np.where(known, np.maximum(end_ns - start_ns, 0), 0), known) if known.any() else None
