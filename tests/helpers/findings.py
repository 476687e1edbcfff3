"""Runs one check, on a recording typed by hand or on a real one."""

import re
import warnings

from modtrace import Finding, Recording
from modtrace.analysis.findings.all_checks import CHECKS
from modtrace.analysis.findings.check import run_checks
from modtrace.analysis.findings.finding import Findings
from modtrace.recording.protocols import RecordingData
from modtrace.views.common.columns import render_lines
from modtrace.views.text.findings import summarize_findings

#: One of several, the plural after 1, the singular after more, and what is left where a text was cut or is missing.
_UNREADABLE = re.compile(
    r"(?<![\d.,/x-])1 (more )?(?!is\b|was\b|has\b|does\b|gets\b)[a-z]+s\b|\b1 of \d+ \w+ (get|are|do)\b"
    r"|\b[02-9] (more )?(step|layer|output|parameter|unit|tensor)\b|[.,;:] ?[,;]| ,|  "
)

#: Options of `record()` and what turns them on.
_OPTIONS = {"ops": "--ops", "backward_times": "--backward-times"}


def check_typed(
    data: RecordingData, check: str, *, why: str | None = None, **thresholds: float
) -> tuple[Finding, ...]:
    """Returns what a check finds; with `why` it must not have been able to check, for this reason."""
    given = {f"{check}.{name}": value for name, value in thresholds.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # numpy's would stand in the answer
        found = run_checks(data, CHECKS, only=[check], thresholds=given)
    assert [one.why for one in found.unchecked] == ([] if why is None else [why])
    assert_readable(found, data)
    return found.findings


def assert_readable(found: Findings, data: RecordingData) -> None:
    """Fails on what no text of a finding may be: ungrammatical, cut, without its model, or advice that was followed."""
    for one in found.findings:
        texts = [one.text, one.remedy, *one.evidence]
        for text in texts:
            assert not _UNREADABLE.search(text), text
        if (one.path or "")[:1].isdigit() and not one.parameter:
            assert f"{one.root}/{one.path}" in " ".join(texts)
    recorded = [option for name, option in _OPTIONS.items() if data.meta.options.get(name)]
    for remedy in (one.remedy for one in (*found.findings, *found.unchecked)):
        advised = remedy.partition("record --")[2]
        assert not [option for option in recorded if option in f"--{advised}" and " or --" not in advised], (
            remedy
        )


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
