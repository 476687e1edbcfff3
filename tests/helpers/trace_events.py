"""Checks a trace against the definition of Chrome's trace event format, and reads it as viewers do."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Event = Mapping[str, Any]


class Arrow(NamedTuple):
    """A flow, and the spans that a viewer binds its ends to."""

    name: str
    source: Event
    target: Event


def load(text: str) -> dict[str, Any]:
    """Parses a trace; what JSON does not know (NaN, Infinity) is an error."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def find_faults(trace: Any) -> list[str]:
    """What is wrong with a trace in the object form; nothing if it is valid."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no list of traceEvents"]
    faults = [] if trace.get("displayTimeUnit", "ms") in ("ms", "ns") else ["displayTimeUnit is not ms or ns"]
    if not isinstance(trace.get("otherData", {}), dict):
        faults.append("otherData is no object")
    events = trace["traceEvents"]
    faults += [f"event {at}: {fault}" for at, each in enumerate(events) for fault in _faults_of(each)]
    if faults:
        return faults
    return [*_crossing(events), *_loose_flows(events)]


def spans(trace: Mapping[str, Any]) -> list[Event]:
    """The complete events."""
    return [each for each in trace["traceEvents"] if each["ph"] == "X"]


def lanes(trace: Mapping[str, Any]) -> list[str]:
    """The names of the threads in the order of their sort index."""
    names, order = {}, {}
    for each in trace["traceEvents"]:
        if each["name"] == "thread_name":
            names[each["tid"]] = each["args"]["name"]
        elif each["name"] == "thread_sort_index":
            order[each["tid"]] = each["args"]["sort_index"]
    return [names[tid] for tid in sorted(names, key=order.__getitem__)]


def arrows(trace: Mapping[str, Any]) -> list[Arrow]:
    """Each flow with the innermost spans that are open at its ends: among equal times, the order of events counts."""
    bound: dict[tuple[Any, str], Event] = {}
    open_spans: dict[Any, list[Event]] = defaultdict(list)
    for each in sorted((e for e in trace["traceEvents"] if e["ph"] in "Xsf"), key=_begin_ns):
        lane = open_spans[each["pid"], each["tid"]]
        if each["ph"] == "X":
            while lane and _end_ns(lane[-1]) <= _begin_ns(each):
                lane.pop()
            lane.append(each)
        else:
            bound[_flow(each), each["ph"]] = lane[-1]
    found = [(flow, span) for (flow, ph), span in bound.items() if ph == "s"]
    return [Arrow(flow[1], span, bound[flow, "f"]) for flow, span in found]


def inside(trace: Mapping[str, Any], span: Event) -> list[Event]:
    """The spans that lie in one of the same lane."""
    begin, end = _begin_ns(span), _end_ns(span)
    return [
        each
        for each in spans(trace)
        if each is not span
        and each["tid"] == span["tid"]
        and begin <= _begin_ns(each)
        and _end_ns(each) <= end
    ]


def _faults_of(event: Any) -> Iterator[str]:
    if not isinstance(event, dict) or event.get("ph") not in _REQUIRED:
        yield "no ph that is known"
        return
    for name in _REQUIRED[event["ph"]]:
        if name not in event:
            yield f"{event['ph']} without {name}"
    for name, value in event.items():
        if name not in _TYPES:
            yield f"unknown key {name}"
        elif not _TYPES[name](value):
            yield f"{name} is {value!r}"
    if event["ph"] == "M":
        yield from _faults_of_metadata(event)


def _faults_of_metadata(event: Event) -> Iterator[str]:
    name, args = event.get("name"), event.get("args", {})
    if name in ("process_name", "thread_name"):
        if not isinstance(args.get("name"), str):
            yield f"{name} without a name in args"
    elif name in ("process_sort_index", "thread_sort_index"):
        if not _is_integer(args.get("sort_index")):
            yield f"{name} without a sort_index in args"
    else:
        yield f"metadata {name!r} is not known"
    if str(name).startswith("thread") and "tid" not in event:
        yield f"{name} without tid"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


#: The keys that an event of each kind has to have; other kinds are not written.
_REQUIRED: Mapping[str, Sequence[str]] = {
    "X": ("name", "ts", "dur", "pid", "tid"),
    "M": ("name", "pid", "args"),
    "s": ("name", "cat", "id", "ts", "pid", "tid"),
    "f": ("name", "cat", "id", "ts", "pid", "tid"),
}
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "ph": _is_text,
    "name": _is_text,
    "cat": _is_text,
    "ts": _is_time,
    "dur": _is_time,
    "pid": _is_integer,
    "tid": _is_integer,
    "id": lambda value: _is_integer(value) or _is_text(value),
    "bp": lambda value: value == "e",
    "args": lambda value: isinstance(value, dict),
}


def _crossing(events: Sequence[Event]) -> Iterator[str]:
    """X: what begins inside another one of its lane ends inside of it."""
    around: dict[Any, list[Event]] = defaultdict(list)
    complete = [each for each in events if each["ph"] == "X"]
    for each in sorted(complete, key=lambda event: (_begin_ns(event), -_end_ns(event))):
        lane = around[each["pid"], each["tid"]]
        while lane and _end_ns(lane[-1]) <= _begin_ns(each):
            lane.pop()
        if lane and _end_ns(each) > _end_ns(lane[-1]):
            yield f"{each['name']} at {each['ts']} ends after {lane[-1]['name']}, in which it began"
        lane.append(each)


def _loose_flows(events: Sequence[Event]) -> Iterator[str]:
    ends: dict[Any, list[Event]] = defaultdict(list)
    times: dict[Any, list[Event]] = defaultdict(list)
    for each in events:
        if each["ph"] in "sf":
            ends[_flow(each)].append(each)
        elif each["ph"] == "X":
            times[each["pid"], each["tid"]].append(each)
    for flow, pair in ends.items():
        by_kind = {each["ph"]: each for each in pair}
        if len(pair) != 2 or len(by_kind) != 2:
            yield f"flow {flow} has not one begin and one end"
        elif _begin_ns(by_kind["s"]) > _begin_ns(by_kind["f"]):
            yield f"flow {flow} ends before it begins"
        for each in pair:
            if not any(
                _begin_ns(span) <= _begin_ns(each) <= _end_ns(span)
                for span in times[each["pid"], each["tid"]]
            ):
                yield f"flow {flow} at {each['ts']} lies in no span"


def _flow(event: Event) -> Any:
    return event["cat"], event["name"], event["id"]


def _begin_ns(event: Event) -> int:
    return round(event["ts"] * 1000)


def _end_ns(event: Event) -> int:
    return round(event["ts"] * 1000) + round(event.get("dur", 0) * 1000)
