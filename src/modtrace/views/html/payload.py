"""Writes a report as the payload of the page: one JSON object with columns as base64, compressed."""

import base64
import gzip
import json
from typing import Any

import numpy as np

from ...analysis.report.tables import Report, ReportColumn
from .findings import describe_finding

#: The version of the payload, as docs/view-payload.md describes it.
VERSION = 1

_OPTIONAL = ("about", "measure", "phase", "overlay", "default", "scalar", "together")


def encode_payload(report: Report) -> str:
    """Returns the payload as base64 of compressed JSON. The same report always gives the same text."""
    text = json.dumps(to_payload(report), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    packed = gzip.compress(text.encode("utf-8", "replace"), compresslevel=6, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def to_payload(report: Report) -> dict[str, Any]:
    """Returns the payload as JSON values."""
    dictionaries: dict[str, list[str]] = {}
    tables = {
        name: {
            "rows": each.rows,
            "columns": [_to_column(name, column, dictionaries) for column in each.columns],
        }
        for name, each in report.tables.items()
    }
    return {
        "format": "modtrace report",
        "version": VERSION,
        "title": report.title,
        "about": [list(each) for each in report.about],
        "notes": list(report.notes),
        "shown_step": report.shown_step,
        "dictionaries": dictionaries,
        "tables": tables,
        "lanes": [vars(each) for each in report.lanes],
        "dimensions": [{"name": name, "values": list(each)} for name, each in report.dimensions.items()],
        "findings": [describe_finding(each) for each in report.findings],
    }


def _to_column(table: str, column: ReportColumn, dictionaries: dict[str, list[str]]) -> dict[str, Any]:
    told = {name: getattr(column, name) for name in _OPTIONAL if getattr(column, name)}
    data = _to_data(column.values)
    if column.texts is not None:
        name = f"{table}.{column.name}"
        dictionaries[name] = list(column.texts)
        data = {"dictionary": name, **data}
    return {
        "name": column.name,
        "label": column.label,
        "kind": column.kind,
        "aggregate": column.aggregate,
        **told,
        "data": data,
    }


def _to_data(values: Any) -> dict[str, Any]:
    """Returns the smallest type that holds the values, and their bytes in little-endian order."""
    values = np.asarray(values)
    if values.dtype.kind == "b":
        values = values.astype(np.uint8)
    if values.dtype.kind in "iu":
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        if low >= 0 and high < 2**8:
            return {"type": "u8", "base64": _to_base64(values, "u1")}
        if low >= -(2**31) and high < 2**31:
            unknown = {"null": -1} if low < 0 else {}
            return {"type": "i32", **unknown, "base64": _to_base64(values, "<i4")}
        values = np.where(values == -1, np.nan, values.astype(np.float64))
    if values.dtype == np.float32:
        return {"type": "f32", "base64": _to_base64(values, "<f4")}
    return {"type": "f64", "base64": _to_base64(values, "<f8")}


def _to_base64(values: Any, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")
