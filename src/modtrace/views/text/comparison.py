"""Renders where two recordings part, as text for a terminal or as JSON."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace

from ...analysis.divergence.answer import (
    AMPLIFIED,
    FIRST,
    GROWN,
    MADE,
    SECOND,
    SEEN,
    SOURCE,
    Comparison,
    Divergence,
    Named,
    OneSided,
    Reshaped,
)
from ...analysis.divergence.errors import HASHES, NONFINITE, NOTHING, SAMPLES, SHAPES, SKETCHES, STATISTICS
from ...analysis.graph.parts import forms_of_op
from ...analysis.tables.op_rules import RANDOM
from ...analysis.tables.ops import bare_name
from ...recording.module_path import join
from ...recording.phase import OPTIMIZER
from ...recording.role import BUFFER, BY_NAME, OPTIMIZER_STATE, OUTPUT, PARAMETER, UPDATE
from ...recording.suggestions import count_of, first_few
from ..common.columns import Color, Text, printable, render_lines
from ..common.numbers import format_count, to_json
from .comparison_tables import format_error, render_growth_and_places

#: The number of rows that are shown of each table.
_LISTED = 10

#: The number of arguments of an op that are told to be other tensors.
_OPERANDS = 3

_ON_ROUNDING = (
    "Adam moves an element whose gradient is zero but for rounding as far as any other: where few parameters differ, "
    "look for such gradients first; the bias of attention's keys has them"
)

#: What is not seen by what tensors were compared by, the worst first.
_LIMITS = {
    STATISTICS: "statistics do not see elements that change places; of whole tensors Capture(hash=True, sketch=True) "
    "does",
    SAMPLES: "samples do not see single elements",
    SKETCHES: "sketches are right within a factor of 1.2 in 95 % of cases",
}


def render_comparison(
    found: Comparison, *, top: int | None = None, width: int | None = None, color: Color = False
) -> str:
    """Returns the answer, then by what it was found, the growth of the difference, and the places that made one.

    Args:
        found: the answer.
        top: rows of each table to show; None for a few.
        width: the width of the terminal, in characters; longer lines are broken. None: no limit.
        color: whether the text is styled for a terminal, or in which markup it is written.
    """
    top = _LISTED if top is None else top
    head = [
        *_describe_answer(found),
        *([Text(found.noise_text, "dim")] if found.within or found.beyond or found.absorbed else []),
        *([Text(f"names: {printable(', '.join(found.rules))}", "dim")] if found.rules else []),
        *_describe_environments(found),
        *(Text(f"! {printable(mark)}", "yellow") for mark in found.marks),
    ]
    parts = [render_lines(head, color=color, width=width)]
    unmatched = list(_list_unmatched(found, top))
    if unmatched:
        parts.append(render_lines(unmatched, color=color, width=width))
    parts += render_growth_and_places(found, name_place, top=top, width=width, color=color)
    return "\n".join(parts)


def describe_comparison(found: Comparison) -> list[str]:
    """Returns the answer in one line, and then all that `render_comparison` says besides."""
    answer = render_lines(list(_describe_answer(found)), color=False).splitlines()
    return [*answer, *(line for line in render_comparison(found).splitlines() if line not in answer)]


def describe_divergence(each: Divergence) -> list[str]:
    """Returns where a difference was made in one line, and then how."""
    given = f": {', '.join(each.arguments)}" if each.arguments else ""
    return [f"a difference at {_name(each)}{given}", *_explain(each)]


def render_comparison_json(found: Comparison) -> str:
    """Returns the fields as JSON; numbers that are not finite are text."""
    told = asdict(replace(found, table=None))
    del told["table"]
    return json.dumps(to_json(told)) + "\n"


def _describe_environments(found: Comparison) -> list[Text]:
    if not found.environment:
        return [Text("environments: equal", "dim")]
    first, *rest = found.environment
    lead = "environments: "
    return [
        Text(f"{lead}{printable(first)}", "yellow"),
        *(Text(" " * len(lead) + printable(each), "yellow") for each in rest),
    ]


def _describe_answer(found: Comparison) -> Iterator[Text]:
    first = found.first
    yield from _describe_reshaped(found)
    if first is None and found.is_void:
        yield Text(
            "what has the same shape in both runs is equal, and says nothing of what the model returns"
        )
    elif first is None and not found.ok:
        rest = (
            "only one of them has the rest" if found.missing or found.extra else "the rest has other shapes"
        )
        yield Text(f"what is in both runs is equal, and {rest}", "bold yellow")
    elif first is None:
        yield Text.join(_say_agreement(found))
        if (most := found.absorbed_most) is not None:
            yield Text(f"  the largest is {printable(_name(most))}: {_describe_error(most)}")
    else:
        told = [Text("the runs part at ", "bold"), Text(printable(_name(first)), "bold red")]
        if first.arguments:
            told.append(Text(printable(f": {', '.join(first.arguments)}"), "bold"))
        yield Text.join(told)
        if first.call:
            yield Text(f"  @{first.call} is call {first.call + 1} of the module in the step", "dim")
        yield from (Text(f"  {printable(line)}") for line in _explain(first))
        if not found.by_ops and first.role == OUTPUT and first.kind != SOURCE:
            yield Text(
                "  ops were not compared: record both runs with ops=True (--ops) to see which of them made it"
            )
    yield Text(_describe_compared(found))
    yield Text(_describe_metrics(found), "dim")


def _describe_reshaped(found: Comparison) -> Iterator[Text]:
    """Yields which outputs were not compared as their shapes differ; none where models return the same shapes."""
    if not any(pair.outermost for pair in found.reshaped):
        return
    each, others = found.reshaped[0], len(found.reshaped) - 1
    shapes = [f"{list(each.shape)}", f"{list(each.shape_b)}"]
    if each.calls != each.calls_b:
        counts = (each.calls, each.calls_b)
        shapes = [f"{n} x {shape}" if n > 1 else shape for n, shape in zip(counts, shapes, strict=True)]
    told = f"{printable(each.name)} is {shapes[0]} against {shapes[1]}"
    told += f", and {count_of(others, 'other output')} of modules" if others else ""
    yield Text.join([Text("the shapes differ: ", "bold red"), Text(told, "bold")])
    if found.is_void:
        yield Text(f"  {_guess_reason(each)}")
        yield Text("  nothing that a model returned was compared: give both runs the same inputs")


def _guess_reason(each: Reshaped) -> str:
    """Returns what makes such shapes: batches in parts, a cache, padding."""
    shape, shape_b = each.shape, each.shape_b
    if len(shape) != len(shape_b):
        return f"they have {len(shape)} and {len(shape_b)} axes"
    axes = [at for at, (size, size_b) in enumerate(zip(shape, shape_b, strict=True)) if size != size_b]
    if len(axes) > 1:
        return f"axes {', '.join(map(str, axes))} differ"
    [axis] = axes
    is_whole = each.calls * shape[axis] == each.calls_b * shape_b[axis]
    what = f"axis {axis} is {shape[axis]} in {count_of(each.calls, 'call')}, and {shape_b[axis]} in {each.calls_b}"
    if axis == 0:
        return f"{what}: " + ("a batch in parts, or the share of a rank" if is_whole else "another batch")
    if axis < len(shape) - 1:
        return f"{what}: " + (
            "a sequence in parts, as with a cache" if is_whole else "another length, as with padding"
        )
    return what


def _say_agreement(found: Comparison) -> Iterator[Text]:
    if found.absorbed_most is not None:
        yield Text("equal, up to noise", "bold green")
        yield Text(": what differs on the way comes to nothing, and all that is computed from it is equal")
    elif found.within:
        yield Text("equal, up to noise", "bold green")
        yield Text(": no difference is more than that")
    else:
        yield Text("equal", "bold green")
        yield Text(": nothing that was compared differs")


def _name(each: Divergence) -> str:
    return f"{name_place(each)}, step {each.step}" + (f", {each.phase}" if each.phase else "")


def name_place(each: Divergence) -> str:
    """Returns the op or the tensor with its module: `mul in blocks.0.attn`."""
    return f"{forms_of_op(each.op)[-1]} {_place(each)}" if each.op else _name_tensor(each)


def _place(each: Divergence) -> str:
    """Returns `in PATH`, or where an op is that is in no module."""
    if each.path is None:
        return "in the optimizer" if each.phase == OPTIMIZER else "outside of modules"
    return f"in {_module(each)}"


def _module(each: Divergence) -> str:
    return (each.path or each.root or "") + (f"@{each.call}" if each.call else "")


def _name_tensor(each: Divergence) -> str:
    known = BY_NAME.get(each.role)
    role = known.of_one if known else each.role
    if each.call is None and each.path is not None and each.slot:
        return f"{role} {join(each.path, each.slot)}"
    where = _place(each) if each.path is None else f"of {_module(each)}"
    return f"{role} {each.slot}".rstrip() + f" {where}"


def _explain(each: Divergence) -> Iterator[str]:
    if each.recompute_of is not None:
        yield f"what the {each.recompute_of} run recomputes differs from its own forward"
    if each.only_in is None:
        yield _explain_kind(each)
        yield _describe_error(each)
    else:
        explained = "" if each.kind == GROWN else f"; {_explain_kind(each).partition(',')[0]}"
        yield f"only the {each.only_in} run has it{explained}"
        yield f"it shows in {each.seen_at}: {_describe_error(each)}"
    if each.relation is not None:
        yield f"the second run's is {each.relation}"
    if each.leads_to is not None:
        yield f"that is less than noise; behind it summands cancel, and it becomes {each.leads_to}"
    if each.through is not None and each.only_in is not None:
        other = SECOND if each.only_in == FIRST else FIRST
        yield f"in its place the {other} run has {each.through}, which the {each.only_in} lacks"
    elif each.through is not None:
        yield f"it depends on {each.through}"
    if each.other is not None:
        what = "it" if each.only_in is None else "what is compared"
        yield f"in the second run {what} is {each.other or 'outside of modules'}"
    names = ("first", "second") if each.recompute_of is None else ("forward", "recompute")
    yield from (
        f"{name:<{len(names[1])}}  {text}" for name, text in zip(names, (each.a, each.b), strict=True)
    )
    if each.largest is not None and each.where is not None and each.pair is not None:
        at = ", ".join(map(str, each.where))
        yield f"most at [{at}]: {each.pair[0]:.6g} and {each.pair[1]:.6g}" + _describe_tensors(each)
    if each.source_line:
        yield f"at {each.source_line}"
    yield from _advise(each)


def _advise(each: Divergence) -> Iterator[str]:
    """Yields what makes the runs comparable where they begin with other numbers, or what else to look at."""
    if each.states:
        yield "load the state of the optimizer, too, or begin both without"
    elif each.updated_since is not None or (each.role in (UPDATE, OPTIMIZER_STATE) and each.input_error):
        if 2 * each.updated[0] <= each.updated[1]:
            yield _ON_ROUNDING
    elif each.kind == SOURCE and each.role in (PARAMETER, BUFFER):
        yield "give both the same seed, or load the same weights"
    elif each.kind == SOURCE:
        yield "give both the same input"
    elif each.kind in (MADE, SEEN) and each.op is not None and bare_name(each.op) in RANDOM:
        if each.recompute_of is None:
            yield "it draws random numbers: give both the same seed, and draw as often before it"
        else:
            yield "it draws random numbers: checkpoint(preserve_rng_state=True) draws the same again"


def _describe_tensors(each: Divergence) -> str:
    told = [f"{each.close_share:.1%} of the elements within 0.1 %"] if each.close_share is not None else []
    if each.cosine is not None and not math.isnan(each.cosine):
        told.append(f"cosine {each.cosine:.6f}")
    if each.ulps is not None and each.ulps < 1e6:
        told.append(f"{each.ulps:.0f} ulp")
    return f" ({', '.join(told)})" if told else ""


def _explain_kind(each: Divergence) -> str:
    if each.updated_since is not None:
        differing, every = each.updated
        return (
            f"in step {each.updated_since} it was apart by noise at most; its optimizer has moved it elsewhere since: "
            f"{differing} of {count_of(every, 'parameter')} now differ"
        )
    if each.states:
        return f"its optimizer began with another state: {', '.join(each.states)}"
    if each.kind == SOURCE:
        return "it differs before the step has computed anything"
    if each.operands and each.kind != AMPLIFIED:
        return f"it reads another tensor: {first_few(each.operands, _OPERANDS)}"
    if each.turned:
        return f"what it reads is equal, but its axes were put in another order: {each.turned}"
    if each.kind == MADE and each.through is not None and each.only_in is None:
        before = "apart by noise" if each.input_error else "equal"
        return f"it made the difference, or ops before it that one run alone has: what these read is {before}"
    if each.kind == MADE and each.arguments and not each.input_error:
        return "the tensors that it reads are equal, its output is not"
    if each.kind == MADE and each.metric == STATISTICS and each.input_error:
        return "its inputs have like statistics, its output has others; before it, elements may have changed places"
    if each.kind == MADE:
        return (
            "its inputs are equal, its output is not"
            if not each.input_error
            else ("its inputs are apart by noise, its output by more")
        )
    if each.kind == AMPLIFIED:
        return f"its output is {each.amplification:.3g} times farther apart than its inputs"
    if each.kind == SEEN:
        before = "apart by noise" if each.input_error else "equal"
        return f"what was measured before it is {before}; its inputs were not compared"
    assert each.kind == GROWN
    return "no op or module stands out: small differences have added up, and here they are more than noise"


def _describe_error(each: Divergence) -> str:
    if each.metric == SHAPES:
        return "the shapes differ"
    if each.metric == NONFINITE or (math.isinf(each.error) and each.metric != HASHES):
        return "one has more NaN or infinite elements"
    if each.metric == HASHES and math.isinf(each.error):
        return "the hashes differ, and nothing else was measured"
    noise = f"noise is {format_error(each.noise)}"
    bounds = f" ({format_error(each.low)} to {format_error(each.high)})" if each.metric == SKETCHES else ""
    return f"relative error {format_error(each.error)}{bounds}, {noise}"


def _describe_compared(found: Comparison) -> str:
    text = f"compared {count_of(found.compared, 'tensor', format_count)} of {_describe_steps(found)}"
    counts = [(found.equal, "equal"), (found.within, "within noise"), (found.absorbed, "absorbed")]
    counts = [(count, what) for count, what in counts if count or what == "equal"]
    if found.first is not None:
        counts += [(found.inherited, "differ as their inputs do"), (found.made, "made a difference")]
    text += ": " + ", ".join(f"{format_count(count)} {what}" for count, what in counts)
    text += f"; {format_count(found.unmeasured)} not compared" if found.unmeasured else ""
    return text


def _describe_steps(found: Comparison) -> str:
    if len(found.steps) == 1 and found.steps[0][0] != found.steps[0][1]:
        return f"step {found.steps[0][0]} and step {found.steps[0][1]}"
    return count_of(len(found.steps), "step")


def _describe_metrics(found: Comparison) -> str:
    """Returns by what how many tensors were compared, and what that cannot tell."""
    told = [f"{name} {format_count(count)}" for name, count in found.metrics if name != NOTHING]
    there = dict(found.metrics)
    limits = [limit for name, limit in _LIMITS.items() if name in there]
    return "; ".join([f"by {', '.join(told)}", *limits[:1]])


def _list_unmatched(found: Comparison, top: int) -> Iterator[Text]:
    for name, side in (("first", found.missing), ("second", found.extra)):
        if side:
            yield Text(f"only in the {name} run: {_count_unmatched(side)}", "yellow")
            for kind in (
                side.modules,
                *(tuple(map(_name_one, each)) for each in (side.ops, side.calls, side.tensors)),
            ):
                if kind:
                    yield Text(f"  {printable(first_few(kind, max(top // 3, 1)))}")
                    break
    if found.proposed:
        yield Text('try map="auto" (--map auto), which stands for these rules, or give your own:')
        yield from (Text(f"  {printable(rule)}") for rule in found.proposed[:top])


def _name_one(each: Named) -> str:
    return each.name + (f" x{each.count}" if each.count > 1 else "")


def _count_unmatched(side: OneSided) -> str:
    counts = [
        (len(side.modules), "module"),
        (sum(call.count for call in side.calls), "call"),
        (sum(op.count for op in side.ops), "op"),
        (sum(tensor.count for tensor in side.tensors), "tensor"),
    ]
    return ", ".join(count_of(count, noun, format_count) for count, noun in counts if count)
