"""Renders whether forwards and recomputes agree, as lines for a terminal or as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ...analysis.graph.parts import forms_of_op
from ...analysis.provenance.recompute import RecomputeCheck, RecomputeDifference
from ...recording.suggestions import count_of
from ..common.columns import Color, Text, render_lines
from ..common.numbers import format_count

#: The largest number of further places that are shown.
_TOLD = 10


def render_recompute(
    check: RecomputeCheck, *, marks: Sequence[str] = (), width: int | None = None, color: Color = False
) -> str:
    """Returns where forward and recompute first differ, further places, and what was compared.

    Args:
        check: the answer.
        marks: what is missing from the recording.
        width: the width of the terminal, in characters; longer lines are broken. None: no limit.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    far = " as far as compared" if check.ended else ""
    agreement = f"forward and recompute agree{far}: {_describe_compared(check)}"
    lines = _describe_differences(check) if check.differences else [Text(agreement)]
    lines += [Text(f"! {mark}", "yellow") for mark in marks]
    return render_lines(lines, color=color, width=width)


def render_recompute_json(check: RecomputeCheck, *, marks: Sequence[str] = ()) -> str:
    """Returns the fields as JSON; `marks` say what is missing."""
    return json.dumps({**asdict(check), "marks": list(marks)}) + "\n"


def _describe_compared(check: RecomputeCheck) -> str:
    what = "outputs of ops" if check.by_ops else "outputs of modules"
    ways = [(check.by_hash, "hashes"), (check.by_statistics, "statistics")]
    how = " and ".join(f"{format_count(count)} {what} by {way}" for count, way in ways if count)
    compared = (
        f"compared {how}, of {count_of(check.calls, 'recomputed call')} in {count_of(check.steps, 'step')}"
    )
    ended = (
        f"; {count_of(check.ended, 'call')} ended before the last op of the forward" if check.ended else ""
    )
    return compared + ended


def _describe_differences(check: RecomputeCheck) -> list[Text]:
    first, *more = check.differences
    place = Text.join(
        [
            Text("forward and recompute differ", "bold red"),
            Text(f" in step {first.step}, first {_name(first)}"),
        ]
    )
    lines = [place, *(Text(f"  {line}") for line in _explain(first))]
    others = Counter(_name(diff) + (f": {diff.cause}" if diff.cause else "") for diff in more)
    told = others.most_common(_TOLD)
    lines += [Text(f"and {name}" + (f", {count} times" if count > 1 else "")) for name, count in told]
    if len(others) > len(told):
        lines.append(Text(f"and {count_of(len(others) - len(told), 'further place')}"))
    return [*lines, Text(_describe_compared(check))]


def _name(diff: RecomputeDifference) -> str:
    call = f"@{diff.call}" if diff.call else ""
    where = f"{diff.path or diff.root}{call}" if diff.path is not None else "(outside of modules)"
    if diff.op is None:
        return f"output {diff.slot}".rstrip() + f" of {where}"
    return f"{forms_of_op(diff.op)[-1]} in {where}" + (f" at {diff.source_line}" if diff.source_line else "")


def _explain(diff: RecomputeDifference) -> Iterator[str]:
    if diff.cause:
        yield f"{diff.cause}: {diff.hint}"
    else:
        yield "what it read agrees, as far as it was measured" if diff.op else "its inputs were not compared"
    if diff.remedy:
        yield f"try: {diff.remedy}"
    yield f"forward    {diff.forward}"
    yield f"recompute  {diff.recompute}" + (
        "; the hashes differ" if diff.by_hash and diff.forward == diff.recompute else ""
    )
