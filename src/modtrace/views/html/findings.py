"""Writes the findings of a report as texts: a title, and the evidence as the commands word it."""

from typing import Any

from ...analysis.compile.compilations import Reason
from ...analysis.compile.kernels import CompiledInside
from ...analysis.divergence.answer import Comparison, Divergence
from ...analysis.findings.finding import Finding
from ...analysis.provenance.recompute import RecomputeCheck
from ...analysis.report.tables import ReportFinding
from ...analysis.values.nonfinite import Absorbed, NonFinite
from ...recording.meta import Note
from ..text.comparison import describe_comparison
from ..text.compilations import describe_reason
from ..text.compiled_kernels import describe_region
from ..text.divergence import describe_divergence
from ..text.nonfinite import describe_absorbed, render_nonfinite
from ..text.recompute import render_recompute


def describe_finding(finding: ReportFinding) -> dict[str, Any]:
    """Returns title, severity, evidence and rows of a finding, in the form of the payload."""
    severity, (title, *lines) = _describe_answer(finding)
    rows = {"module": finding.module, "node": finding.node, "step": finding.step}
    return {"title": title, "severity": severity, "lines": lines, **rows}


def _describe_answer(finding: ReportFinding) -> tuple[str, list[str]]:
    answer = finding.answer
    if isinstance(answer, NonFinite):
        return "error", _lines(render_nonfinite(answer))
    if isinstance(answer, Absorbed):
        return "note", [
            "absorbed: NaN or infinities that came to nothing",
            *describe_absorbed(answer.made),
        ]
    if isinstance(answer, Finding):
        return answer.severity, [answer.text, *answer.evidence, f"try: {answer.remedy}"]
    if isinstance(answer, RecomputeCheck):
        return "error" if answer.differences else "good", _lines(render_recompute(answer))
    if isinstance(answer, Comparison):
        return "good" if answer else "error", describe_comparison(answer)
    if isinstance(answer, Divergence):
        return "error", describe_divergence(answer)
    if isinstance(answer, Reason):
        return "error" if answer.kind == "error" else "warning", describe_reason(answer)
    if isinstance(answer, CompiledInside):
        return "note", describe_region(answer)
    if isinstance(answer, Note):
        return "note", [f"{answer.kind}: {answer.reason}"]
    return "warning", [answer]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]
