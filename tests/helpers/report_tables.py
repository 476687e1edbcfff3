"""Reads the tables of a report as lists of Python values, and has a recording with names that do harm as markup."""

from typing import Any

from builders import RecordingBuilder
from modtrace.analysis.report.limits import Limits
from modtrace.analysis.report.report import build_report
from modtrace.analysis.report.tables import Report, ReportTable
from modtrace.api.recording import Recording
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


#: Names that would do harm as markup.
EVIL = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "'\"`${alert(3)}",
    "🔥✨",
    "\u202eمرحبا",
    "x" * 10_000,
    "javascript:alert(4)",
    "__proto__",
    "constructor",
]


def hostile() -> Recording:
    """A recording whose names, arguments and marks are markup, code, or hard to show."""
    build = RecordingBuilder(argv=("<b>train</b>.py",), marks=(EVIL[0],), options={"ops": True})
    net = build.module("", EVIL[0], parameters=8)
    modules = [build.module(name, name, parent=net, parameters=4) for name in EVIL]
    for step in range(3):
        build.step(step, 1000 * step, 1000 * step + 900)
        for name in EVIL:
            build.scalar(name, [1.0, float("nan"), float("inf")][step])
        root = build.call(net, 1000 * step, 1000 * step + 800, nth=0)
        for n, module in enumerate(modules):
            call = build.call(module, 1000 * step + 50 * n, 1000 * step + 50 * n + 40, parent=root, nth=0)
            op = build.op(call, EVIL[n], 1000 * step + 50 * n + 1, 1000 * step + 50 * n + 20, args=EVIL[n])
            build.tensor([2], producer=op)
            build.output(call, [1.0, float("inf")], slot=EVIL[n])
    return Recording(build.data())
