"""Text in columns, plain or styled; nothing is cut off and no markup is read."""

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WIDER_THAN_ANYTHING = 1_000_000
_GAP = 2


@dataclass(frozen=True)
class Column:
    """A title and one cell a row."""

    title: str
    cells: Sequence[Text]
    right: bool = True

    @property
    def width(self) -> int:
        """Columns of the terminal it takes."""
        return max(Text(self.title).cell_len, *(cell.cell_len for cell in self.cells), 0)


def printable(text: str) -> str:
    """The text with control characters written out, so that a name cannot steer the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def render_columns(
    columns: Sequence[Column], *, color: bool, width: int | None = None, dispensable: Collection[str] = ()
) -> str:
    """The columns side by side; while wider than `width`, `dispensable` titles are left out in turn."""
    for title in dispensable:
        if width is None or sum(column.width + _GAP for column in columns) - _GAP <= width:
            break
        columns = [column for column in columns if column.title != title]
    titled = any(column.title for column in columns)
    table = Table(box=None, show_header=titled, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(Text(column.title), justify="right" if column.right else "left", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    return _render(table, color)


def render_lines(lines: Sequence[Text], *, color: bool) -> str:
    """The lines below each other."""
    return _render(Text("\n").join(lines), color) if lines else ""


def _render(what: RenderableType, color: bool) -> str:
    target = io.StringIO()
    # An empty environment: what a view looks like is for its arguments to say, not for COLUMNS or TERM.
    console = Console(
        file=target,
        width=_WIDER_THAN_ANYTHING,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        _environ={},
    )
    console.print(what)
    return "".join(f"{line.rstrip()}\n" for line in target.getvalue().splitlines())
