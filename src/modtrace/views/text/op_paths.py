"""Renders ops with the modules in which they ran, as text for a terminal or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from ...analysis.ops.op_paths import OpPath, OpPaths, collapse
from ...recording.suggestions import count_of
from ..common.columns import (
    Color,
    Column,
    Text,
    fit_columns,
    printable,
    render_tables,
    text_column,
)
from ..common.headline import describe_head

#: Columns that are left out in this order if the width is too small; separate lines then name the phases.
_DISPENSABLE = ("type", "phase")

_NTH_NOTE = "@1, @2: the second and third op of this name in the same call of a module"


def render_op_paths(
    paths: OpPaths, *, top: int | None = None, width: int | None = None, color: Color = False
) -> str:
    """Returns a line for each op, in the order in which they ran.

    Args:
        top: ops to show, from the first; None for all.
        width: the width of the terminal, in characters; columns that do not fit are left out.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    head = describe_head(paths.command, paths.step, paths.marks)
    if not paths.rows:
        return render_tables(head, width=width, color=color)
    rows = paths.rows[:top]
    fitted = fit_columns(_columns(paths, rows), width, _DISPENSABLE)
    if "phase" in fitted.left_out:
        left_out = [title for title in fitted.left_out if title != "phase"]
        fitted = replace(fitted, shown=_put_phases_between(fitted.shown, rows), left_out=left_out)
    rest = _describe_rest(rows, len(paths.rows) - len(rows))
    return render_tables(head, fitted, rest=rest, width=width, color=color)


def render_modules(paths: OpPaths) -> str:
    """Returns the path of each module in which ops ran (a root's name), one line for consecutive ops."""
    has_several = _has_several_roots(paths)
    names = collapse(_module_name(row, has_several) for row in paths.rows if row.path is not None)
    return "".join(f"{printable(name)}\n" for name in names)


def render_op_paths_json(paths: OpPaths, *, top: int | None = None) -> str:
    """Returns the fields of the paths and their rows, and the paths of the modules without consecutive repeats."""
    rows = [row._asdict() for row in paths.rows[:top]]
    return json.dumps(asdict(replace(paths, rows=())) | {"rows": rows, "modules": paths.modules()}) + "\n"


def _module_name(row: OpPath, has_several_roots: bool) -> str:
    name = row.path or row.root or ""
    return f"{row.root}: {name}" if has_several_roots and row.path else name


def _has_several_roots(paths: OpPaths) -> bool:
    return len({row.root for row in paths.rows} - {None}) > 1


def _columns(paths: OpPaths, rows: Sequence[OpPath]) -> list[Column]:
    columns = [
        text_column("op", [f"{row.op}@{row.op_nth}" if row.op_nth else row.op for row in rows]),
        Column("module", [_name_cell(row) for row in rows], right=False),
        text_column("type", [row.type for row in rows]),
        text_column("phase", [row.phase for row in rows]),
        Column("", [Text("raised" if row.raised else "", "bold red") for row in rows], right=False),
    ]
    if _has_several_roots(paths):
        columns.insert(1, text_column("root", [row.root for row in rows]))
    return [column for column in columns if any(column.cells)]


def _put_phases_between(columns: Sequence[Column], rows: Sequence[OpPath]) -> list[Column]:
    """Returns the columns with an additional line wherever the phase differs from that of the op before."""
    changes = [at for at, row in enumerate(rows) if row.phase != (rows[at - 1].phase if at else None)]
    parted = []
    for column in columns:
        cells = list(column.cells)
        for at in reversed(changes):
            phase = rows[at].phase or "outside of modules"
            cells.insert(at, Text(f"{phase}:" if column is columns[0] else "", "bold"))
        parted.append(replace(column, cells=cells))
    return parted


def _describe_rest(rows: Sequence[OpPath], hidden: int) -> list[Text]:
    notes = [count_of(hidden, "more op")] if hidden else []
    notes += [_NTH_NOTE] if any(row.op_nth for row in rows) else []
    return [Text(note, "dim") for note in notes]


def _name_cell(row: OpPath) -> Text:
    return Text(row.name, "" if row.path is not None else "dim")
