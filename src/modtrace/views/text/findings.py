"""Renders findings as lines for a terminal or as JSON."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ...analysis.findings.finding import Findings, Severity
from ...recording.suggestions import count_of
from ..common.columns import Color, Text, render_lines

#: The largest number of checks that were not run which are named where nothing was found.
_NAMED = 3

#: The recording, in the commands that remedies suggest.
_RUN = re.compile(r"\bRUN\b")

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold"}


def render_findings(
    found: Findings,
    *,
    top: int | None = None,
    run: str | None = None,
    marks: Sequence[str] = (),
    width: int | None = None,
    color: Color = False,
) -> str:
    """Returns the findings, worst first, and what could not be checked.

    Args:
        found: the answer.
        top: the largest number of findings shown; None for all.
        run: the path of the recording, for suggested commands.
        marks: what is missing from the recording.
        width: the width of the terminal, in characters; longer lines are broken. None: no limit.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    lines = [*_describe_findings(found, top, run)]
    lines += [Text(f"! {mark}", "yellow") for mark in marks]
    return render_lines([*lines, *_describe_unchecked(found)], color=color, width=width)


def render_findings_json(found: Findings, *, marks: Sequence[str] = ()) -> str:
    """Returns the fields as JSON; `marks` say what is missing."""
    return json.dumps({"ok": found.ok, **asdict(found), "marks": list(marks)}) + "\n"


def summarize_findings(found: Findings, most: int, run: str | None) -> list[Text]:
    """Returns a line for each of the worst findings, or one that says that nothing was found."""
    shown = found.findings[:most]
    lines = [_headline(finding.severity, finding.text) for finding in shown]
    ask = f"modtrace check {run}" if run else "findings()"
    if len(found.findings) > most:
        lines.append(Text(f"{len(found.findings) - most} more: {ask}"))
    if not found.findings:
        lines.append(Text(_describe_nothing(found, ask)))
    return lines


def _headline(severity: Severity, text: str) -> Text:
    return Text.join([Text(severity, _STYLES[severity]), Text(f": {text}")])


def _describe_nothing(found: Findings, ask: str) -> str:
    names = [one.check for one in found.unchecked]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    unchecked = ", ".join(names[:_NAMED]) + more
    nothing = "nothing found" if found.checked else "nothing checked"
    return f"{nothing}; not checked: {unchecked} ({ask})" if unchecked else nothing


def _describe_findings(found: Findings, top: int | None, run: str | None) -> Iterator[Text]:
    place = "RUN" if run is None else shlex.quote(run)
    for finding in found.findings[:top]:
        yield _headline(finding.severity, finding.text)
        for line in finding.evidence:
            yield Text(f"  {line}")
        yield Text(f"  try: {_RUN.sub(lambda _: place, finding.remedy)}")
        rests = f", from {finding.rests_on}" if finding.rests_on else ""
        yield Text(f"  ({finding.check}{rests})", "dim")
    hidden = len(found.findings[len(found.findings) if top is None else top :])
    if hidden:
        yield Text(f"and {count_of(hidden, 'further finding')}: --top {len(found.findings)} shows all")
    if not found.findings:
        yield Text("nothing found" if found.checked else "nothing could be checked")


def _describe_unchecked(found: Findings) -> Iterator[Text]:
    """Yields a line on the checks that were run, and one for each reason why others were not."""
    if found.checked:
        yield Text(f"checked: {', '.join(found.checked)}")
    yield from map(Text, found.describe_unchecked())
