"""Writes a report as the payload of the page: one JSON object and the numbers of its columns, compressed."""

import base64
import gzip
import json
import struct
from typing import Any

import numpy as np

from ...analysis.divergence.answer import Comparison
from ...analysis.report.tables import Report, ReportColumn
from ..common.columns import printable_lines
from .findings import describe_finding

#: The version of the payload, as docs/view-payload.md describes it.
VERSION = 3

#: Stands for an unknown time; and a time, in nanoseconds, of as many bits as float32 has.
_UNKNOWN_NS, _LONG_NS = -(2**53), 2**24

#: What the page says if modules of the two runs have no partners because of their names.
_ON_NAMES = "Modules of B have other names. With --map auto (map='auto') each is paired with one of A, and shown once."

_REQUIRED = ("name", "label", "kind", "aggregate")
_OPTIONAL = ("about", "measure", "phase", "overlay", "default", "scalar", "together")


def encode_payload(report: Report) -> str:
    """Returns the payload, compressed, as base64. The same report always gives the same text."""
    values, numbers = to_payload(report)
    text = json.dumps(values, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    encoded = text.encode("utf-8", "replace")
    parts = struct.pack("<I", len(encoded)), encoded, numbers
    packed = gzip.compress(b"".join(parts), compresslevel=6, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def to_payload(report: Report) -> tuple[dict[str, Any], bytearray]:
    """Returns the payload as JSON values with control characters escaped, and the bytes that its columns refer to."""
    dictionaries: dict[str, list[str]] = {}
    numbers = bytearray()
    tables = {
        name: {
            "rows": table.rows,
            "columns": [_to_column(name, column, dictionaries, numbers) for column in table.columns],
        }
        for name, table in report.tables.items()
    }
    values = {
        "format": "modtrace report",
        "version": VERSION,
        "title": report.title,
        "about": [list(line) for line in report.about],
        "notes": list(report.notes),
        "shown_step": report.shown_step,
        "medians": report.medians,
        "dictionaries": dictionaries,
        "tables": tables,
        "lanes": [vars(lane) for lane in report.lanes],
        "dimensions": [{"name": name, "values": list(values)} for name, values in report.dimensions.items()],
        "findings": [describe_finding(finding) for finding in report.findings],
        "compared": _describe_compared(report),
    }
    return _escape(values), numbers


def _describe_compared(report: Report) -> dict[str, Any] | None:
    """Returns the names of the two runs that a report compares, and the finding with the answer."""
    answers = [n for n, finding in enumerate(report.findings) if isinstance(finding.answer, Comparison)]
    if not report.compared or not answers:
        return None
    answer = report.findings[answers[0]].answer
    assert isinstance(answer, Comparison)
    advice = _ON_NAMES if answer.proposed else ""
    return {"names": list(report.compared), "finding": answers[0], "advice": advice}


def _escape(value: Any) -> Any:
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, dict):
        return {_escape(name): _escape(of_name) for name, of_name in value.items()}
    return [*map(_escape, value)] if isinstance(value, list | tuple) else value


def _to_column(
    table: str, column: ReportColumn, dictionaries: dict[str, list[str]], numbers: bytearray
) -> dict[str, Any]:
    told = {name: getattr(column, name) for name in _REQUIRED}
    told |= {name: getattr(column, name) for name in _OPTIONAL if getattr(column, name)}
    times = _add_times(column.values, numbers) if column.kind == "seconds" else None
    data = times or _add_numbers(column.values, numbers)
    if column.texts is not None:
        name = f"{table}.{column.name}"
        dictionaries[name] = list(column.texts)
        data = {"dictionary": name, **data}
    return {**told, "data": data}


def _add_numbers(values: Any, numbers: bytearray) -> dict[str, Any]:
    """Appends values in the smallest type that holds them. Returns the type, and the position of the bytes."""
    values = np.asarray(values)
    if values.dtype.kind == "b":
        values = values.astype(np.uint8)
    if values.dtype.kind in "iu":
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        if low >= 0 and high < 2**8:
            return {"type": "u8", "offset": _append(values, "u1", numbers)}
        if low >= -(2**31) and high < 2**31:
            unknown = {"null": -1} if low < 0 else {}
            return {"type": "i32", **unknown, "offset": _append(values, "<i4", numbers)}
        values = np.where(values == -1, np.nan, values.astype(np.float64))
    if values.dtype == np.float32:
        return {"type": "f32", "offset": _append(values, "<f4", numbers)}
    return {"type": "f64", "offset": _append(values, "<f8", numbers)}


def _add_times(seconds: Any, numbers: bytearray) -> dict[str, Any] | None:
    """Appends times in whole nanoseconds, which compress better than floating point, as differences if they rise.

    Nothing is appended, and the result is None, where they are no whole nanoseconds, or long for numbers of 24 bits.
    """
    seconds = np.asarray(seconds)
    is_unknown = np.isnan(seconds)
    with np.errstate(invalid="ignore", over="ignore"):
        ns = np.where(is_unknown, _UNKNOWN_NS, np.rint(seconds.astype(np.float64) * 1e9))
        is_whole = is_unknown | ((ns / 1e9).astype(seconds.dtype) == seconds)
    if is_unknown.all() or not is_whole.all() or np.abs(ns).max() > 2**53:
        return None
    if seconds.dtype == np.float32 and np.median(np.abs(ns[~is_unknown])) >= _LONG_NS:
        return None
    whole = ns.astype(np.int64)
    if not is_unknown.any() and (np.diff(whole) >= 0).all():
        return {"type": "ns", "rises": True, "offset": _append(np.diff(whole, prepend=0), "<i8", numbers)}
    unknown = {"null": _UNKNOWN_NS} if is_unknown.any() else {}
    return {"type": "ns", **unknown, "offset": _append(whole, "<i8", numbers)}


def _append(values: Any, dtype: str, numbers: bytearray) -> int:
    """Appends the lowest byte of each value, then the next byte of each, and so on, as this compresses best."""
    offset, width = len(numbers), np.dtype(dtype).itemsize
    numbers += np.frombuffer(values.astype(dtype).tobytes(), np.uint8).reshape(-1, width).T.tobytes()
    return offset
