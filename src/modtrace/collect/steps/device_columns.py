"""Adds device times to the rows of calls and ops."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ..log.device_times import DeviceEvent, times_between
from ..log.nesting import Ints, depths_of
from .step import Step

#: By id of a call or op, the device events at its beginning and end.
EventPairs = dict[int, tuple[DeviceEvent | None, DeviceEvent | None]]

_NONE = (None, None)


def device_events(step: Step) -> Iterator[DeviceEvent]:
    """Yields the events that were recorded for the calls and ops of a step."""
    for segment in step.segments:
        if segment.device_events is not None:
            yield from segment.device_events.by_event.values()
    for backward in step.backwards:
        yield from filter(None, chain(backward.calls.began, backward.calls.ended))
    yield from filter(None, chain.from_iterable(step.optimizer_events))
    for batch in step.ops:
        yield from filter(None, chain.from_iterable(batch.device_events.values()))


def count_device_events(step: Step) -> int:
    """Returns roughly how many events were recorded for a step."""
    segments = sum(
        len(segment.device_events.by_event) for segment in step.segments if segment.device_events is not None
    )
    backwards = sum(len(backward.calls.began) for backward in step.backwards)
    return segments + backwards + 2 * sum(len(batch.device_events) for batch in step.ops)


def add_device_times(
    batches: Iterable[dict[str, Any]], steps: Sequence[Step], optimizer_ids: Sequence[int]
) -> None:
    """Adds the columns `device_start_ns` and `device_end_ns` to rows of calls, if events were recorded for them.

    A call lasts at least as long as those inside it, which may run on other streams or devices.
    """
    events = _events_of_calls(steps, optimizer_ids)
    for columns in batches:
        times = find_times(columns["call_id"], events)
        if times is not None:
            _cover_inner(times, _parents(columns))
            add_time_columns(columns, times)


def find_times(ids: Ints, events: Mapping[int, Any]) -> npt.NDArray[np.float64] | None:
    """Returns `[2, rows]`: the device times at which each row began and ended; None if no event was recorded."""
    pairs = [events.get(number, _NONE) for number in ids.tolist()]
    if all(pair is _NONE for pair in pairs):
        return None
    return times_between([began for began, _ in pairs], [ended for _, ended in pairs])


def add_time_columns(columns: dict[str, Any], times: npt.NDArray[np.float64]) -> None:
    """Adds the columns of device times; null where a time is not known."""
    for name, column in zip(("device_start_ns", "device_end_ns"), times, strict=True):
        unknown = np.isnan(column)
        columns[name] = np.ma.masked_array(np.rint(np.where(unknown, 0, column)).astype(np.int64), unknown)


def _events_of_calls(steps: Sequence[Step], optimizer_ids: Sequence[int]) -> EventPairs:
    found: EventPairs = {}
    for step in steps:
        for segment in step.segments:
            if segment.device_events is not None and segment.first_id is not None:
                by_event, structure = segment.device_events.by_event, segment.structure(keep=False)
                spans = zip(structure.enter_event.tolist(), structure.exit_event.tolist(), strict=True)
                for number, (enter, leave) in enumerate(spans, segment.first_id):
                    found[number] = by_event.get(enter), by_event.get(leave)
        for backward in step.backwards:
            calls = backward.calls
            found.update(enumerate(zip(calls.began, calls.ended, strict=True), backward.first_id))
    of_optimizers = chain.from_iterable(step.optimizer_events for step in steps)
    found.update(zip(optimizer_ids, of_optimizers, strict=False))
    return found


def _parents(columns: Mapping[str, Any]) -> Ints:
    """Returns the row of each call's parent in the same batch; -1 if there is none."""
    rows = {number: row for row, number in enumerate(columns["call_id"].tolist())}
    parents = np.ma.filled(columns.get("parent_call_id", np.full(len(rows), -1)), -1)
    return np.array([rows.get(number, -1) for number in parents.tolist()], np.int64)


def _cover_inner(times: npt.NDArray[np.float64], parent: Ints) -> None:
    """Extends each call's times to include the calls inside it; unknown times stay unknown."""
    unknown = np.isnan(times)
    depth = depths_of(parent)
    for level in range(int(depth.max(initial=0)), 0, -1):
        rows = np.flatnonzero(depth == level)
        np.fmin.at(times[0], parent[rows], times[0, rows])
        np.fmax.at(times[1], parent[rows], times[1, rows])
    times[unknown] = np.nan
