"""Renders the memory that modules save and allocate, as text for a terminal or as JSON."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from ...analysis.ops.memory_table import MemoryRow, MemoryTable
from ...analysis.ops.sums import SavedByOp, SavedMemory
from ...analysis.tables.chosen_step import ShownStep
from ...recording.phase import PHASES
from ...recording.suggestions import count_of
from ..common.columns import (
    Color,
    Column,
    FittedColumns,
    Legend,
    Text,
    count_cell,
    explain_columns,
    fit_columns,
    render_tables,
)
from ..common.headline import QUARTILES_LEGEND, describe_head
from ..common.numbers import format_bytes, format_quartile_range, format_share, mark_unknown

#: The beginnings of the titles of a phase's columns.
_SHORT = {"forward": "fwd", "backward": "bwd", "recompute": "rec", "optimizer": "opt"}

#: Columns that are left out in this order if the width is too small.
_DISPENSABLE = (
    "type",
    *(f"{_SHORT[phase]} {what}" for what in ("alloc", "peak") for phase in reversed(PHASES)),
    "spread",
    "%",
    "inside",
)

UNKNOWN_NOTE = "+, ?: the sum leaves out ops of which it is not known what they save"

_LEGEND: Legend = (
    (
        (("saved",), "saved: for backward, by a module's own ops"),
        (("inside",), "inside: with those of the modules inside it"),
        (("%",), "%: of all that is saved"),
    ),
    *QUARTILES_LEGEND,
    ((("recomputed",), "recomputed: saved in a recompute, until the backward of that block has run"),),
    (
        (
            [f"{short} {what}" for short in _SHORT.values() for what in ("alloc", "peak")],
            "alloc: all memory that one call of a module allocated, with the modules inside it; peak: the most that it "
            "held at a time; both of the call with most",
        ),
    ),
    (
        (
            [f"{short} {what}" for short in _SHORT.values() for what in ("alloc", "peak")],
            ", ".join(f"{short}: {phase}" for phase, short in _SHORT.items()),
        ),
    ),
)


def render_memory_table(
    table: MemoryTable,
    *,
    top: int | None = None,
    more: str | None = None,
    width: int | None = None,
    color: Color = False,
) -> str:
    """Returns the rows with what they save and allocate, and the sum of all.

    Args:
        top: modules to show; None for all.
        more: the option that shows more rows; None: there is none.
        width: the width of the terminal, in characters; columns that do not fit are left out.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    head = describe_head(
        table.command, table.step, table.marks, outliers=table.outliers, took="saved {} the median"
    )
    if not table.recorded:
        return render_tables(head, width=width, color=color)
    rows = table.rows[:top]
    fitted = fit_columns(_columns(table, rows), width, _DISPENSABLE)
    rest = _describe_rest(table, len(rows), fitted, more)
    return render_tables(head, fitted, rest=rest, width=width, color=color)


def render_memory_table_json(table: MemoryTable, *, top: int | None = None) -> str:
    """Returns the fields of the table and its rows as JSON; sizes are bytes."""
    return json.dumps(asdict(replace(table, rows=table.rows[:top]))) + "\n"


@dataclass(frozen=True)
class _Line:
    """A line of the table: a module, one of its ops, or the sum of all."""

    saved: SavedMemory
    row: MemoryRow | None = None
    op: SavedByOp | None = None


def _columns(table: MemoryTable, rows: Sequence[MemoryRow]) -> list[Column]:
    lines = [*_iterate_lines(rows), _Line(table.saved)]
    columns = [Column("module", [_name_cell(line) for line in lines], right=False)]
    if len({row.root for row in table.rows} - {None}) > 1:
        columns.append(_of_modules("root", lines, lambda row: row.root or "", right=False))
    columns += [
        _of_modules("type", lines, lambda row: row.type or "", right=False),
        Column("ops", [Text(str(line.saved.ops or "")) for line in lines]),
        Column("saved", [_bytes_cell(line.saved.saved_bytes, line.saved.unknown) for line in lines]),
        Column("spread", [Text(_format_range(line.saved)) for line in lines]),
        _of_modules("%", lines, lambda row: format_share(row.share) if row.share is not None else ""),
        _of_modules("inside", lines, _format_inside),
        Column("recomputed", [_bytes_cell(line.saved.recompute_bytes) for line in lines]),
    ]
    for phase in PHASES:
        columns += _phase_columns(phase, lines)
    columns.append(_of_modules("", lines, lambda row: _describe_absence(row, table.step), right=False))
    return [column for column in columns if any(column.cells)]


def _iterate_lines(rows: Sequence[MemoryRow]) -> Iterator[_Line]:
    for row in rows:
        yield _Line(row.saved, row)
        yield from (_Line(op.saved, row, op) for op in row.ops if op.saved != SavedMemory(ops=op.saved.ops))


def _name_cell(line: _Line) -> Text:
    if line.op is not None:
        return Text(f"   {line.op.op}", "dim")
    if line.row is None:
        return Text("all", "bold")
    name = Text(line.row.name, "" if line.row.path is not None else "dim")
    return Text.join([name, count_cell(line.row.count)])


def _of_modules(
    title: str, lines: Sequence[_Line], text_of: Callable[[MemoryRow], str], *, right: bool = True
) -> Column:
    cells = [Text(text_of(line.row) if line.row and not line.op else "") for line in lines]
    return Column(title, cells, right)


def _phase_columns(phase: str, lines: Sequence[_Line]) -> list[Column]:
    short = _SHORT[phase]
    return [
        _of_modules(f"{short} alloc", lines, lambda row: _format_known(row.phase(phase).allocated_bytes)),
        _of_modules(f"{short} peak", lines, lambda row: _format_known(row.phase(phase).peak_bytes)),
    ]


def _format_range(saved: SavedMemory) -> str:
    """Returns the quartile range of what is saved; "" where all steps save as much, as they usually do."""
    return format_quartile_range(saved.over_steps.range or None) if saved.over_steps else ""


def _describe_absence(row: MemoryRow, step: ShownStep | None) -> str:
    """Returns in how many of several steps the ops of a module ran, if not in all."""
    count = len(step.sample.steps) if step is not None and step.sample is not None else 0
    return f"in {row.steps} of {count} steps" if row.steps is not None and row.steps < count else ""


def _format_inside(row: MemoryRow) -> str:
    """Returns the memory saved inside a module; "" if nothing inside saves anything."""
    inside = row.saved_inside
    return _format_bytes(inside.saved_bytes, inside.unknown) if inside != row.saved else ""


def _bytes_cell(size_bytes: int, unknown: int = 0) -> Text:
    return Text(_format_bytes(size_bytes, unknown))


def _format_bytes(size_bytes: int, unknown: int) -> str:
    return mark_unknown(format_bytes(size_bytes) if size_bytes else "", unknown)


def _format_known(size_bytes: int | None) -> str:
    return format_bytes(size_bytes) if size_bytes else ""


def _describe_rest(table: MemoryTable, shown: int, columns: FittedColumns, more: str | None) -> list[Text]:
    lines = []
    if len(table.rows) > shown:
        hidden = table.rows[shown:]
        saved = format_bytes(sum(row.saved.saved_bytes for row in hidden))
        hint = f" ({more} {len(table.rows)} shows all)" if more else ""
        lines.append(Text(f"{count_of(len(hidden), 'more row')} with {saved} saved{hint}", "dim"))
    lines += explain_columns(_LEGEND, columns.titles)
    if table.peak_bytes is not None:
        peak, of_steps = format_bytes(table.peak_bytes), table.peak_over_steps
        most = (
            f", at most {format_bytes(of_steps.most)}, in step {table.peak_step}"
            if of_steps is not None and of_steps.most > of_steps.median
            else ""
        )
        lines.append(Text(f"highest peak of a call: {peak}{most}", "dim"))
    if table.saved.unknown:
        lines.append(Text(UNKNOWN_NOTE, "dim"))
    return lines
