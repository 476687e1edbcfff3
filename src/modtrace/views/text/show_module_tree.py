"""Renders the module tree as text for a terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ...analysis.findings.finding import Findings
from ...analysis.modules.folding import fold as fold_tree
from ...analysis.modules.module_tree import MODULE_PHASES, ModuleNode, ModuleTree, rebuild
from ...analysis.modules.type_table import TypeTimes, build_type_table
from ...analysis.modules.value_summary import SlotValues
from ...analysis.tables.chosen_step import ShownStep
from ...analysis.tables.times import PhaseTimes, find_quartile_ranges
from ...recording.module_path import order_of
from ...recording.phase import FORWARD
from ..common.columns import (
    Color,
    Column,
    FittedColumns,
    Text,
    count_cell,
    fit_columns,
    render_tables,
)
from ..common.numbers import format_count, format_quartile_range, format_share, format_time
from .compilations import DISPENSABLE_REGIONS, describe_compilations, region_columns
from .findings import summarize_findings
from .module_tree_remarks import describe_foot, describe_headline, title_of
from .tree_lines import TreeLine, draw_lines
from .value_columns import DISPENSABLE_VALUES, nonfinite_column, shown_slots, value_columns

SortKey = Literal["order", "forward", "backward", "recompute", "self", "total", "parameters", "calls", "name"]
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)


#: The largest number of findings above the tree.
_MOST_FINDINGS = 3


#: Columns that are left out in this order if the width is too small.
_DISPENSABLE = (
    *DISPENSABLE_VALUES[:2], "spread", *DISPENSABLE_VALUES[2:], "params", "type", "calls",
    "recompute", "device recompute", "self", "%", "backward", "device backward",
)  # fmt: skip


def render_module_tree(
    tree: ModuleTree,
    *,
    findings: Findings | None = None,
    depth: int | None = None,
    sort: SortKey = "order",
    fold: bool = True,
    types: bool = True,
    slots: bool = False,
    run: str | None = None,
    width: int | None = None,
    color: Color = False,
) -> str:
    """Returns the tree with its times and values, the table of module types, and where the rest of the step went.

    Args:
        findings: what checks of the run have found; the worst three come first.
        depth: levels below the roots; 0 shows the roots alone, None everything.
        sort: the order of siblings: `order` as registered, `name` from A, all others largest first.
        fold: whether the insides of equal siblings are shown once, summed up.
        types: whether the table of module types follows.
        slots: whether each slot of a module's output has its own line below the module.
        run: the path of the recording, for suggested commands; None suggests Python methods.
        width: the width of the terminal, in characters. Columns of the tables that do not fit are left out and
            named; lines that still do not fit are longer. None: no limit.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    fitted: list[FittedColumns] = []
    if tree.roots:
        roots = _sort((fold_tree(tree) if fold else tree).roots, sort)
        lines = list(draw_lines(roots, depth))
        places = [_fit(_tree_columns(lines, tree, slots, below), width) for below in (False, True)]
        # Notes are put beside a module if they fit.
        fitted.append(min(places, key=lambda place: len(place.left_out)))
    if tree.roots and types:
        fitted.append(_fit(_type_columns(build_type_table(tree), tree), width))
    head = [] if findings is None else summarize_findings(findings, _MOST_FINDINGS, run)
    head += describe_headline(tree, run)
    if tree.compilations is not None:
        head += describe_compilations(tree.compilations)
        if tree.compilations.regions:
            fitted.append(fit_columns(region_columns(tree.compilations.regions), width, DISPENSABLE_REGIONS))
    return render_tables(head, *fitted, rest=describe_foot(tree, fitted), width=width, color=color)


def _fit(columns: Sequence[Column], width: int | None) -> FittedColumns:
    """Returns the columns that fit. The first one always stays, because it names the rows."""
    return fit_columns(columns, width, [title for title in _DISPENSABLE if title != columns[0].title])


def _sort(roots: Sequence[ModuleNode], sort: SortKey) -> Sequence[ModuleNode]:
    if sort == "order":
        return roots
    key = _SORT_VALUES[sort]

    def sort_children(node: ModuleNode, children: Sequence[ModuleNode]) -> ModuleNode:
        ordered = sorted(children, key=lambda node: (node.role == "inside", key(node)))
        return replace(node, children=tuple(ordered))

    return sorted(rebuild(roots, sort_children), key=key)


#: Sort keys for siblings, ascending; numbers in names are compared as numbers.
_SORT_VALUES: Mapping[SortKey, Callable[[ModuleNode], Any]] = {
    "forward": lambda node: -node.forward.total_ns,
    "backward": lambda node: -node.backward.total_ns,
    "recompute": lambda node: -node.recompute.total_ns,
    "self": lambda node: -sum(node.phase(phase).self_ns for phase in MODULE_PHASES),
    "total": lambda node: -sum(node.phase(phase).total_ns for phase in MODULE_PHASES),
    "parameters": lambda node: -(node.parameters or 0),
    "calls": lambda node: -node.calls,
    "name": lambda node: order_of(node.label),
}


_NO_NOTE = Text()


@dataclass(frozen=True)
class _Row:
    """A line of the table: a node, a note on it, the shortest or longest of its members, or a slot.

    A note is in the last column, or below its node in the first, where it takes no width from the numbers.

    Listed siblings are followed by a heading over their insides, without numbers, as these are the siblings' own.
    """

    guides: str
    node: ModuleNode
    shows: Literal["node", "note", "note below", "heading", "shortest", "longest", "slot"]
    slot: SlotValues | None = None
    note: Text = _NO_NOTE


def _tree_columns(lines: Sequence[TreeLine], tree: ModuleTree, slots: bool, below: bool) -> list[Column]:
    absences = dict(_describe_absences(tree.step, [line.node for line in lines]))
    rows = [row for line in lines for row in _rows_of(line, tree, slots, below, absences)]
    columns = [
        Column("module", [_label_cell(row) for row in rows], right=False),
        Column("type", [_cell(row, row.node.type) for row in rows], right=False),
        Column("calls", [_cell(row, str(row.node.calls or "")) for row in rows]),
    ]
    for phase in _phases(tree):
        columns += _phase_columns(title_of(phase, tree), [_times_of(row, phase) for row in rows])
    ranges = zip(rows, find_quartile_ranges([row.node for row in rows]), strict=True)
    columns += [
        Column("spread", [_cell(row, format_quartile_range(part)) for row, part in ranges]),
        Column("params", [_cell(row, _format_parameters(row.node)) for row in rows]),
        *value_columns([row.node.values if row.shows == "node" else row.slot for row in rows]),
        nonfinite_column([row.node.values if row.shows == "node" else None for row in rows]),
        Column("", [_NO_NOTE if row.shows == "note below" else row.note for row in rows], right=False),
    ]
    return [column for column in columns if any(column.cells)]


def _phases(tree: ModuleTree) -> list[str]:
    """Returns the phases that have calls in the step."""
    return [phase for phase in MODULE_PHASES if tree.phase(phase).calls]


def _rows_of(
    line: TreeLine, tree: ModuleTree, slots: bool, below: bool, absences: Mapping[int, str]
) -> Iterator[_Row]:
    if line.node.role == "inside":
        yield _Row(line.guides, line.node, "heading")
        return
    notes = _notes(line.node, "no device time" if tree.device_times else "end not seen")
    if id(line.node) in absences:
        notes.append(Text(absences[id(line.node)], "yellow"))
    beside = _NO_NOTE if below or not notes else notes.pop(0)
    yield _Row(line.guides, line.node, "node", note=beside)
    for note in notes:
        yield _Row(line.below_guides, line.node, "note below" if below else "note", note=note)
    if line.node.role == "folded":
        yield _Row(line.below_guides, line.node, "shortest")
        yield _Row(line.below_guides, line.node, "longest")
    for slot in shown_slots(line.node.values) if slots else ():
        yield _Row(line.below_guides, line.node, "slot", slot)


def _label_cell(row: _Row) -> Text:
    label = row.node.label
    if row.shows == "heading":
        return Text(f"{row.guides}inside {label}, summed", "dim")
    if row.slot is not None:
        return Text(f"{row.guides}{row.slot.slot}", "dim")
    if row.shows == "note below":
        return Text.join([Text(row.guides, "dim"), row.note])
    if row.shows != "node":
        return Text(row.guides + ("" if row.shows == "note" else row.shows), "dim")
    return Text.join(
        [Text(row.guides, "dim"), Text(label, "" if row.guides else "bold"), count_cell(row.node.count)]
    )


def _cell(row: _Row, text: str) -> Text:
    return Text(text if row.shows == "node" else "")


def _times_of(row: _Row, phase: str) -> PhaseTimes:
    times = row.node.phase(phase)
    if row.shows == "node":
        return times
    extremes = {"shortest": times.shortest_ns, "longest": times.longest_ns}
    return PhaseTimes(total_ns=extremes.get(row.shows) or 0)


def _phase_columns(title: str, times: Sequence[PhaseTimes]) -> list[Column]:
    totals = [format_time(own.total_ns) if own.calls or own.total_ns else "" for own in times]
    shares = ["" if own.share is None else format_share(own.share) for own in times]
    return [
        Column(title, [Text(total) for total in totals]),
        Column("self", [Text(format_time(own.self_ns) if own.calls else "", "dim") for own in times]),
        Column("%", [Text(share, "dim") for share in shares]),
    ]


def _format_parameters(node: ModuleNode) -> str:
    return format_count(node.parameters) if node.parameters else ""


def _notes(node: ModuleNode, untimed: str) -> list[Text]:
    raised = sum(node.phase(phase).raised for phase in MODULE_PHASES)
    unfinished = sum(node.phase(phase).unfinished for phase in MODULE_PHASES)
    notes = [
        f"shared with {node.same_as}" if node.same_as is not None else "",
        f"raised {raised}x" if raised else "",
        f"{untimed} {unfinished}x" if unfinished else "",
    ]
    return [Text(note, "yellow") for note in notes if note]


def _describe_absences(step: ShownStep | None, nodes: Sequence[ModuleNode]) -> Iterator[tuple[int, str]]:
    """Yields the `id` of each node that was not called, or not equally often, in each of several steps, with a note.

    What is true of the node above is not repeated.
    """
    count = len(step.sample.steps) if step is not None and step.sample is not None else 0
    of_parents: dict[int, Sequence[str]] = {}
    for node in nodes:
        texts = list(_list_differences(node, count))
        of_parents.update(dict.fromkeys(map(id, node.children), texts))
        new = [text for text in texts if text not in of_parents.get(id(node), ())]
        if new:
            yield id(node), "; ".join(new)


def _list_differences(node: ModuleNode, count: int) -> Iterator[str]:
    """Yields the notes of all phases; what runs again in a recompute, or backward, misses the same steps."""
    known: set[str] = set()
    for phase in MODULE_PHASES:
        for text in _differences(node, phase, count):
            if (plain := text.removeprefix(f"{phase} ")) not in known:
                yield text
            known.add(plain)


def _differences(node: ModuleNode, phase: str, count: int) -> Iterator[str]:
    over = node.phase(phase).over_steps
    named = "" if phase == FORWARD else f"{phase} "
    if over is None:
        return
    if over.steps < count:
        steps = f"each in {over.steps}+" if node.count > 1 else f"in {over.steps}"
        yield f"{named}{steps} of {count} steps"
    if over.calls.least < over.calls.most and node.count == 1:
        yield f"{named}{over.calls.least} to {over.calls.most} calls"


def _type_columns(rows: Sequence[TypeTimes], tree: ModuleTree) -> list[Column]:
    columns = [
        Column("type", [Text(row.type) for row in rows], right=False),
        Column("modules", [Text(str(row.modules)) for row in rows]),
        Column("calls", [Text(str(row.forward.calls or "")) for row in rows]),
    ]
    for phase in _phases(tree):
        columns += _phase_columns(title_of(phase, tree), [row.phase(phase) for row in rows])
    columns.append(
        Column("spread", [Text(format_quartile_range(part)) for part in find_quartile_ranges(rows)])
    )
    return [column for column in columns if any(column.cells)]
