"""Renders the comparison of two recordings, as text for a terminal or as JSON."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from ...analysis.divergence.answer import (
    FIRST,
    SECOND,
    SOURCE,
    Comparison,
    Divergence,
    Named,
    OneSided,
    Reshaped,
)
from ...analysis.divergence.errors import NOTHING, SAMPLES, SKETCHES, STATISTICS
from ...analysis.tables.chosen_step import name_steps
from ...recording.role import OUTPUT, PARAMETER
from ...recording.suggestions import count_of, first_few, name_ranks
from ..common.columns import Color, Text, render_lines
from ..common.numbers import format_count, to_json
from .comparison_tables import render_growth_and_places
from .divergence import describe_error, explain_divergence, name_divergence, name_place

#: The default number of rows shown of each table.
_LISTED = 10

#: The number of reasons why tensors were not compared.
_REASONS = 3

#: The largest number of used rules that share a line.
_RULES_IN_A_LINE = 4

#: How a line on unequal seeds begins among those on the environments.
_SEEDS = "seed"

#: Differences that each metric cannot see, the worst metric first.
_LIMITS = {
    STATISTICS: "statistics do not see elements that change places; of whole tensors Capture(hash=True, sketch=True) "
    "does",
    SAMPLES: "samples do not see single elements",
    SKETCHES: "sketches are right within a factor of 1.2 in 95 % of cases",
}


def render_comparison(
    found: Comparison, *, top: int | None = None, width: int | None = None, color: Color = False
) -> str:
    """Returns the answer, the metrics behind it, the growth of the difference, and the places that made one.

    Args:
        found: the answer.
        top: rows of each table to show; None for a few.
        width: the width of the terminal, in characters; longer lines are broken. None: no limit.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    top = _LISTED if top is None else top
    head = [
        *_describe_answer(found),
        *([Text(found.noise_text, "dim")] if found.within or found.beyond or found.absorbed else []),
        *(Text(line, "dim") for line in _list_used_rules(found.rules, top)),
        *_describe_environments(found),
        *(Text(f"! {mark}", "yellow") for mark in found.marks),
    ]
    parts = [render_lines(head, color=color, width=width)]
    unmatched = list(_list_unmatched(found, top))
    if unmatched:
        parts.append(render_lines(unmatched, color=color, width=width))
    parts += render_growth_and_places(found, name_place, top=top, width=width, color=color)
    return "\n".join(parts)


def describe_comparison(found: Comparison) -> list[str]:
    """Returns the answer in one line, followed by the other lines of `render_comparison`."""
    answer = render_lines(list(_describe_answer(found)), color=False).splitlines()
    return [*answer, *(line for line in render_comparison(found).splitlines() if line not in answer)]


def render_comparison_json(found: Comparison) -> str:
    """Returns the fields as JSON; numbers that are not finite are text."""
    told = asdict(replace(found, table=None, pair=None))
    del told["table"], told["pair"]
    return json.dumps(to_json(told)) + "\n"


def _describe_environments(found: Comparison) -> list[Text]:
    if not found.environment:
        return [Text("environments: equal", "dim")]
    first, *rest = found.environment
    lead = "environments: "
    return [
        Text(f"{lead}{first}", "yellow"),
        *(Text(" " * len(lead) + line, "yellow") for line in rest),
    ]


def _describe_answer(found: Comparison) -> Iterator[Text]:
    first = found.first
    yield from _describe_reshaped(found)
    if first is None and found.is_void:
        yield Text(
            "what has the same shape in both runs is equal, and says nothing of what the model returns"
        )
    elif first is None and not found.ok:
        rest = _describe_rest(found) if found.missing or found.extra else "the rest has other shapes"
        yield Text(f"what is in both runs is equal, and {rest}", "bold yellow")
    elif first is None:
        yield Text.join(_say_agreement(found))
        if (most := found.absorbed_most) is not None:
            yield Text(f"  the largest is {name_divergence(most)}: {describe_error(most)}")
    else:
        told = [
            *_introduce_unpaired(first),
            Text("the runs part at ", "bold"),
            Text(name_divergence(first), "bold red"),
        ]
        if first.arguments:
            told.append(Text(f": {', '.join(first.arguments)}", "bold"))
        yield Text.join(told)
        if first.call:
            yield Text(f"  @{first.call} is call {first.call + 1} of the module in the step", "dim")
        yield from _describe_other_ranks(found, first)
        yield from (Text(f"  {line}") for line in explain_divergence(first))
        yield from _doubt_seed(found, first)
        if len(found.without_ops) == 1:
            yield Text(
                f"  modules were compared, not ops, which were not recorded in the {found.without_ops[0]} run: record "
                "it, too, with ops=True (--ops)"
            )
        elif not found.by_ops and first.role == OUTPUT and first.kind != SOURCE:
            yield Text(
                "  ops were not compared: record both runs with ops=True (--ops) to see which of them made it"
            )
    yield Text(_describe_compared(found))
    yield Text(_describe_metrics(found), "dim")


def _describe_other_ranks(found: Comparison, first: Divergence) -> Iterator[Text]:
    """Yields lines on the ranks that do not part where the first does."""
    parting = defaultdict[Divergence | None, list[int]](list)
    for rank in found.ranks:
        place = next((place for place in found.divergences if rank in place.ranks), None)
        parting[place].append(rank)
    for place, ranks in parting.items():
        if place is None:
            yield Text(f"  on {name_ranks(ranks)} the runs agree")
        elif place is not first:
            verb = "parts" if len(ranks) == 1 else "part"
            yield Text(f"  {name_ranks(ranks)} {verb} later: at {name_divergence(replace(place, ranks=()))}")


def _describe_rest(found: Comparison) -> str:
    """Returns what one of two runs has alone that are equal in all that both have."""
    sides = ((FIRST, found.missing), (SECOND, found.extra))
    whys = {named.why for _, side in sides for named in (*side.calls, *side.ops, *side.tensors)}
    if not whys <= {"step", ""} or not (found.missing.steps or found.extra.steps):
        return "only one of them has the rest; allow_missing=True (--allow-missing) lets them agree"
    [(name, steps), *more] = [(name, side.steps) for name, side in sides if side.steps]
    last = found.steps[-1] if name == FIRST else found.steps[-1][::-1]
    if more or steps[0] < last[0]:
        every = [(name, steps), *more]
        return "; ".join(f"only the {name} run has step {name_steps(steps)}" for name, steps in every)
    other = SECOND if name == FIRST else FIRST
    return f"the {other} run stops after step {last[1]}, the {name} after step {steps[-1]}"


def _doubt_seed(found: Comparison, first: Divergence) -> Iterator[Text]:
    """Yields a line on a module of one run alone that may have taken the random numbers of others as it was made.

    It has parameters, and the seeds are equal as far as they are known.
    """
    if (
        first.kind != SOURCE
        or first.role != PARAMETER
        or any(line.startswith(_SEEDS) for line in found.environment)
    ):
        return
    alone = [
        (run, side.modules[0])
        for run, side in ((FIRST, found.missing), (SECOND, found.extra))
        if side.modules and any(tensor.name.startswith(f"{PARAMETER} ") for tensor in side.tensors)
    ]
    if len(alone) == 1:
        [(run, name)] = alone
        yield Text(
            f"  the same seed is not enough if {name}, which only the {run} run has, drew from it before"
        )


def _introduce_unpaired(first: Divergence) -> Iterator[Text]:
    """Yields the modules that only one run has and behind which the runs part.

    Without ops it is not known what reads their outputs: they were called last before it.
    """
    if not first.behind:
        return
    has = [f"only the {unpaired.only_in} run has {unpaired.name}" for unpaired in first.behind]
    yield Text(", and ".join(has), "bold red")
    if first.op is None:
        where = ""
    elif first.only_in is None:
        where = "behind it "
    else:  # the op has no partner either
        own = [unpaired.name for unpaired in first.behind if unpaired.only_in == first.only_in]
        where = "".join("there " if _is_inside(first, name) else "behind it " for name in own)
    yield Text(f"; {where}", "bold")


def _is_inside(first: Divergence, name: str) -> bool:
    """Returns whether the runs part inside of a module, with the name of an `UnpairedModule`."""
    path = name.rpartition(" (")[0]
    return f"{first.path or first.root}.".startswith(f"{path}.")


def _describe_reshaped(found: Comparison) -> Iterator[Text]:
    """Yields lines on outputs that were not compared because their shapes differ."""
    if not any(pair.outermost for pair in found.reshaped):
        return
    change, others = found.reshaped[0], len(found.reshaped) - 1
    shapes = [f"{list(change.shape)}", f"{list(change.shape_b)}"]
    if change.calls != change.calls_b:
        counts = (change.calls, change.calls_b)
        shapes = [f"{n} x {shape}" if n > 1 else shape for n, shape in zip(counts, shapes, strict=True)]
    told = f"{change.name} is {shapes[0]} against {shapes[1]}"
    told += f", and {count_of(others, 'other output')} of modules" if others else ""
    yield Text.join([Text("the shapes differ: ", "bold red"), Text(told, "bold")])
    if found.is_void:
        yield Text(f"  {_guess_reason(change)}")
        yield Text("  nothing that a model returned was compared: give both runs the same inputs")


def _guess_reason(change: Reshaped) -> str:
    """Returns a likely reason for such shapes: batches in parts, a cache, padding."""
    shape, shape_b = change.shape, change.shape_b
    if len(shape) != len(shape_b):
        return f"they have {len(shape)} and {len(shape_b)} axes"
    axes = [at for at, (size, size_b) in enumerate(zip(shape, shape_b, strict=True)) if size != size_b]
    if len(axes) > 1:
        return f"axes {', '.join(map(str, axes))} differ"
    [axis] = axes
    is_whole = change.calls * shape[axis] == change.calls_b * shape_b[axis]
    what = f"axis {axis} is {shape[axis]} in {count_of(change.calls, 'call')}, and {shape_b[axis]} in {change.calls_b}"
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


def _describe_compared(found: Comparison) -> str:
    text = f"compared {count_of(found.compared, 'tensor', format_count)} of {_describe_steps(found)}"
    counts = [(found.equal, "equal"), (found.within, "within noise"), (found.absorbed, "absorbed")]
    counts = [(count, what) for count, what in counts if count or what == "equal"]
    if found.first is not None:
        counts += [(found.inherited, "differ as their inputs do"), (found.made, "made a difference")]
    text += ": " + ", ".join(f"{format_count(count)} {what}" for count, what in counts)
    if not found.unmeasured:
        return text
    why = [f"{format_count(count)} {why}" for why, count in found.unmeasured_why]
    if len(why) == 1:
        why = [found.unmeasured_why[0][0]]
    return f"{text}; {format_count(found.unmeasured)} not compared" + (
        f" ({first_few(why, _REASONS)})" if why else ""
    )


def _describe_steps(found: Comparison) -> str:
    if len(found.steps) == 1 and found.steps[0][0] != found.steps[0][1]:
        return f"step {found.steps[0][0]} and step {found.steps[0][1]}"
    ranks = f" on {count_of(len(found.ranks), 'rank')}" if found.ranks else ""
    return count_of(len(found.steps), "step") + ranks


def _describe_metrics(found: Comparison) -> str:
    """Returns how many tensors were compared by each metric, and what that cannot show."""
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
                *(tuple(map(_name_one, names)) for names in (side.ops, side.calls, side.tensors)),
            ):
                if kind:
                    yield Text(f"  {first_few(kind, max(top // 3, 1))}")
                    break
    if found.proposed:
        yield Text('try map="auto" (--map auto), which stands for these rules, or give your own:')
        yield from map(Text, _list_rules(found.proposed, top))


def _list_used_rules(rules: Sequence[str], top: int) -> Iterator[str]:
    """Yields the rules by which modules were paired: a few in a line, many in a line each."""
    if 0 < len(rules) <= _RULES_IN_A_LINE:
        yield f"names: {', '.join(rules)}"
    elif rules:
        yield "names:"
        yield from _list_rules(rules, top)


def _list_rules(rules: Sequence[str], top: int) -> Iterator[str]:
    yield from (f"  {rule}" for rule in rules[:top])
    if len(rules) > top:
        yield f"  … and {len(rules) - top} more"


def _name_one(named: Named) -> str:
    return named.name + (f" x{named.count}" if named.count > 1 else "")


def _count_unmatched(side: OneSided) -> str:
    counts = [
        (len(side.steps), "step"),
        (len(side.modules), "module"),
        (sum(call.count for call in side.calls), "call"),
        (sum(op.count for op in side.ops), "op"),
        (sum(tensor.count for tensor in side.tensors), "tensor"),
    ]
    return ", ".join(count_of(count, noun, format_count) for count, noun in counts if count)
