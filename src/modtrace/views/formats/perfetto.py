"""Writes a timeline in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open."""

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

import numpy as np

from ...analysis.timeline.arrange import SPAN_KINDS, Lane
from ...analysis.timeline.spans import Detail
from ...analysis.timeline.timeline import FLOW_KINDS, Timeline
from ..common.headline import NO_DEVICE_TIMES
from ..common.numbers import render_compact
from ..common.whole_file import write_pieces

_FIRST_TID = 1  # viewers treat 0 as the idle thread of the system
_ROWS_AT_ONCE = 4096
_SEPARATOR = ",\n"


def describe_missing(timeline: Timeline) -> str | None:
    """Returns a text on times that are missing, of backward calls or of devices; None if none are."""
    parts = [
        _NO_BACKWARD if timeline.lacks_backward else "",
        f"{NO_DEVICE_TIMES}." if timeline.lacks_device_times else "",
    ]
    return " ".join(filter(None, parts)) or None


_NO_BACKWARD = (
    "no backward calls are shown: when they began and ended was not recorded. "
    "Record with backward_times=True or ops=True (modtrace record --backward-times or --ops)."
)


def write_perfetto(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes the trace to a file, one part at a time. If writing fails, an existing file is unchanged.

    Raises:
        ModtraceError: the file cannot be written.
    """
    write_pieces(iterate_perfetto(timeline), path)


def count_events(timeline: Timeline) -> int:
    """Returns the number of events in the trace."""
    return len(_metadata(timeline)) + len(timeline.spans) + 2 * len(timeline.flows)


def iterate_perfetto(timeline: Timeline) -> Iterator[str]:
    """Yields the text of the trace in pieces."""
    yield f'{{"displayTimeUnit":"ns",\n"otherData":{render_compact(_other_data(timeline))},\n"traceEvents":[\n'
    yield _SEPARATOR.join(render_compact(event) for event in _metadata(timeline))
    writer = _SpanWriter(timeline)
    for first in range(0, len(timeline.spans), _ROWS_AT_ONCE):
        yield _SEPARATOR + _SEPARATOR.join(writer.write(first, first + _ROWS_AT_ONCE))
    yield "\n]}\n"


def _other_data(timeline: Timeline) -> dict[str, Any]:
    start_ns = timeline.start_unix_ns
    told = {
        "tool": "modtrace",
        "command": shlex.join(timeline.command),
        "run_id": timeline.run_id,
        "start": None if start_ns is None else _to_wall_clock(start_ns),
        "rank": timeline.rank,
        "world_size": timeline.world_size,
        "marks": list(timeline.marks),
        "missing": describe_missing(timeline),
    }
    return {name: value for name, value in told.items() if value not in (None, "", [])}


def _to_wall_clock(unix_ns: int) -> str:
    """Returns a time as ISO 8601 in UTC, to the nanosecond."""
    seconds = datetime.fromtimestamp(unix_ns // 10**9, timezone.utc)
    return f"{seconds:%Y-%m-%dT%H:%M:%S}.{unix_ns % 10**9:09d}Z"


def _metadata(timeline: Timeline) -> list[dict[str, Any]]:
    """Returns the events with the names of the process and the lanes, and with the order of the lanes."""
    events = [_name_process(timeline), _tell("process_sort_index", timeline.rank, sort_index=timeline.rank)]
    for tid, name in enumerate(_name_lanes(timeline.lanes), _FIRST_TID):
        events.append(_tell("thread_name", timeline.rank, tid, name=name))
        events.append(_tell("thread_sort_index", timeline.rank, tid, sort_index=tid))
    return events


def _name_process(timeline: Timeline) -> dict[str, Any]:
    name = shlex.join(timeline.command) or "modtrace"
    rank = f" (rank {timeline.rank})" if timeline.world_size > 1 else ""
    return _tell("process_name", timeline.rank, name=name + rank)


def _tell(what: str, pid: int, tid: int | None = None, **args: Any) -> dict[str, Any]:
    place = {"pid": pid} if tid is None else {"pid": pid, "tid": tid}
    return {"ph": "M", "name": what, **place, "args": args}


def _name_lanes(lanes: Sequence[Lane]) -> list[str]:
    """Returns the names of the lanes, with the thread if there are several."""
    several = len({lane.thread for lane in lanes if lane.thread is not None}) > 1
    return [
        f"{lane.kind} (thread {lane.thread})" if several and lane.thread is not None else lane.kind
        for lane in lanes
    ]


class _SpanWriter:
    """Writes spans, each followed by the ends of its arrows, as viewers bind these to the last begun span."""

    def __init__(self, timeline: Timeline) -> None:
        self._spans = timeline.spans
        self._pid = timeline.rank
        self._names = [json.dumps(name) for name in timeline.spans.names]
        self._args = [_ArgWriter(detail) for detail in timeline.spans.details]
        flows = timeline.flows
        rows = np.concatenate([flows.source, flows.target])
        self._order = np.argsort(rows, kind="stable")
        self._rows = rows[self._order]
        self._flow_kinds = flows.kind.tolist()

    def write(self, first: int, end: int) -> Iterator[str]:
        """Yields the events of the spans from `first` to `end - 1`."""
        spans = self._spans
        columns = (spans.kind, spans.lane, spans.start_ns, spans.duration_ns, spans.name)
        rows = zip(*(column[first:end].tolist() for column in columns), strict=True)
        args = zip(*(arg.write(first, end) for arg in self._args), strict=True)
        # The positions of arrow ends. Arrow n begins at end n; the numbers of all targets are higher.
        begin, stop = np.searchsorted(self._rows, [first, end]).tolist()
        ends = zip(self._rows[begin:stop].tolist(), self._order[begin:stop].tolist(), strict=True)
        flows = {at: [flow for _, flow in group] for at, group in groupby(ends, key=lambda end: end[0])}
        for row, (kind, lane, start_ns, duration_ns, name), told in zip(
            range(first, end), rows, args, strict=False
        ):
            place = f'"ts":{_to_us(start_ns)},"pid":{self._pid},"tid":{lane + _FIRST_TID}'
            yield (
                f'{{"ph":"X","name":{self._names[name]},"cat":"{SPAN_KINDS[kind]}",{place},'
                f'"dur":{_to_us(duration_ns)},"args":{{{"".join(told)[:-1]}}}}}'
            )
            for flow in flows.get(row, ()):
                yield self._write_flow(flow, place)

    def _write_flow(self, flow: int, place: str) -> str:
        number = flow % len(self._flow_kinds)
        what = f'"id":{number + 1},"name":"{FLOW_KINDS[self._flow_kinds[number]]}","cat":"flow",{place}'
        return f'{{"ph":"s",{what}}}' if flow == number else f'{{"ph":"f","bp":"e",{what}}}'


class _ArgWriter:
    """Writes one detail of each span, followed by a comma; "" for a span without it."""

    def __init__(self, detail: Detail) -> None:
        self._values = detail.values
        self._key = json.dumps(detail.name)
        self._texts: Sequence[str] | None = None
        if detail.dictionary is not None:  # the last text is for code -1
            self._texts = [*(f"{self._key}:{json.dumps(text)}," for text in detail.dictionary), ""]

    def write(self, first: int, end: int) -> list[str]:
        """Returns the texts for the rows from `first` to `end - 1`."""
        values, key = self._values[first:end], self._key
        if self._texts is not None:
            texts = self._texts
            return [texts[value] for value in values.tolist()]
        if values.dtype == bool:
            return [f"{key}:true," if value else "" for value in values.tolist()]
        return [f"{key}:{value}," if value >= 0 else "" for value in values.tolist()]


def _to_us(time_ns: int) -> str:
    """Returns a time in microseconds, the unit of the format, to the nanosecond."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"
