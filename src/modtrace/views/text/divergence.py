"""Describes one difference between two runs: where it came up, how large it is, and what made it."""

import math
from collections.abc import Iterator

from ...analysis.divergence.answer import (
    AMPLIFIED,
    FIRST,
    GROWN,
    MADE,
    SECOND,
    SEEN,
    SOURCE,
    Divergence,
)
from ...analysis.divergence.errors import HASHES, NONFINITE, SHAPES, SKETCHES, STATISTICS
from ...analysis.graph.parts import forms_of_op
from ...analysis.tables.op_rules import RANDOM
from ...analysis.tables.ops import bare_name
from ...recording.module_path import join
from ...recording.phase import OPTIMIZER
from ...recording.role import BUFFER, BY_NAME, OPTIMIZER_STATE, PARAMETER, UPDATE
from ...recording.suggestions import count_of, first_few, name_ranks
from .comparison_tables import format_error

#: The number of an op's operands that are named as other tensors.
_OPERANDS = 3

_ON_ROUNDING = (
    "Adam moves an element whose gradient is zero but for rounding as far as any other: where few parameters differ, "
    "look for such gradients first; the bias of attention's keys has them"
)


def describe_divergence(diff: Divergence) -> list[str]:
    """Returns one line on where a difference was made, followed by lines on how."""
    given = f": {', '.join(diff.arguments)}" if diff.arguments else ""
    return [f"a difference at {name_divergence(diff)}{given}", *explain_divergence(diff)]


def name_divergence(diff: Divergence) -> str:
    """Returns where a difference came up, with its step and phase, and the ranks, if these were compared one by one."""
    phase = f", {diff.phase}" if diff.phase else ""
    return f"{name_place(diff)}, step {diff.step}{phase}" + (
        f", on {name_ranks(diff.ranks)}" if diff.ranks else ""
    )


def name_place(diff: Divergence) -> str:
    """Returns the name of the op or tensor with its module: `mul in blocks.0.attn`."""
    return f"{forms_of_op(diff.op)[-1]} {_place(diff)}" if diff.op else _name_tensor(diff)


def _place(diff: Divergence) -> str:
    """Returns `in PATH`, or where an op ran outside of modules."""
    if diff.path is None:
        return "in the optimizer" if diff.phase == OPTIMIZER else "outside of modules"
    return f"in {_module(diff)}"


def _module(diff: Divergence) -> str:
    return (diff.path or diff.root or "") + (f"@{diff.call}" if diff.call else "")


def _name_tensor(diff: Divergence) -> str:
    known = BY_NAME.get(diff.role)
    role = known.of_one if known else diff.role
    if diff.call is None and diff.path is not None and diff.slot:
        return f"{role} {join(diff.path, diff.slot)}"
    where = _place(diff) if diff.path is None else f"of {_module(diff)}"
    return f"{role} {diff.slot}".rstrip() + f" {where}"


def explain_divergence(diff: Divergence) -> Iterator[str]:
    """Yields lines on what made a difference, its size, what it leads to, and what to do."""
    if diff.recompute_of is not None:
        yield f"what the {diff.recompute_of} run recomputes differs from its own forward"
    if diff.only_in is None:
        yield _explain_kind(diff)
        yield describe_error(diff)
    else:
        explained = "" if diff.kind == GROWN else f"; {_explain_kind(diff).partition(',')[0]}"
        yield f"only the {diff.only_in} run has it{explained}"
        yield f"it shows in {diff.seen_at}: {describe_error(diff)}"
    if diff.relation is not None:
        yield f"the second run's is {diff.relation}"
    if diff.leads_to is not None:
        yield f"that is less than noise; behind it summands cancel, and it becomes {diff.leads_to}"
    if diff.through is not None and diff.only_in is not None:
        other = SECOND if diff.only_in == FIRST else FIRST
        yield f"in its place the {other} run has {diff.through}, which the {diff.only_in} lacks"
    elif diff.through is not None:
        yield f"it depends on {diff.through}"
    if diff.other is not None:
        what = "it" if diff.only_in is None else "what is compared"
        yield f"in the second run {what} is {diff.other or 'outside of modules'}"
    names = ("first", "second") if diff.recompute_of is None else ("forward", "recompute")
    yield from (
        f"{name:<{len(names[1])}}  {text}" for name, text in zip(names, (diff.a, diff.b), strict=True)
    )
    if diff.largest is not None and diff.where is not None and diff.pair is not None:
        at = ", ".join(map(str, diff.where))
        yield f"most at [{at}]: {diff.pair[0]:.6g} and {diff.pair[1]:.6g}" + _describe_tensors(diff)
    if diff.source_line:
        yield f"at {diff.source_line}"
    yield from _advise(diff)


def _advise(diff: Divergence) -> Iterator[str]:
    """Yields advice on how to make the runs comparable if their inputs differ, or what to check next."""
    if diff.states:
        yield "load the state of the optimizer, too, or begin both without"
    elif diff.updated_since is not None or (diff.role in (UPDATE, OPTIMIZER_STATE) and diff.input_error):
        if diff.relation is None and 2 * diff.updated[0] <= diff.updated[1]:
            yield _ON_ROUNDING
    elif diff.kind == SOURCE and diff.role in (PARAMETER, BUFFER):
        yield "give both the same seed, or load the same weights"
    elif diff.kind == SOURCE:
        yield "give both the same input"
    elif diff.kind in (MADE, SEEN) and diff.op is not None and bare_name(diff.op) in RANDOM:
        if diff.recompute_of is None:
            yield "it draws random numbers: give both the same seed, and draw as often before it"
        else:
            yield "it draws random numbers: checkpoint(preserve_rng_state=True) draws the same again"


def _describe_tensors(diff: Divergence) -> str:
    told = [f"{diff.close_share:.1%} of the elements within 0.1 %"] if diff.close_share is not None else []
    if diff.cosine is not None and not math.isnan(diff.cosine):
        told.append(f"cosine {diff.cosine:.6f}")
    if diff.ulps is not None and diff.ulps < 1e6:
        told.append(f"{diff.ulps:.0f} ulp")
    return f" ({', '.join(told)})" if told else ""


def _explain_kind(diff: Divergence) -> str:
    if diff.updated_since is not None:
        differing, every = diff.updated
        return (
            f"in step {diff.updated_since} it was apart by noise at most; "
            "its optimizer, or a write by hand, has moved it elsewhere since: "
            f"{differing} of {count_of(every, 'parameter')} now differ"
        )
    if diff.states:
        return f"its optimizer began with another state: {', '.join(diff.states)}"
    if diff.kind == SOURCE:
        return "it differs before the step has computed anything"
    if diff.operands and diff.kind != AMPLIFIED:
        return f"it reads another tensor: {first_few(diff.operands, _OPERANDS)}"
    if diff.turned:
        return f"what it reads is equal, but its axes were put in another order: {diff.turned}"
    if diff.kind == MADE and diff.through is not None and diff.only_in is None:
        before = "apart by noise" if diff.input_error else "equal"
        return f"it made the difference, or ops before it that one run alone has: what these read is {before}"
    if diff.kind == MADE and diff.arguments and not diff.input_error:
        return "the tensors that it reads are equal, its output is not"
    if diff.kind == MADE and diff.metric == STATISTICS and diff.input_error:
        return (
            "the statistics of its inputs agree, those of its output do not; they do not show elements that changed "
            "places before it"
        )
    if diff.kind == MADE:
        return (
            "its inputs are equal, its output is not"
            if not diff.input_error
            else ("its inputs are apart by noise, its output by more")
        )
    if diff.kind == AMPLIFIED:
        return f"its output is {diff.amplification:.3g} times farther apart than its inputs"
    if diff.kind == SEEN:
        before = "apart by noise" if diff.input_error else "equal"
        return f"what was measured before it is {before}; its inputs were not compared"
    assert diff.kind == GROWN
    return "no op or module stands out: small differences have added up, and here they are more than noise"


def describe_error(diff: Divergence) -> str:
    """Returns how far the two tensors are apart, beside the noise."""
    if diff.metric == SHAPES:
        return "the shapes differ"
    if diff.metric == NONFINITE or (math.isinf(diff.error) and diff.metric != HASHES):
        return "one has more NaN or infinite elements"
    if diff.metric == HASHES and math.isinf(diff.error):
        return "the hashes differ, and nothing else was measured"
    noise = f"noise is {format_error(diff.noise)}"
    bounds = f" ({format_error(diff.low)} to {format_error(diff.high)})" if diff.metric == SKETCHES else ""
    return f"relative error {format_error(diff.error)}{bounds}, {noise}"
