"""The `values` table with names and derived statistics."""

import math
from typing import Any

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.value_table import build_value_table
from modtrace.recording.schema import schema

NAMES = ["root", "path", "call", "type", "role", "slot"]
DERIVED = ["mean", "std", "rms", "l2", "abs_max", "nonfinite"]


def rows_of(data: TypedRecording, columns: list[str]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in build_value_table(data).select(columns).to_pylist()]


def test_names_are_in_front_and_what_is_derived_behind_the_raw_statistics() -> None:
    raw = schema("values").names
    behind = raw.index("inf_count") + 1
    expected = [*NAMES, *raw[:behind], *DERIVED, *raw[behind:]]

    assert build_value_table(RecordingBuilder().data()).column_names == expected
    build = RecordingBuilder()
    build.parameter(None, "x", [1.0])
    assert build_value_table(build.data()).column_names == expected


def test_every_row_says_where_its_tensor_was_seen() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net", name="student")
    x = build.module("x", "Half", parent=net)
    shared = build.module("x.l", "Linear", parent=x, aliases=["y.l"])
    y = build.module("y", "Half", parent=net)
    build.step(0, 0, 1000)
    outer = build.call(net, 0, 900, nth=0)
    in_x = build.call(shared, 10, 30, parent=build.call(x, 0, 100, parent=outer), nth=0)
    in_y = build.call(shared, 210, 250, parent=build.call(y, 200, 300, parent=outer), nth=1)
    build.output(in_x, [1.0])
    build.output(in_y, [1.0], "[0]")
    build.step(1, 1000, 2000)
    build.gradient(in_y, [1.0], "[0]")
    build.parameter(shared, "weight", [1.0])
    build.parameter(None, "param_groups[0].params[3]", [1.0])
    build.value(build.site(77, "output", nth=0), [1.0], call=77)
    build.value(99, [1.0])

    assert rows_of(build.data(), ["step", *NAMES]) == [
        (0, "student", "x.l", 0, "Linear", "output", ""),
        (0, "student", "y.l", 1, "Linear", "output", "[0]"),
        (1, "student", "y.l", 1, "Linear", "grad_output", "[0]"),
        (1, "student", "x.l", None, "Linear", "parameter", "weight"),
        (1, None, None, None, None, "parameter", "param_groups[0].params[3]"),
        (1, "(unknown#77)", "(unknown#77)", 0, "", "output", ""),
        (1, None, None, None, None, None, None),
    ]


def test_statistics_are_derived_and_null_where_nothing_was_measured() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.parameter(net, "a", [3.0, -4.0])
    build.parameter(net, "b", None, note="meta tensor")
    build.parameter(net, "c", [math.inf, -math.inf, 1.0])

    full, missing, infinite = rows_of(build.data(), DERIVED)
    assert full == (-0.5, math.sqrt(24.5), math.sqrt(12.5), 5.0, 4.0, 0)
    assert missing == (None,) * 6
    assert infinite[2:] == (math.inf, math.inf, math.inf, 2)
    assert math.isnan(infinite[0]) and math.isnan(infinite[1])


def test_raw_columns_are_those_of_the_table() -> None:
    build = RecordingBuilder()
    build.parameter(build.module("", "Net"), "a", [3.0, -4.0])
    data = build.data()

    assert build_value_table(data).select(schema("values").names).columns == data.table("values").columns
