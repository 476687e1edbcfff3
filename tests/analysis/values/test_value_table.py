"""The `values` table with names and derived statistics."""

import math
from typing import Any

from builders import RecordingBuilder, TypedRecording
from helpers.typed_steps import typed_net
from modtrace.analysis.values.value_table import build_value_table
from modtrace.recording.schema import schema

NAMES = ["root", "path", "call", "type", "role", "slot"]
DERIVED = ["mean", "std", "rms", "l2", "abs_max", "nonfinite"]
COLUMNS = [
    *("step", "phase", *NAMES, "op", "op_nth", "shape", "dtype", "numel"),
    *("count", "min", "max", "sum", "sumsq", "nan_count", "inf_count", *DERIVED),
    *("nan_fraction", "inf_fraction", "crest", "mean_abs", "zero_fraction", "kurtosis", "argmax", "relative"),
    *(
        "site_id",
        "call_id",
        "op_id",
        "order",
        "first_index",
        "sumabs",
        "zero_count",
        "sum4",
        "channel_max",
        "sample",
    ),
    *("hash", "sketch", "histogram", "user", "blob", "note"),
    *("placements", "mesh", "global_shape", "global_offset", "micro_batch", "stage", "requires_grad"),
]


def rows_of(data: TypedRecording, columns: list[str]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in build_value_table(data).select(columns).to_pylist()]


def test_names_are_in_front_and_what_is_derived_behind_the_raw_statistics() -> None:
    assert build_value_table(RecordingBuilder().data()).column_names == COLUMNS
    build = RecordingBuilder()
    build.parameter(None, "x", [1.0])
    assert build_value_table(build.data()).column_names == COLUMNS


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
    build, net = typed_net()
    build.parameter(net, "a", [3.0, -4.0])
    build.parameter(net, "b", None, note="meta tensor")
    build.parameter(net, "c", [math.inf, -math.inf, 1.0])

    full, missing, infinite = rows_of(build.data(), DERIVED)
    assert full == (-0.5, math.sqrt(24.5), math.sqrt(12.5), 5.0, 4.0, 0)
    assert missing == (None,) * 6
    assert infinite[2:] == (math.inf, math.inf, math.inf, 2)
    assert math.isnan(infinite[0]) and math.isnan(infinite[1])


def test_what_tier_2_gives_is_derived_and_null_without_it() -> None:
    build, net = typed_net()
    histogram = [0] * 256
    histogram[127], histogram[129] = 1, 1  # 1 and -4
    build.parameter(
        net, "a", [1.0, -4.0, 0.0], sumabs=5.0, zero_count=1, sum4=257.0, argmax=1, histogram=histogram
    )
    build.parameter(net, "b", [1.0, math.nan])
    build.parameter(net, "c", None, note="meta tensor")

    names = ["mean_abs", "zero_fraction", "kurtosis", "argmax", "nan_fraction", "inf_fraction", "crest"]
    full, usual, missing = rows_of(build.data(), names)
    assert full == (5 / 3, 1 / 3, 3 * 257 / 17**2, 1, 0.0, 0.0, 4 / math.sqrt(17 / 3))
    assert usual[:6] == (None, None, None, None, 0.5, 0.0) and math.isnan(usual[6])
    assert missing == (None,) * 7


def test_an_update_is_set_beside_the_parameter_of_the_same_optimizer_step() -> None:
    build, net = typed_net()
    update = build.site(net, "update", "w")
    build.step(0, 0, 100)
    for size in (1.0, 2.0):  # two steps of the optimizer within one step
        build.parameter(net, "w", [10 * size**2])
        build.value(update, [size], phase="optimizer")
    build.parameter(net, "v", [0.0])
    build.value(build.site(net, "update", "v"), [1.0], phase="optimizer")
    build.value(build.site(net, "update", "u"), [1.0], phase="optimizer")
    build.step(1, 100, 200)
    build.value(update, [1.0], phase="optimizer")

    assert rows_of(build.data(), ["role", "slot", "relative"]) == [
        ("parameter", "w", None),
        ("update", "w", 0.1),
        ("parameter", "w", None),
        ("update", "w", 0.05),
        ("parameter", "v", None),
        ("update", "v", math.inf),
        ("update", "u", None),
        ("update", "w", None),
    ]


def test_updates_are_counted_in_the_order_of_measuring_and_not_of_writing() -> None:
    build, net = typed_net(100)
    for order, size in ((2, 10.0), (0, 20.0)):
        build.parameter(net, "w", [size], order=order)
    for order in (1, 3):
        build.value(build.site(net, "update", "w"), [1.0], phase="optimizer", order=order)

    assert rows_of(build.data(), ["role", "relative"])[2:] == [("update", 0.05), ("update", 0.1)]


def test_what_an_op_read_is_no_parameter_that_an_update_was_made_to() -> None:
    build, net = typed_net(100)
    build.parameter(net, "w", [5.0], op_id=3)
    build.value(build.site(net, "update", "w"), [1.0], phase="optimizer")

    assert rows_of(build.data(), ["relative"]) == [(None,), (None,)]


def test_a_hash_is_text() -> None:
    build = RecordingBuilder()
    build.parameter(build.module("", "Net"), "a", [3.0], hash=bytes([0, 255, 16]))
    build.parameter(None, "b", [3.0])

    assert rows_of(build.data(), ["hash"]) == [("00ff10",), (None,)]


def test_raw_columns_are_those_of_the_table() -> None:
    build = RecordingBuilder()
    build.parameter(build.module("", "Net"), "a", [3.0, -4.0])
    data = build.data()

    raw = [name for name in schema("values").names if name != "hash"]
    assert build_value_table(data).select(raw).columns == data.table("values").select(raw).columns
