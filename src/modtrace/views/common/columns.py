"""Lays out text in columns, plain or styled. Long names are cut in their middle, and markup is not interpreted."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Protocol

_GAP = "  "

#: The width of the longest and of the shortest name that is left of one that does not fit.
_LONGEST_NAME, _SHORTEST_NAME = 200, 20

_INDENT = "  "  # the indentation of the further parts of a broken line

#: A word with the blanks after it, or blanks at the beginning of a line.
_WORD = re.compile(r"\S+\s*|\s+")

#: The codes that switch a style on in a terminal (ECMA-48, SGR); several styles are separated by spaces.
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Text:
    """The text of a line, in one style or in pieces of different styles, with control characters escaped.

    No library is used, because it would be imported in the middle of a user's program, and rich 15.0, for example, then
    uses Python's `random`.
    """

    __slots__ = ("pieces",)

    def __init__(self, text: str = "", style: str = "") -> None:
        #: Pieces of text with the style of each.
        self.pieces: tuple[tuple[str, str], ...] = ((printable(text), style),) if text else ()

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

    def cut(self, width: int) -> "Text":
        """Returns at most `width` columns without the middle; more is kept of the end, which tells most."""
        if self.width <= width:
            return self
        letters = [(letter, style) for text, style in self.pieces for letter in text]
        begin = _count_fitting(letters, width // 3)
        end = _count_fitting(letters[::-1], width - width // 3 - 1)
        kept = [*letters[:begin], ("…", letters[begin][1]), *letters[len(letters) - end :]]
        cut = Text()
        cut.pieces = tuple(
            ("".join(letter for letter, _ in piece), style)
            for style, piece in groupby(kept, key=lambda letter: letter[1])
        )
        return cut

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


def _count_fitting(letters: Sequence[tuple[str, str]], width: int) -> int:
    """Returns how many of the letters, from the first, fit into a width."""
    for count, (letter, _) in enumerate(letters):
        width -= _width_of(letter)
        if width < 0:
            return count
    return len(letters)


def _width_of(text: str) -> int:
    return len(text) if text.isascii() else sum(map(_width_of_one, text))


@lru_cache(1024)
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

    @cached_property
    def width(self) -> int:
        """The width of the column in a terminal."""
        return max(Text(self.title).width, *(cell.width for cell in self.cells), 0)

    def cut(self, width: int) -> "Column":
        """Returns the column with its names cut to a width; numbers, and remarks without a title, stay whole."""
        if self.right or not self.title or self.width <= width:
            return self
        return replace(self, cells=[cell.cut(width) for cell in self.cells])

    def render(self, *, titled: bool, color: bool) -> list[str]:
        """Returns the title, if `titled`, and the cells, all with the width of the widest."""
        width = self.width
        cells = [Text(self.title, "bold"), *self.cells] if titled else self.cells
        padded = [(cell.render(color=color), " " * (width - cell.width)) for cell in cells]
        return [spaces + text if self.right else text + spaces for text, spaces in padded]


def text_column(title: str, texts: Iterable[str | None]) -> Column:
    """Returns a column of names; a cell is empty for None."""
    return Column(title, [Text(text or "") for text in texts], right=False)


def count_cell(count: int) -> Text:
    """Returns how many equal modules a row stands for, behind its name: ` x12`; nothing for one."""
    return Text(f" x{count}" if count > 1 else "", "cyan")


def printable(text: str) -> str:
    """Returns the text with control characters escaped, so that a name cannot control a terminal or reorder lines."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def printable_lines(text: str) -> str:
    """Returns the text with control characters escaped but for the ends of its lines; a tab becomes a blank."""
    if text.isprintable():
        return text
    return "\n".join(printable(line.replace("\t", " ")) for line in text.replace("\r", "").split("\n"))


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
    """Returns the columns in `width`: the next of the `dispensable` titles is left out while the others do not fit.

    What was left out for a wide one that had to go too comes back, the last first, if there is room beside whole names.
    A column of names has half of the width before others are left out for it. What is longer is cut to what they leave.
    """
    columns = [column.cut(_LONGEST_NAME) for column in columns]
    needed = _width_of_all(columns)
    left_out: dict[str, None] = {}
    shown = columns
    if width is not None:
        claimed = [column.cut(max(width // 2, _SHORTEST_NAME)) for column in columns]
        for title in dispensable:
            if _width_of_all(column for column in claimed if column.title not in left_out) <= width:
                break
            left_out[title] = None
        for title in [*left_out][::-1]:
            others = [column for column in columns if column.title == title or column.title not in left_out]
            if _width_of_all(others) <= width:
                del left_out[title]
        shown = _cut_to(width, [column for column in columns if column.title not in left_out])
    in_order = dict.fromkeys(column.title for column in columns if column.title in left_out)
    return FittedColumns(shown, tuple(in_order), needed)


def _width_of_all(columns: Iterable[Column]) -> int:
    return sum(column.width + len(_GAP) for column in columns) - len(_GAP)


def _cut_to(width: int, columns: Sequence[Column]) -> list[Column]:
    """Returns the columns with names cut as far as they are too wide together, in the widest columns first."""
    too_many = _width_of_all(columns) - width
    cut = list(columns)
    for at in sorted(range(len(columns)), key=lambda at: -columns[at].width):
        if too_many > 0:
            cut[at] = columns[at].cut(max(columns[at].width - too_many, _SHORTEST_NAME))
            too_many -= columns[at].width - cut[at].width
    return cut


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
