"""Lays out text in columns, plain or styled. Nothing is truncated, and markup is not interpreted."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

_GAP = "  "
_INDENT = "  "  # the indentation of the further parts of a broken line

#: A word with the blanks after it, or blanks at the beginning of a line.
_WORD = re.compile(r"\S+\s*|\s+")

#: The codes that switch a style on in a terminal (ECMA-48, SGR); several styles are separated by spaces.
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Text:
    """The text of a line, in one style or in pieces of different styles.

    No library is used, because it would be imported in the middle of a user's program, and rich 15.0, for example, then
    uses Python's `random`.
    """

    __slots__ = ("pieces",)

    def __init__(self, text: str = "", style: str = "") -> None:
        #: Pieces of text with the style of each.
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
        """Returns lines of at most `width` columns, broken at blanks; a longer word has a line of its own."""
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
    """Returns a column of names, in which control characters are escaped; a cell is empty for None."""
    return Column(title, [Text(printable(text or "")) for text in texts], right=False)


def printable(text: str) -> str:
    """Returns the text with control characters escaped, so that a name cannot control the terminal."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


class Markup(Protocol):
    """A way to write columns and lines other than for a terminal, such as HTML."""

    def render_columns(self, columns: Sequence[Column]) -> str:
        """Returns the columns side by side."""

    def render_lines(self, lines: Sequence[Text]) -> str:
        """Returns the lines below each other."""


#: Whether text is styled for a terminal, or the markup in which it is written.
Color = bool | Markup


@dataclass(frozen=True)
class FittedColumns:
    """Columns that are shown side by side, and the titles of columns that do not fit."""

    shown: Sequence[Column]
    left_out: Sequence[str]
    needed: int  # the width of all columns together

    @property
    def titles(self) -> set[str]:
        """The titles of the columns that are shown."""
        return {column.title for column in self.shown}


def fit_columns(columns: Sequence[Column], width: int | None, dispensable: Iterable[str]) -> FittedColumns:
    """Returns the columns; as long as they are wider than `width`, the next of the `dispensable` titles is left out."""
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
    """Returns the columns that fit, and a line that names those that do not."""
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
    """Returns the lines of the head, the tables and the remaining lines, separated by empty lines."""
    parts = [
        render_lines(head, color=color, width=width),
        *(render_fitted(table, width=width, color=color) for table in tables),
        render_lines(rest, color=color, width=width),
    ]
    return "\n".join(part for part in parts if part)


#: The explanation below a table: lines made of parts, each with the titles of the columns that it explains.
Legend = Sequence[Sequence[tuple[Collection[str], str]]]


def explain_columns(legend: Legend, titles: Set[str]) -> list[Text]:
    """Returns the lines of a legend, without parts about columns that are not shown."""
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
    """Returns the lines below each other, where longer ones than `width` are broken at blanks."""
    if not isinstance(color, bool):
        return color.render_lines(list(lines))
    if width is not None:
        lines = [part for line in lines for part in line.wrap(width)]
    return _end_lines(line.render(color=color) for line in lines)


def _end_lines(lines: Iterable[str]) -> str:
    return "".join(f"{line.rstrip()}\n" for line in lines)
