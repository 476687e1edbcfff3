"""Renders whether forwards and recomputes agree, as lines for a terminal or as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ...analysis.graph.parts import forms_of_op
from ...analysis.provenance.recompute import RecomputeCheck, RecomputeDifference
from ...recording.suggestions import count_of
from ..common.columns import Color, Text, printable, render_lines
from ..common.numbers import format_count

#: At most so many further places are shown.
_TOLD = 10


def render_recompute(
    check: RecomputeCheck, *, marks: Sequence[str] = (), width: int | None = None, color: Color = False
) -> str:
    """Returns where forward and recompute differ first, where else, and what was compared.

    Args:
        check: the answer.
        marks: what is missing from the recording.
        width: the width of the terminal, in characters; longer lines are broken. None: no limit.
        color: whether the text is styled for a terminal, or in which markup it is written.
    """
    far = " as far as compared" if check.ended else ""
    agreement = f"forward and recompute agree{far}: {_describe_compared(check)}"
    lines = _describe_differences(check) if check.differences else [Text(agreement)]
    lines += [Text(f"! {printable(mark)}", "yellow") for mark in marks]
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
            Text(f" in step {first.step}, first {printable(_name(first))}"),
        ]
    )
    lines = [place, *(Text(f"  {printable(line)}") for line in _explain(first))]
    others = Counter(_name(each) + (f": {each.cause}" if each.cause else "") for each in more)
    told = others.most_common(_TOLD)
    lines += [
        Text(f"and {printable(name)}" + (f", {count} times" if count > 1 else "")) for name, count in told
    ]
    if len(others) > len(told):
        lines.append(Text(f"and {count_of(len(others) - len(told), 'further place')}"))
    return [*lines, Text(_describe_compared(check))]


def _name(each: RecomputeDifference) -> str:
    call = f"@{each.call}" if each.call else ""
    where = f"{each.path or each.root}{call}" if each.path is not None else "(outside of modules)"
    if each.op is None:
        return f"output {each.slot}".rstrip() + f" of {where}"
    return f"{forms_of_op(each.op)[-1]} in {where}" + (f" at {each.source_line}" if each.source_line else "")


def _explain(each: RecomputeDifference) -> Iterator[str]:
    if each.cause:
        yield f"{each.cause}: {each.hint}"
    else:
        yield "what it read agrees, as far as it was measured" if each.op else "its inputs were not compared"
    if each.remedy:
        yield f"try: {each.remedy}"
    yield f"forward    {each.forward}"
    yield f"recompute  {each.recompute}" + (
        "; the hashes differ" if each.by_hash and each.forward == each.recompute else ""
    )
