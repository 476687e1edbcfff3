"""Text in columns, plain or styled. Nothing is truncated, and markup is not interpreted."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

_GAP = "  "
_INDENT = "  "  # of what is left of a line that was broken

#: A word with the blanks behind it, or blanks that begin a line.
_WORD = re.compile(r"\S+\s*|\s+")

#: What switches a style on in a terminal (ECMA-48, SGR); a text may have several, with spaces between.
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Text:
    """The text of a line, with one style or in pieces with a style each.

    No library is used, because it would be imported in the middle of a user's program: rich 15.0 then draws from
    Python's `random`.
    """

    __slots__ = ("pieces",)

    def __init__(self, text: str = "", style: str = "") -> None:
        #: Each text that has one style, with that style.
        self.pieces: tuple[tuple[str, str], ...] = ((text, style),) if text else ()

    @classmethod
    def join(cls, texts: Iterable["Text"], between: str = "") -> "Text":
        """Returns the texts joined by `between`."""
        joined = cls()
        for text in texts:
            joined.pieces += cls(between if joined else "").pieces + text.pieces
        return joined

    def __bool__(self) -> bool:
        return bool(self.pieces)

    @property
    def width(self) -> int:
        """The width of the text in a terminal, in columns."""
        return sum(_width_of(text) for text, _ in self.pieces)

    def wrap(self, width: int) -> list["Text"]:
        """Returns lines of at most `width` columns, broken at blanks; a word that is longer has its own."""
        lines, line = [], Text()
        for word in self._split():
            if (
                line.width > len(_INDENT)
                and line.width + _width_of(word.render(color=False).rstrip()) > width
            ):
                lines.append(line)
                line = Text(_INDENT)
            line = Text.join([line, word])
        return [*lines, line]

    def _split(self) -> Iterator["Text"]:
        word = Text()
        for text, style in self.pieces:
            for part in _WORD.findall(text):
                word = Text.join([word, Text(part, style)])
                if part[-1].isspace():
                    yield word
                    word = Text()
        yield word

    def render(self, *, color: bool) -> str:
        """Returns the text, with its styles if `color`."""
        return "".join(_in_style(*piece) if color else piece[0] for piece in self.pieces)


def _in_style(text: str, style: str) -> str:
    codes = ";".join(_STYLES[part] for part in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes else text


def _width_of(text: str) -> int:
    return len(text) if text.isascii() else sum(map(_width_of_one, text))


def _width_of_one(character: str) -> int:
    """Returns the width of a character: 2 for East Asian letters, 0 for combining accents, else 1."""
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    return 0 if unicodedata.category(character) in ("Mn", "Me", "Cf") else 1


@dataclass(frozen=True)
class Column:
    """A title and one cell a row."""

    title: str
    cells: Sequence[Text]
    right: bool = True

    @property
    def width(self) -> int:
        """The width of the column in a terminal."""
        return max(Text(self.title).width, *(cell.width for cell in self.cells), 0)

    def render(self, *, titled: bool, color: bool) -> list[str]:
        """Returns the title, if `titled`, and the cells, all with the width of the widest."""
        width = self.width
        cells = [Text(self.title, "bold"), *self.cells] if titled else self.cells
        padded = [(cell.render(color=color), " " * (width - cell.width)) for cell in cells]
        return [spaces + text if self.right else text + spaces for text, spaces in padded]


def text_column(title: str, texts: Iterable[str | None]) -> Column:
    """Returns a column of names, which may hold control characters; a cell is empty where there is None."""
    return Column(title, [Text(printable(text or "")) for text in texts], right=False)


def printable(text: str) -> str:
    """Returns the text with control characters escaped, so that a name cannot control the terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class Markup(Protocol):
    """How columns and lines are written where they are not for a terminal."""

    def render_columns(self, columns: Sequence[Column]) -> str:
        """Returns the columns side by side."""

    def render_lines(self, lines: Sequence[Text]) -> str:
        """Returns the lines below each other."""


#: Whether text is styled for a terminal; or what else it is written in.
Color = bool | Markup


@dataclass(frozen=True)
class FittedColumns:
    """Columns that are shown side by side, and the titles of those for which there is no room."""

    shown: Sequence[Column]
    left_out: Sequence[str]
    needed: int  # how wide all of them would be together

    @property
    def titles(self) -> set[str]:
        """The titles of the columns that are shown."""
        return {column.title for column in self.shown}


def fit_columns(columns: Sequence[Column], width: int | None, dispensable: Iterable[str]) -> FittedColumns:
    """Returns the columns; while they are wider than `width`, `dispensable` titles are left out in turn."""
    widths = [column.width + len(_GAP) for column in columns]
    needed = sum(widths) - len(_GAP)
    too_many = 0 if width is None else needed - width
    left_out: set[str] = set()
    for title in dispensable:
        if too_many <= 0:
            break
        left_out.add(title)
        too_many -= sum(own for column, own in zip(columns, widths, strict=True) if column.title == title)
    shown = [column for column in columns if column.title not in left_out]
    in_order = dict.fromkeys(column.title for column in columns if column.title in left_out)
    return FittedColumns(shown, tuple(in_order), needed)


def render_fitted(columns: FittedColumns, *, width: int | None, color: Color) -> str:
    """Returns the columns that are shown, and a line that names those for which there is no room."""
    shown = render_columns(columns.shown, color=color)
    if not columns.left_out:
        return shown
    how = f"a width of {columns.needed} shows all, and so does | less -S"
    text = f"left out at a width of {width}: {', '.join(columns.left_out)} ({how})"
    return shown + render_lines([Text(text, "yellow")], color=color, width=width)


def render_tables(
    head: Iterable[Text],
    *tables: FittedColumns,
    rest: Iterable[Text] = (),
    width: int | None = None,
    color: Color = False,
) -> str:
    """Returns the lines of the head, the tables and the rest of the lines, with an empty line between them."""
    parts = [
        render_lines(head, color=color, width=width),
        *(render_fitted(table, width=width, color=color) for table in tables),
        render_lines(rest, color=color, width=width),
    ]
    return "\n".join(part for part in parts if part)


#: What is said below a table of its columns: lines of parts, and the titles of the columns that a part is about.
Legend = Sequence[Sequence[tuple[Collection[str], str]]]


def explain_columns(legend: Legend, titles: Set[str]) -> list[Text]:
    """Returns the lines of a legend, without parts that are about no column that is shown."""
    lines = ["; ".join(text for about, text in line if not titles.isdisjoint(about)) for line in legend]
    return [Text(line, "dim") for line in lines if line]


def render_columns(columns: Sequence[Column], *, color: Color) -> str:
    """Returns the columns side by side."""
    if not isinstance(color, bool):
        return color.render_columns(columns)
    titled = any(column.title for column in columns)
    rows = zip(*(column.render(titled=titled, color=color) for column in columns), strict=True)
    return _end_lines(_GAP.join(row) for row in rows)


def render_lines(lines: Iterable[Text], *, color: Color, width: int | None = None) -> str:
    """Returns the lines below each other; those that are longer than `width` are broken at blanks."""
    if not isinstance(color, bool):
        return color.render_lines(list(lines))
    if width is not None:
        lines = [part for line in lines for part in line.wrap(width)]
    return _end_lines(line.render(color=color) for line in lines)


def _end_lines(lines: Iterable[str]) -> str:
    return "".join(f"{line.rstrip()}\n" for line in lines)
