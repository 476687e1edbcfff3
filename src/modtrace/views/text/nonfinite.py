"""Renders the non-finite values of a recording, as lines for a terminal or as JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from ...analysis.graph.parts import forms_of_op
from ...analysis.ranks.first_nonfinite import RankAnswers
from ...analysis.values.nonfinite import (
    FIRST_SEEN,
    PRODUCER,
    SOURCE,
    Measured,
    NonFinite,
    describe_counts,
)
from ...recording.meta import Note
from ...recording.phase import BACKWARD, OPTIMIZER
from ...recording.role import BY_NAME, LEAF, PARAMETER, PARAMETER_GRAD
from ...recording.suggestions import count_of, first_few, ranges_of
from ..common.columns import Color, Text, render_lines
from ..common.headline import describe_notes
from ..common.numbers import format_count

_GROWN = {PARAMETER: "the largest parameter", PARAMETER_GRAD: "the largest gradient of a parameter"}

#: The default for callers that found values, so that the extent of measuring is not shown.
_NOT_COUNTED = Measured(tensors=0, unmeasured=0, steps=0, last_step=None)

#: The largest number of further ranks with a line of their own.
_OTHER_RANKS = 4

#: The largest number of links that are shown of a chain of ops.
_LINKS = 6


def render_nonfinite(
    found: NonFinite | None,
    measured: Measured = _NOT_COUNTED,
    *,
    further: Sequence[Sequence[NonFinite]] = (),
    absorbed: Sequence[NonFinite] = (),
    limit: int = 20,
    marks: Sequence[str] = (),
    notes: Sequence[Note] = (),
    width: int | None = None,
    color: Color = False,
) -> str:
    """Returns a report on the values that were found, or else on what was measured.

    Args:
        found: the first answer.
        measured: how much was measured; needed if nothing was found.
        further: later answers, in groups made by `group_alike`.
        absorbed: answers on values that did not matter.
        limit: the largest number of groups shown, including the first, and of absorbed values.
        marks: what is missing from the recording; the first values may be missing too.
        notes: why steps were written or not.
        width: the width of the terminal, in characters; longer lines are broken. None: no limit.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    if found is None:
        lines = [Text(_describe_none(measured, marks))]
    else:
        lines = _describe(replace(found, others=0) if further else found)
    for group in further[: limit - 1]:
        lines += _describe(replace(group[0], others=0), "then") if len(group) == 1 else _describe_group(group)
    told = describe_absorbed(absorbed[:limit])
    lines += [Text.join([Text("absorbed: ", "bold"), Text(line)]) for line in told]
    if len(further) >= limit or len(absorbed) > limit:
        lines.append(Text(f"{limit} shown, and there are more: --limit {10 * limit} shows more of them"))
    lines += [Text(f"! {mark}", "yellow") for mark in marks]
    untold = [note for note in notes if note.reason != measured.held]
    return render_lines([*lines, *describe_notes(untold)], color=color, width=width)


def group_alike(found: Iterable[NonFinite]) -> Iterator[list[NonFinite]]:
    """Yields answers step by step; those on tensors that ops of one kind wrote at the same time share a list.

    An optimizer writes every parameter and its states, for which one answer is enough.
    """
    for _, of_step in groupby(found, key=lambda one: one.step):
        groups: dict[object, list[NonFinite]] = {}
        for one in of_step:
            is_held = one.kind == SOURCE and one.hint is not None
            key = (one.phase, one.role, one.hint) if is_held else id(one)
            groups.setdefault(key, []).append(one)
        yield from groups.values()


def describe_place(found: NonFinite) -> str:
    """Returns a short description of what made the values: `log in 1.inner of Sequential`."""
    if found.op is None:
        return _describe_tensor(found)
    op = forms_of_op(found.op)[-1]
    if found.kind == SOURCE:
        return f"{found.source}, first read by {op}{_describe_module(found)},"
    backward = f", in the backward of {forms_of_op(found.forward_op)[-1]}," if found.forward_op else ""
    return f"{op}{backward}{_describe_module(found)}"


def describe_made(found: NonFinite) -> str:
    """Returns a description of what made how many values: `log in 1.inner of Sequential made 3 NaN`."""
    verb = {PRODUCER: "made", FIRST_SEEN: "returned"}.get(found.kind or "", "holds")
    return f"{describe_place(found)} {verb} {_describe_counts(found)}"


def _describe_counts(found: NonFinite) -> str:
    return describe_counts(found.nan_count, found.inf_count, are_negative=found.are_negative)


def render_nonfinite_json(
    found: NonFinite | None,
    measured: Measured,
    *,
    marks: Sequence[str] = (),
    further: Sequence[NonFinite] | None = None,
    absorbed: Sequence[NonFinite] = (),
    of_ranks: RankAnswers | None = None,
) -> str:
    """Returns the fields of both as JSON. `first` is null if nothing was found; `marks` say what is missing.

    If `further` is given, `all` lists the first answer and those, and `absorbed` those on values that did not matter.
    If `of_ranks` is given, `ranks` lists the first answer of each rank that has one, that of `first` in front, and
    `unmeasured` the ranks that could not be searched.
    """
    told: dict[str, Any] = {
        "first": asdict(found) if found else None,
        "measured": asdict(measured),
        "marks": list(marks),
    }
    if further is not None:
        told["all"] = [asdict(one) for one in (found, *further) if one is not None]
        told["absorbed"] = [asdict(one) for one in absorbed]
    if of_ranks is not None:
        told["ranks"] = [{"rank": rank, "first": asdict(one)} for rank, one in of_ranks.answers]
        told["unmeasured"] = of_ranks.unmeasured
    return json.dumps(told, indent=2) + "\n"


def render_ranks_with_nonfinite(
    found: RankAnswers, ranks: int, *, width: int | None = None, color: Color = False
) -> str:
    """Returns on which of several ranks the values came up first, and what the others say of theirs.

    Args:
        found: the first answer of each rank that has one, in the order in which they came up.
        ranks: how many ranks there are.
        width: the width of the terminal, in characters; longer lines are broken. None: no limit.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    unmeasured = ranges_of(found.unmeasured)
    lines = [Text(f"  nothing was measured on rank {unmeasured}", "yellow")] if unmeasured else []
    if not found.answers:
        searched = ranks - len(found.unmeasured)
        none = (
            f"none on any of {searched} ranks" if searched > 1 else "none on the only rank that was searched"
        )
        return render_lines([Text(none), *lines], color=color, width=width)
    first, *others = found.answers
    lines.insert(0, Text(f"first on rank {first.rank} of {ranks}", "bold red"))
    for rank, one in others[:_OTHER_RANKS]:
        place = f"step {one.step}, {one.phase or 'between phases'}"
        lines.append(Text(f"  then on rank {rank}, {place}: {describe_made(one)}", "dim"))
    if len(others) > _OTHER_RANKS:
        more = ranges_of(sorted(answer.rank for answer in others[_OTHER_RANKS:]))
        lines.append(Text(f"  and on the ranks {more}", "dim"))
    return render_lines(lines, color=color, width=width)


def _describe(found: NonFinite, which: str = "first non-finite values") -> list[Text]:
    first = _head(which, _describe_counts(found), found)
    if found.op is None:
        lines = [
            f"{_describe_tensor(found)}, {_describe_size(found)}",
            *_explain(found),
            *_describe_after(found),
        ]
    else:
        lines = list(_describe_op(found, found.op))
    return [first, *(Text(f"  {line}") for line in lines)]


def _describe_group(alike: Sequence[NonFinite]) -> list[Text]:
    """Returns the lines about tensors that were written in the same way."""
    counts = describe_counts(sum(one.nan_count for one in alike), sum(one.inf_count for one in alike))
    one = alike[0]
    known = BY_NAME.get(one.role or "")
    held = count_of(len(alike), known.of_one if known else "tensor")
    names = f": {first_few(list(dict.fromkeys(one.source for one in alike)))}" if known else ""
    return [
        _head("then", counts, one),
        Text(f"  held by {held}{names}"),
        Text(f"  of each: {one.hint}"),
    ]


def describe_absorbed(absorbed: Iterable[NonFinite]) -> Iterator[str]:
    """Yields lines on values that came to no loss, gradient, parameter or returned output; equal lines occur once."""
    for line, times in Counter(map(_describe_absorbed, absorbed)).items():
        yield f"{line} ({times} times)" if times > 1 else line


def _describe_absorbed(found: NonFinite) -> str:
    made = (
        f" ({found.hint})" if found.kind == SOURCE and found.hint and " made it in step" in found.hint else ""
    )
    behind = f"; finite again behind {', '.join(found.replaced_by[:_LINKS])}" if found.replaced_by else ""
    return f"{describe_made(found)} in {_tell_time(found)}{made}{behind}"


def _head(which: str, counts: str, found: NonFinite) -> Text:
    return Text.join([Text(f"{which}: ", "bold"), Text(counts, "bold red"), Text(f" in {_tell_time(found)}")])


def _tell_time(found: NonFinite) -> str:
    of_several = f"micro-batch {found.micro_batch} of 0 to {found.micro_batches - 1}"
    parts = [f"step {found.step}", of_several if found.micro_batch is not None else ""]
    return ", ".join(filter(None, [*parts, found.phase or _describe_time(found)]))


def _describe_time(found: NonFinite) -> str:
    """Returns a text on when an op without phase ran; "" without ops."""
    if found.op is None:
        return ""
    return f"after {found.follows}" if found.follows else "before the forward"


def _describe_op(found: NonFinite, op: str) -> Iterator[str]:
    """Yields lines on what made the values and why, what the op read, and where the values went."""
    size = _describe_size(found)
    where = _describe_module(found) + (f" at {found.source_line}" if found.source_line else "")
    if found.kind == SOURCE:
        known = BY_NAME.get(found.role or "")
        held = f"{known.of_one} {found.source}" if known and known.name != LEAF else found.source
        yield f"held by {held}, {size}; first read by {forms_of_op(op)[-1]}{where}"
    else:
        backward = f", in the backward of {forms_of_op(found.forward_op)[-1]}," if found.forward_op else ""
        verb = "first seen at" if found.kind == FIRST_SEEN else "made by"
        yield f"{verb} {forms_of_op(op)[-1]}{backward}{where}, {size}"
    yield from _explain(found)
    yield from (f"read {read}" for read in found.inputs)
    if found.chain:
        hidden = len(found.chain) - _LINKS
        more = [f"{hidden} more"] if hidden > 0 else []
        yield f"went on to {', '.join([*found.chain[:_LINKS], *more])}"
    if found.replaced_by and not (found.after and (found.after.loss or found.after.gradients)):
        yield f"finite again behind {', '.join(found.replaced_by[:_LINKS])}"
    yield from _describe_after(found)
    if found.others:
        them = "rec.nonfinite() (modtrace nonfinite --all)"
        yield f"{count_of(found.others, 'other place')} of this step made such values too: {them}"
    if not found.has_lines and found.kind != SOURCE:
        yield "for the line of your program: record(ops=modtrace.Ops(source=True)) (modtrace record --ops --source)"


def _explain(found: NonFinite) -> Iterator[str]:
    if found.hint:
        yield f"{found.cause}: {found.hint}" if found.cause else found.hint
    if found.remedy:
        yield f"try: {found.remedy}"
    for growth in found.growth:
        figures = ", ".join(f"{step}: {number:.4g}" for step, number in growth.figures)
        yield f"{_GROWN.get(growth.of, growth.of)} grew, by step: {figures}"


def _describe_after(found: NonFinite) -> Iterator[str]:
    """Yields lines on how far the values spread, and what remained finite."""
    after = found.after
    if after is None:
        return
    reached = ["the loss"] if after.loss else []
    if after.gradients:
        reached.append(f"{after.gradients} of {count_of(after.measured_gradients, 'gradient')} of parameters")
    if after.parameters_step is not None:
        reached.append(f"the parameters before the optimizer of step {after.parameters_step}")
    # Values that a backward or an optimizer made come after the loss.
    finite = ["the loss"] if after.loss is False and found.phase not in (BACKWARD, OPTIMIZER) else []
    if after.measured_gradients and not after.gradients:
        finite.append("the gradients of parameters")
    if after.parameters_step is None and (after.last_parameters_step or 0) > found.step:
        finite.append(f"the parameters before the optimizer of step {after.last_parameters_step}")
    if reached:
        yield f"reached {', '.join(reached)}"
    if after.skipped:
        yield f"no optimizer used the gradients of {after.skipped} of the last {after.trained} steps of this recording"
    if finite:
        yield f"finite all the same: {', '.join(finite)}"


def _describe_module(found: NonFinite) -> str:
    if found.path is None:
        of_parameter = f", for {found.source}" if found.kind == PRODUCER and found.source else ""
        return f" in the optimizer{of_parameter}" if found.phase == OPTIMIZER else " outside of modules"
    call = f" (call {found.call})" if found.call else ""
    return f" in {found.path or found.root}{call}" + (f" of {found.root}" if found.path else "")


def _describe_tensor(found: NonFinite) -> str:
    """Returns a description of a tensor by slot, module, call and root: `output ['logits'] of blocks.1@1 in GPT`."""
    known = BY_NAME.get(found.role or "")
    role = known.of_one if known else found.role or "a tensor of an unknown site"
    what = f"{role} {found.slot}".rstrip()
    if found.path is None:
        return what
    call = f"@{found.call}" if found.call else ""
    inside = f" in {found.root}" if found.path else ""
    return f"{what} of {found.path or found.root}{call}{inside}"


def _describe_size(found: NonFinite) -> str:
    """Returns the number of the tensor's elements, and the index of the first that is not finite."""
    size = count_of(found.numel, "element", format_count)
    index = ",".join(map(str, found.first_index or ()))
    return f"{size}, the first at [{index}]" if index else size


def _describe_none(measured: Measured, marks: Sequence[str]) -> str:
    if measured.held is not None:
        return f"no non-finite values in modules: {measured.held}"
    where = "in what is there of the recording: " if marks else "in "
    meant = "that matter, " if measured.nonfinite else ""
    text = f"no non-finite values {meant}{where}{measured.tensors:,} measured tensors of "
    others = measured.recorded_steps > measured.steps
    text += f"{measured.steps} of " * others + count_of(
        measured.recorded_steps if others else measured.steps, "step"
    )
    text += f", the last of them step {measured.last_step}" if marks else ""
    text += f" (of steps {measured.chosen_steps}; no others were recorded)" if measured.chosen_steps else ""
    if measured.nonfinite:
        held = f"{count_of(measured.nonfinite, 'tensor')} hold{'s' * (measured.nonfinite == 1)}"
        text += (
            f": what {held} came to no loss, gradient, parameter or returned output, or no optimizer used it"
        )
        text += " (--all lists who made it)"
        text += ", as far as the rows that are there tell" * bool(marks)
    if measured.unmeasured:
        text += f"; {measured.unmeasured:,} more could not be measured (column `note` of `values`)"
    return text
