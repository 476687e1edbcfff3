"""Describes the lines above and below a module tree: its steps, and the rest of the time."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from ...analysis.modules.module_tree import ModuleTree
from ...analysis.tables.cycles import CycleSummary
from ...recording.suggestions import first_few
from ..common.columns import (
    FittedColumns,
    Legend,
    Text,
    explain_columns,
)
from ..common.headline import NO_DEVICE_TIMES, QUARTILES_LEGEND, describe_head, describe_notes
from ..common.numbers import format_share, format_time
from .compilations import describe_rest
from .value_columns import DISPENSABLE_VALUES, VALUES_LEGEND

#: A part of a step's time is named from this share on, as far as the line has room.
_LEAST_SHARE, _LINE = 0.005, 80

#: The largest number of models of other steps that are named.
_MOST_MODELS = 4

#: Fewer training steps that call something else are not named: the last one of an epoch may be cut off.
_LEAST_UNLIKE = 3

#: A text for recordings without any backward calls.
BACKWARD_HINT = "record with --backward-times (backward_times=True)"

#: A text for recordings with ops, as each op then goes through Python.
OPS_NOTE = "times contain the recording of each op: without --ops (ops=True) they are shorter"

#: A text for columns of both phases: a checkpointed block is recomputed when its backward first needs a tensor.
RECOMPUTE_NOTE = "backward times include the recompute that ran inside them"

_TIMES_LEGEND: Legend = (
    ((("self",), "self: without the modules inside"), (("%",), "%: of the time of the step")),
    *QUARTILES_LEGEND,
)

#: A text for columns of device times.
DEVICE_TIMES_NOTE = "device: from when a device could begin what a call issued until it had done it"


def describe_headline(tree: ModuleTree, run: str | None) -> list[Text]:
    """Returns which step is shown, how long it took and where the time went, and what there is besides it."""
    outside = " outside of compiled functions" if tree.compilations is not None else ""
    missing = "" if tree.roots else f"no module was called{outside}"
    cycle = None if tree.cycles is None else _describe_cycles(tree.cycles)
    return [
        *describe_head(
            tree.command, tree.step, tree.marks, missing=missing, cycle=cycle, outliers=tree.outliers
        ),
        *_describe_other_steps(tree, run),
        *_describe_nonfinite_steps(tree, run),
        *describe_notes(tree.notes),
    ]


def _describe_cycles(cycles: CycleSummary) -> str:
    """Returns where the time between two starts of training steps goes, most first; what does not fit is `others`."""
    head = f"a step every {format_time(cycles.cycle_ns)}: "
    parts = sorted(cycles.parts_ns, key=cycles.share, reverse=True)
    named = [part for part in parts if cycles.share(part) >= _LEAST_SHARE]
    texts = [f"{part} {100 * cycles.share(part):.0f}%" for part in named]
    while True:
        left = 1 - sum(map(cycles.share, named[: len(texts)]))
        line = head + ", ".join([*texts, *([f"others {100 * left:.0f}%"] if left >= _LEAST_SHARE else [])])
        if len(line) <= _LINE or len(texts) < 2:
            return line
        texts.pop()


def _describe_other_steps(tree: ModuleTree, run: str | None) -> Iterator[Text]:
    """Yields a line on what other steps call, with a step that shows most of it."""
    if tree.elsewhere:
        step = Counter(tree.elsewhere.values()).most_common(1)[0][0]
        names = [name for name, newest in tree.elsewhere.items() if newest == step]
        others = len(tree.elsewhere) - len(names)
        what = f"other steps call {first_few(names, _MOST_MODELS)}{f' (and {others} in others)' if others else ''}"
    elif len(tree.unlike) >= _LEAST_UNLIKE:
        step = tree.unlike[-1]
        what = f"{len(tree.unlike)} training steps between them call models or optimizers otherwise"
    else:
        return
    how = (
        f"module_tree(step={step})"
        if run is None
        else shlex.join(["modtrace", "show", run, "--step", str(step)])
    )
    yield Text(f"{what}: {how}", "yellow")


def _describe_nonfinite_steps(tree: ModuleTree, run: str | None) -> Iterator[Text]:
    """Yields lines on NaN or infinite values, in this step or others, and how to learn more about them."""
    if not tree.nonfinite_steps:
        return
    first, count = tree.nonfinite_steps[0], len(tree.nonfinite_steps)
    steps = f"in step {first}" if count == 1 else f"in {count} steps, first in step {first}"
    is_here = tree.step is not None and tree.step.step in tree.nonfinite_steps
    shown = "this one" if tree.step is None or tree.step.sample is None else f"step {tree.step.step}"
    elsewhere = "" if is_here else f", not in {shown}"
    more = "rec.first_nonfinite()" if run is None else shlex.join(["modtrace", "nonfinite", run])
    yield Text(f"! NaN or infinite values {steps}{elsewhere}; do they matter? {more}", "bold yellow")


def title_of(phase: str, tree: ModuleTree) -> str:
    """Returns the title of the columns of a phase."""
    return f"device {phase}" if tree.device_times else phase


def describe_foot(tree: ModuleTree, tables: Sequence[FittedColumns]) -> list[Text]:
    """Returns what the tables do not show: the optimizer, the time outside of modules, and explanations of columns."""
    titles = {title for table in tables for title in table.titles}
    lines = [] if tree.compilations is None else list(describe_rest(tree.compilations))
    if tree.optimizer.calls:
        share = tree.optimizer.share
        own = tree.optimizer.self_ns / max(tree.optimizer.total_ns, 1)
        lines.append(
            _describe_remainder("optimizer", tree.optimizer.self_ns, None if share is None else share * own)
        )
    if tree.outside_ns is not None:
        lines.append(_describe_remainder("outside of modules", tree.outside_ns, tree.outside_share))
    if {title_of("recompute", tree), title_of("backward", tree)} <= titles:
        lines.append(Text(RECOMPUTE_NOTE, "dim"))
    lines += explain_columns([*_TIMES_LEGEND, *VALUES_LEGEND], titles)
    is_last = tree.step is not None and tree.values_step == tree.step.step
    if not is_last and tree.values_step is not None:
        lines.append(
            Text(f"NaN, inf, out, grad, grad/param: of step {tree.values_step}, the first bad one", "dim")
        )
    elif tree.step is not None and tree.step.sample is not None and not titles.isdisjoint(DISPENSABLE_VALUES):
        lines.append(Text(f"out, grad, grad/param: of step {tree.step.step}, the last of them", "dim"))
    if tree.device_times:
        step = f"; the step took it {format_time(tree.device_step_ns)}" if tree.device_step_ns else ""
        lines.append(Text(f"{DEVICE_TIMES_NOTE}{step}", "dim"))
    if tree.lacks_device_times:
        lines.append(Text(NO_DEVICE_TIMES, "dim"))
    if tree.ops_recorded and not tree.device_times:
        lines.append(Text(OPS_NOTE, "dim"))
    if tree.roots and not tree.backward_recorded:
        where = "backward times" if tree.outside_ns is None else "backward counts as outside"
        lines.append(Text(f"{where}: {BACKWARD_HINT}", "dim"))
    return lines


def _describe_remainder(name: str, time_ns: int, share: float | None) -> Text:
    of_step = "" if share is None else f" {format_share(share):>7}"
    return Text(f"{name:<18}{format_time(time_ns):>8}{of_step}")
