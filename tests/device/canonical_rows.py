"""The rows of a recording without what differs between two devices: times, ids, threads and memory."""

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import modtrace

#: Columns that hold times, ids, threads, memory, or what only one kind of device has.
_NOT_COMPARED = {
    "calls": {"call_id", "parent_call_id", "forward_call_id", "triggered_by", "thread", "start_ns",
              "end_ns", "overhead_ns", "device_start_ns", "device_end_ns", "allocated_bytes", "peak_bytes"},
    "ops": {"op_id", "call_id", "forward_op_id", "sequence_nr", "sequence_thread", "thread", "start_ns", "end_ns",
            "overhead_ns", "stream", "device_start_ns", "device_end_ns"},
    "values": {"call_id", "op_id", "order", "start_ns", "end_ns"},
}  # fmt: skip

#: In the arguments of ops.
_DEVICE = re.compile("sim(:0)?")

#: Statistics that are compared within rounding.
_NEAR = {"min", "max", "sum", "sumsq", "sumabs", "sum4"}
#: Statistics of which one rounding can change everything.
_SENSITIVE = {"hash", "sketch", "histogram", "channel_max", "argmax", "zero_count", "blob"}


class CanonicalRows(NamedTuple):
    """Rows as tuples, with names of calls and ops in place of ids."""

    calls: "Counter[Hashable]"
    ops: "Counter[Hashable]"
    values: dict[Hashable, dict[str, Any]]


def canonical_rows(recording: modtrace.Recording) -> CanonicalRows:
    calls = recording.table("calls").to_pylist()
    ops = recording.table("ops").to_pylist()
    names_of_calls: dict[int | None, Hashable] = {None: None}
    names_of_calls |= _named(calls, "call_id", ("step", "phase", "module_id", "nth"))
    for op in ops:
        op["call"] = names_of_calls[op["call_id"]]
    names_of_ops: dict[int | None, Hashable] = {None: None}
    names_of_ops |= _named(ops, "op_id", ("call", "step", "phase", "name", "nth"))
    for call in calls:
        call["parent"] = names_of_calls[call["parent_call_id"]]
        call["forward"] = names_of_calls[call["forward_call_id"]]
        call["recompute_of"] = names_of_calls[call["recompute_of"]]
    for op in ops:
        op["forward"] = names_of_ops[op["forward_op_id"]]
    values = recording.table("values").to_pylist()
    for value in values:
        value["call"] = names_of_calls[value["call_id"]]
        value["op"] = names_of_ops[value["op_id"]]
    places = _named(values, "order", ("step", "phase", "site_id", "call", "op"), by_place=True)
    return CanonicalRows(
        Counter(_compared("calls", calls)),
        Counter(_compared("ops", ops)),
        dict(zip(places.values(), values, strict=True)),
    )


def assert_alike(found: CanonicalRows, expected: CanonicalRows) -> None:
    _assert_equal(found.calls, expected.calls)
    _assert_equal(found.ops, expected.ops)
    assert found.values.keys() == expected.values.keys()
    for place, value in found.values.items():
        _assert_value(place, value, expected.values[place])


def _assert_equal(found: "Counter[Hashable]", expected: "Counter[Hashable]") -> None:
    extra, missing = list((found - expected).elements()), list((expected - found).elements())
    assert not extra and not missing, (len(extra), extra[:2], len(missing), missing[:2])


def _named(
    rows: list[dict[str, Any]], key: str, columns: tuple[str, ...], *, by_place: bool = False
) -> dict[int | None, Hashable]:
    """Returns a name for each row by its id, or by its place among the rows; rows alike are numbered in their order."""
    seen: Counter[Hashable] = Counter()
    names: dict[int | None, Hashable] = {}
    for at, row in enumerate(rows):
        name = tuple(row[column] for column in columns)
        names[at if by_place else row[key]] = (*name, seen[name])
        seen[name] += 1
    return names


def _compared(table: str, rows: Iterable[dict[str, Any]]) -> list[Hashable]:
    return [
        tuple(
            (name, _DEVICE.sub("cpu", str(value)))
            for name, value in sorted(row.items())
            if name not in _NOT_COMPARED[table]
        )
        for row in rows
    ]


def _assert_value(place: Hashable, found: dict[str, Any], expected: dict[str, Any]) -> None:
    left_out = {*_NOT_COMPARED["values"], *_NEAR, *_SENSITIVE}
    for name in found.keys() - left_out:
        assert str(found[name]) == str(expected[name]), (place, name)
    for name in _SENSITIVE & found.keys():
        assert (found[name] is None) == (expected[name] is None), (place, name)
    size = math.sqrt((expected["sumsq"] or 0) * (expected["count"] or 0))
    for name in _NEAR & found.keys():
        assert _is_near(found[name], expected[name], size), (place, name, found[name], expected[name])


def _is_near(found: float | None, expected: float | None, size: float) -> bool:
    if found is None or expected is None or math.isnan(expected):
        return str(found) == str(expected)
    return math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-4 * size + 1e-7)
