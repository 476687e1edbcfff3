"""Renders what torch.compile did: the reasons for compiling again, graph breaks, errors, and regions."""

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...analysis.compile.compilations import Compilations, CompiledRegion, Inside, Reason
from ...analysis.compile.texts import CodeLine
from ...recording.module_path import is_below
from ...recording.suggestions import count_of
from ..common.columns import Column, Text, printable
from ..common.numbers import format_time

_KINDS = {"error": "not compiled", "guard": "compiled again", "break": "graph broken"}
_TO_DO = "to do: "

#: The largest number of reasons of each kind that are shown; JSON has all of them.
_SHOWN = 4
#: The largest number of characters shown of torch's text; JSON has all of it.
_LONGEST = 200
#: The largest number of changed values shown, and of characters of each.
_SHOWN_VALUES = 4
_LONGEST_VALUE = 40
#: The largest number of modules without rows that are named, and of their groups.
_SHOWN_MODULES = 8
#: The largest number of regions shown, starting with those that took longest to compile.
_SHOWN_REGIONS = 20

#: Columns of the table of regions that are left out in this order if the width is too small.
DISPENSABLE_REGIONS = ("guards", "backwards", "compiling")


def describe_compilations(found: Compilations) -> Iterator[Text]:
    """Yields the lines above the table: what went wrong, where, why, and what to do."""
    if found.count:
        went_wrong = found.errors or found.recompilations or found.graph_breaks
        yield Text(_headline(found), "yellow" if went_wrong else "cyan")
    for reasons in (found.errors, found.recompilations, found.graph_breaks):
        for reason in reasons[:_SHOWN]:
            first, *rest = describe_reason(reason)
            yield Text(f"! {first}", "bold red")
            yield from (Text(f"  {line}", "dim" if line.startswith(_TO_DO) else "") for line in rest)
        if len(reasons) > _SHOWN:
            yield Text(
                f"! {_KINDS[reasons[0].kind]}: {len(reasons) - _SHOWN} more, all of them with --json",
                "yellow",
            )
    if found.before:
        yield Text(
            f"compiled before the recording began, so nothing is known of it: {_names(found.before)}", "cyan"
        )


def _headline(found: Compilations) -> str:
    parts = [
        f"{count_of(len(found.errors), 'function')} not compiled" if found.errors else "",
        f"compiled again for {count_of(len(found.recompilations), 'reason')}" if found.recompilations else "",
        f"graphs broken at {count_of(len(found.graph_breaks), 'place')}" if found.graph_breaks else "",
    ]
    wrong = "; ".join(part for part in parts if part)
    compiled = f"torch.compile: {count_of(found.count, 'compilation')} took {format_time(found.took_ns)}"
    return f"{compiled}; {wrong}" if wrong else compiled


def describe_reason(reason: Reason) -> list[str]:
    """Returns lines on one reason: what happened where, why, and what to do."""
    line = reason.compiled if reason.kind == "error" else reason.line
    place = ", ".join(part for part in (reason.module, _format_line(line)) if part) or "(no module)"
    more = 0 if reason.kind == "break" else reason.others  # for a break, only the functions around it
    others = f", and {count_of(more, 'more function')}" if more else ""
    is_elsewhere = reason.line is not None and line is not None and reason.line.place != line.place
    lines = [
        f"{_KINDS[reason.kind]}{_format_times(reason)}: {place}{others}",
        f"because of {_format_line(reason.line)}" if is_elsewhere else "",
        f"{_cut(reason.reason)}{_format_values(reason.values)}",
        f"{_TO_DO}{_cut(reason.advice)}" if reason.advice else "",
    ]
    return [line for line in lines if line]


def _format_times(reason: Reason) -> str:
    """Returns how often and when a function was compiled again; breaks and errors occur at each compilation."""
    if reason.kind != "guard":
        return ""
    steps = reason.steps
    when = f"in step {steps[0]}" if len(steps) == 1 else f"in {len(steps)} steps, {steps[0]} to {steps[-1]}"
    return f" {reason.times}x {when}"


def _format_values(values: Sequence[str]) -> str:
    if not values:
        return ""
    more = len(values) - _SHOWN_VALUES
    shown = ", then ".join(printable(value)[:_LONGEST_VALUE] for value in values[:_SHOWN_VALUES])
    return f": it was {shown}{f' and {more} more' if more > 0 else ''}"


def _format_line(line: CodeLine | None) -> str:
    if line is None:
        return ""
    code = f": {line.code}" if line.code else ""
    return f"{_short(line.file)}:{line.number} in {line.function}{code}"


def _short(file: str) -> str:
    """Returns the last two parts of a path."""
    return "/".join(file.replace("\\", "/").rsplit("/", 2)[-2:])


def _cut(text: str) -> str:
    return textwrap.shorten(printable(text), _LONGEST, placeholder=" ...")


def region_columns(regions: Sequence[CompiledRegion]) -> list[Column]:
    """Returns the columns of the table of compiled regions, in the order in which they were first compiled."""
    longest = sorted(regions, key=lambda region: -region.took_ns)[:_SHOWN_REGIONS]
    regions = [region for region in regions if region in longest]
    columns = [
        Column("region", [Text(region.module or "(no module)") for region in regions], right=False),
        Column("function", [Text(_place_of(region)) for region in regions], right=False),
        Column(
            "compiled",
            [Text(f"{region.compilations}x" if region.compilations else "not") for region in regions],
        ),
        Column("ops", [Text(_format_ops(region.ops)) for region in regions]),
        Column("guards", [Text(str(region.guards or "")) for region in regions]),
        Column("backwards", [Text(f"{region.backwards}x" if region.backwards else "") for region in regions]),
        Column("compiling", [Text(format_time(region.took_ns)) for region in regions]),
    ]
    return [column for column in columns if any(column.cells)]


def _place_of(region: CompiledRegion) -> str:
    line = (
        "" if region.line is None else f" {_short(region.line.file).rpartition('/')[2]}:{region.line.number}"
    )
    return f"{region.function}{line}"


def _format_ops(ops: Sequence[int]) -> str:
    """Returns the numbers of ops in the graphs, or their range if there are many."""
    different = list(dict.fromkeys(ops))
    if len(different) > _SHOWN_VALUES:
        return f"{min(different)} to {max(different)}"
    return ", ".join(map(str, different))


def describe_rest(found: Compilations) -> Iterator[Text]:
    """Yields lines on regions that are not shown, and on modules that have no row or share code."""
    if len(found.regions) > _SHOWN_REGIONS:
        yield Text(f"{len(found.regions) - _SHOWN_REGIONS} more regions, all of them with --json", "yellow")
    alike: dict[tuple[bool, tuple[str, ...]], list[Inside]] = defaultdict(list)
    for region in found.inside:
        below = tuple(_below(region.region, path) for path in region.modules)
        alike[region.measured, below].append(region)
    for regions in list(alike.values())[:_SHOWN_MODULES]:
        more = f" (and alike in {count_of(len(regions) - 1, 'more region')})" if len(regions) > 1 else ""
        first = regions[0]
        inside = f"inside {first.region}, without calls of their own"
        if first.measured:
            inside = f"measured inside {first.region}, without times"
        yield Text(f"{inside}: {_names(first.modules)}{more}", "dim")
    if len(alike) > _SHOWN_MODULES:
        yield Text(f"inside {len(alike) - _SHOWN_MODULES} more regions: see --json", "dim")
    if found.shared:
        yield Text(f"these ran what was compiled for others of their class: {_names(found.shared)}", "dim")
    if found.anew:
        why = "because code of other instances, or from before the recording, did not fit (needs nothing)"
        yield Text(f"compiled anew {why}: {_names(found.anew)}", "dim")


def _below(region: str, path: str) -> str:
    return path[len(region) :] if is_below(path, region) else path


def _names(paths: Sequence[str]) -> str:
    more = len(paths) - _SHOWN_MODULES
    shown = ", ".join(paths[:_SHOWN_MODULES])
    return f"{shown} and {more} more" if more > 0 else shown
