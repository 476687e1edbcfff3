"""Puts the times of a device in place of those at which the host has issued its work."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from .calls import Calls
from .chosen_step import ShownStep
from .columns import Column, column_of


def has_device_times(calls: Calls) -> bool:
    """Returns whether it is known of a call of the step when a device worked on it."""
    return bool((_is_known(calls) & calls.in_step).any())


def on_device(calls: Calls) -> Calls:
    """Returns the calls with the times of devices, if any is known; a call without such times has not ended.

    A device measures values after a call has ended, so no overhead is taken off.
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
    """Returns a step that lasts from the first to the last time of a device in it, if any is known and it has ended."""
    if step is None or step.end_ns is None or not has_device_times(calls):
        return step
    known = _is_known(calls) & calls.in_step
    first_ns, last_ns = calls.device_start_ns[known].min(), calls.device_end_ns[known].max()
    return replace(step, start_ns=int(first_ns), end_ns=int(last_ns), overhead_ns=0)


def _is_known(calls: Calls) -> Column:
    known: Column = (calls.device_start_ns >= 0) & (calls.device_end_ns >= 0)
    return known


def durations_on_device(table: pa.Table) -> tuple[Column, Column] | None:
    """Returns for the ops of a step how long a device worked on each, and whether that is known; None if of none."""
    start_ns, end_ns = column_of(table, "device_start_ns"), column_of(table, "device_end_ns")
    known = (start_ns >= 0) & (end_ns >= 0)
    return (np.where(known, np.maximum(end_ns - start_ns, 0), 0), known) if known.any() else None
