"""The payload of a page: what a report becomes as JSON, compressed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helpers.report_pages import decode, numbers_of
from modtrace.analysis.report.tables import Report, ReportColumn, ReportLane, ReportTable, text_column
from modtrace.views.common.columns import printable
from modtrace.views.html.payload import VERSION, encode_payload, to_payload


def report(*columns: ReportColumn, rows: int = 3, **more: Any) -> Report:
    given: dict[str, Any] = {"title": "train.py", "about": (), "notes": (), "shown_step": -1}
    return Report(**given | {"tables": {"nodes": ReportTable(rows=rows, columns=columns)}} | more)


def column(values: Sequence[Any], dtype: Any = None) -> ReportColumn:
    return ReportColumn(name="x", label="x", kind="count", values=np.array(values, dtype))


def only(found: dict[str, Any]) -> dict[str, Any]:
    [each] = found["tables"]["nodes"]["columns"]
    return dict(each)


@pytest.mark.parametrize(
    ("values", "dtype", "type", "null"),
    [
        ([0, 1, 255], None, "u8", None),
        ([True, False], None, "u8", None),
        ([-1, 1, 255], None, "i32", -1),
        ([0, 256], None, "i32", None),
        ([0, 2**31], None, "f64", None),
        ([0.5, 1], np.float32, "f32", None),
        ([0.5, 1e300], None, "f64", None),
    ],
)
def test_numbers_have_the_smallest_type_that_holds_them(
    values: list[Any], dtype: Any, type: str, null: int | None
) -> None:
    found, numbers = to_payload(report(column(values, dtype), rows=len(values)))
    data = only(found)["data"]
    assert (data["type"], data.get("null")) == (type, null)
    assert numbers_of(data, len(values), numbers).tolist() == values


@pytest.mark.parametrize(
    ("seconds", "dtype", "kind", "rises"),
    [
        ([-0.25, 1e-9, 1e-9, 3e4], np.float64, "ns", True),
        ([2e-9, 1e-9], np.float32, "ns", False),
        ([0.5, np.nan, 0.25], np.float64, "ns", False),
        ([0.5e-9, 1], np.float64, "f64", False),
        ([100, 200], np.float32, "f32", False),  # longer as nanoseconds
        ([1e9, 2e9], np.float64, "f64", False),
        ([np.inf, 1], np.float64, "f64", False),
        ([np.nan, np.nan], np.float64, "f64", False),
    ],
)
def test_times_are_whole_nanoseconds_where_that_is_exact(
    seconds: list[float], dtype: Any, kind: str, rises: bool
) -> None:
    given = column(seconds, dtype)
    given = ReportColumn(name="x", label="x", kind="seconds", values=given.values)
    found, numbers = to_payload(report(given, rows=len(seconds)))
    data = only(found)["data"]
    assert (data["type"], data.get("rises", False)) == (kind, rises)
    read = numbers_of(data, len(seconds), numbers).astype(dtype)
    np.testing.assert_array_equal(read, given.values)


def test_unknown_numbers_that_do_not_fit_are_not_numbers() -> None:
    found, numbers = to_payload(report(column([-1, 2**40])))
    data = only(found)["data"]
    assert data["type"] == "f64"
    assert str(numbers_of(data, 2, numbers).tolist()) == f"[nan, {float(2**40)}]"


def test_columns_follow_each_other_byte_by_byte() -> None:
    found, numbers = to_payload(report(column([1, 2]), column([0x01020304, -1])))
    [first, second] = (each["data"] for each in found["tables"]["nodes"]["columns"])
    assert (first["offset"], second["offset"]) == (0, 2)
    assert numbers == bytes([1, 2, 0x04, 0xFF, 0x03, 0xFF, 0x02, 0xFF, 0x01, 0xFF])


def test_texts_are_codes_of_a_dictionary_and_none_is_minus_one() -> None:
    found, numbers = to_payload(report(text_column("label", "name", ["b", None, "b", "a"], default=True)))
    data = only(found)["data"]
    assert numbers_of(data, 4, numbers).tolist() == [0, -1, 0, 1]
    assert found["dictionaries"] == {"nodes.label": ["b", "a"]}
    assert only(found) == {
        "name": "label",
        "label": "name",
        "kind": "text",
        "aggregate": "none",
        "default": True,
        "data": {"dictionary": "nodes.label", "type": "i32", "null": -1, "offset": 0},
    }


def test_payload_is_compressed_json_and_the_same_each_time() -> None:
    given = report(
        column([1, 2, 3]),
        lanes=(ReportLane(label="forward", kind="forward", thread=0, rank=0),),
        dimensions={"phase": ("forward",)},
        notes=("the values are left out",),
    )
    packed = encode_payload(given)
    found, numbers = decode(packed)
    assert numbers == b"\1\2\3"
    assert {name: found[name] for name in ("format", "version", "title", "notes", "lanes", "dimensions")} == {
        "format": "modtrace report",
        "version": VERSION,
        "title": "train.py",
        "notes": ["the values are left out"],
        "lanes": [{"label": "forward", "kind": "forward", "thread": 0, "rank": 0}],
        "dimensions": [{"name": "phase", "values": ["forward"]}],
    }
    assert encode_payload(given) == packed


@pytest.mark.parametrize("name", ["\ud800", "\x00\x1b", "\u202eabc", "</script><script>alert(1)</script>"])
def test_no_name_breaks_the_payload(name: str) -> None:
    packed = encode_payload(report(text_column("label", "name", [name]), title=name))
    found, _ = decode(packed)
    assert [found["title"], *found["dictionaries"]["nodes.label"]] == [printable(name)] * 2
    assert printable(name).isprintable()
