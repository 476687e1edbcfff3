"""Writes tables and lines as HTML: static, without a script, in the colours of the surrounding page."""

import html
from collections.abc import Collection, Sequence
from importlib.resources import files

from ...recording.suggestions import count_of
from ..common.columns import Column, Text

#: The largest number of rows shown of a table, since a notebook keeps every output and is slow with large ones.
MAX_ROWS = 200


class HtmlMarkup:
    """Writes lines and tables as HTML."""

    def __init__(self, without: Collection[str] = ()) -> None:
        """Creates the markup; `without` are titles of columns that are too wide for a notebook."""
        self._without = without

    def render_columns(self, columns: Sequence[Column]) -> str:
        """Returns a table with the first `MAX_ROWS` rows, and a line that says what is not shown."""
        shown = [column for column in columns if column.title not in self._without]
        rows = list(zip(*(column.cells for column in shown), strict=True))
        titles = "".join(f"<th{_align(column)}>{html.escape(column.title)}</th>" for column in shown)
        body = "\n".join(f"<tr>{_render_cells(shown, row)}</tr>" for row in rows[:MAX_ROWS])
        hidden = [count_of(len(rows) - MAX_ROWS, "more row")] if len(rows) > MAX_ROWS else []
        hidden += [f"the columns {', '.join(self._without)}"] if len(shown) < len(columns) else []
        rest = [Text(f"print shows {' and '.join(hidden)}", "dim")] if hidden else []
        table = f"<table><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table>\n"
        return table + self.render_lines(rest)

    def render_lines(self, lines: Sequence[Text]) -> str:
        """Returns each line as an element of its own."""
        return "".join(f"<div>{_render_text(line)}</div>\n" for line in lines)


def render_page(content: str) -> str:
    """Returns the content of a notebook's output, from tables and lines that `HtmlMarkup` has written."""
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return f'<div class="modtrace">\n<style>\n{style}</style>\n{content}</div>\n'


def _align(column: Column) -> str:
    return "" if column.right else ' class="left"'


def _render_cells(columns: Sequence[Column], row: Sequence[Text]) -> str:
    cells = zip(columns, row, strict=True)
    return "".join(f"<td{_align(column)}>{_render_text(cell)}</td>" for column, cell in cells)


def _render_text(text: Text) -> str:
    return "".join(_render_piece(*piece) for piece in text.pieces)


def _render_piece(text: str, style: str) -> str:
    escaped = html.escape(text)
    return f'<span class="{style}">{escaped}</span>' if style else escaped
