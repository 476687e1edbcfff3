"""Reads the tables of a report as lists of Python values."""

from typing import Any

from modtrace.analysis.report.limits import Limits
from modtrace.analysis.report.report import build_report
from modtrace.analysis.report.tables import Report, ReportTable
from modtrace.recording.protocols import RecordingData

#: More room than any recording of a test needs.
ALL = Limits(nodes=10**6, spans=10**6, values=10**6, histograms=10**6)


def report(data: RecordingData, limits: Limits = ALL, step: int | None = None) -> Report:
    return build_report(data, limits, step=step)


def column(table: ReportTable, name: str) -> list[Any]:
    """The values of a column; texts for codes, None for what is not known; numbers with six digits."""
    found = table[name]
    values = found.values.tolist()
    if found.texts is not None:
        return [None if each < 0 else found.texts[each] for each in values]
    return [None if each == -1 or each != each else float(f"{each:.6g}") for each in values]


def rows(table: ReportTable, *names: str) -> list[tuple[Any, ...]]:
    """Some columns of all rows."""
    return list(zip(*(column(table, name) for name in names), strict=True))
