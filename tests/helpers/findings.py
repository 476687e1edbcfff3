"""Runs one check, on a recording typed by hand or on a real one."""

from modtrace import Finding, Recording
from modtrace.analysis.findings.all_checks import CHECKS
from modtrace.analysis.findings.check import run_checks
from modtrace.recording.protocols import RecordingData
from modtrace.views.common.columns import render_lines
from modtrace.views.text.findings import summarize_findings


def check_typed(
    data: RecordingData, check: str, *, why: str | None = None, **thresholds: float
) -> tuple[Finding, ...]:
    """Returns what a check finds; with `why` it must not have been able to check, for this reason."""
    given = {f"{check}.{name}": value for name, value in thresholds.items()}
    found = run_checks(data, CHECKS, only=[check], thresholds=given)
    assert [one.why for one in found.unchecked] == ([] if why is None else [why])
    return found.findings


def check_run(recording: Recording, check: str, **thresholds: float) -> tuple[Finding, ...]:
    """Returns what a check finds in a recording, which has what it needs.

    The first three lines of `modtrace show` at 80 columns say something of it too.
    """
    found = check_typed(recording.data, check, **thresholds)
    if found and not thresholds:
        heads = show_heads(recording)
        assert any(finding.text[:40] in heads for finding in found), heads
    return found


def show_heads(recording: Recording) -> str:
    """Returns the first three lines of `modtrace show` at 80 columns, as one."""
    text = render_lines(summarize_findings(recording.findings(), 3, "run.modtrace"), color=False, width=80)
    return " ".join(" ".join(text.splitlines()[:3]).split())
