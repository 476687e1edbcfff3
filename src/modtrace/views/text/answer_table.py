"""Renders the rows of a query, as a table for a terminal or as JSON."""

import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from ...recording.suggestions import count_of
from ..common.columns import Color, Column, Text, fit_columns, printable, render_tables
from ..common.numbers import format_number, to_json

Rows = Sequence[Mapping[str, Any]]

#: The fewest characters of the id of a run that are shown.
_FEWEST_OF_RUN = 8


def render_answer(rows: Rows, number: int, *, width: int | None = None, color: Color = False) -> str:
    """Returns the rows as a table, with the columns that are the same in all of them above it; one row as lines.

    Args:
        rows: the first rows of the answer, each with all columns.
        number: how many rows the answer has.
        width: the width of the terminal, in characters; columns that do not fit are named. None: no limit.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    if not rows:
        return render_tables([Text("nothing found: the answer has no rows")], width=width, color=color)
    rows = _shorten_runs(rows)
    names = list(rows[0])
    same = [name for name in names if all(row[name] == rows[0][name] for row in rows)]
    titled = max(len(printable(name)) for name in same) if same else 0
    head = [
        Text.join([Text(f"{printable(name):{titled}}  ", "bold"), Text(_to_text(rows[0][name]))])
        for name in same
    ]
    columns = [_column(name, [row[name] for row in rows]) for name in names if name not in same]
    left = number - len(rows)
    if len(rows) > 1 and not columns:
        head.append(Text(f"in {'the first' if left else 'all of the'} {count_of(len(rows), 'row')}", "dim"))
    rest = [Text(f"and {count_of(left, 'row')} more: --top {number}, or --json", "dim")] if left else []
    tables = [fit_columns(columns, width, [column.title for column in columns[:0:-1]])] if columns else []
    return render_tables(head, *tables, rest=rest, width=width, color=color)


def render_answer_json(rows: Rows, notes: Sequence[str]) -> str:
    """Returns all rows as JSON, with what the dataset lacks. Bytes are hexadecimal digits."""
    return json.dumps({"rows": to_json(list(rows)), "notes": list(notes)}, default=_to_hex) + "\n"


def _shorten_runs(rows: Rows) -> Rows:
    """Returns the rows with the begins of the ids of runs that tell them apart, if there are several."""
    runs = {row["run"] for row in rows if isinstance(row.get("run"), str)}
    if len(runs) < 2:
        return rows
    short = next(size for size in count(_FEWEST_OF_RUN) if len({run[:size] for run in runs}) == len(runs))
    return [{**row, "run": row["run"][:short]} if isinstance(row.get("run"), str) else row for row in rows]


def _column(name: str, values: Sequence[Any]) -> Column:
    is_number = all(
        isinstance(value, (int, float, type(None))) and not isinstance(value, bool) for value in values
    )
    return Column(printable(name), [Text(_to_text(value)) for value in values], right=is_number)


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return format_number(value)
    return value.hex() if isinstance(value, bytes) else str(value)


def _to_hex(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
