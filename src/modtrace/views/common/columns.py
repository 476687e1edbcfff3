"""Text in columns, plain or styled; nothing is cut off and no markup is read."""

import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

_GAP = "  "

#: What switches a style on in a terminal (ECMA-48, SGR); a text may have several, with spaces between.
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Text:
    """The text of a line, in one style or in pieces with a style each.

    A library for this would be imported in the middle of a user's program: rich 15.0 draws from Python's `random` then.
    """

    __slots__ = ("_pieces",)

    def __init__(self, text: str = "", style: str = "") -> None:
        self._pieces: tuple[tuple[str, str], ...] = ((text, style),) if text else ()

    @classmethod
    def join(cls, texts: Iterable["Text"], between: str = "") -> "Text":
        """Returns the texts as one, with `between` between each two of them."""
        joined = cls()
        for text in texts:
            joined._pieces += cls(between if joined else "")._pieces + text._pieces
        return joined

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def width(self) -> int:
        """The number of columns that it takes in a terminal."""
        return sum(_width_of(text) for text, _ in self._pieces)

    def render(self, *, color: bool) -> str:
        """Returns the text, with its styles where there is colour."""
        return "".join(_in_style(*piece) if color else piece[0] for piece in self._pieces)


def _in_style(text: str, style: str) -> str:
    codes = ";".join(_STYLES[each] for each in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes else text


def _width_of(text: str) -> int:
    return len(text) if text.isascii() else sum(map(_width_of_one, text))


def _width_of_one(character: str) -> int:
    """Letters of East Asia are two columns wide; accents stand above the letter in front of them."""
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
        """The number of columns that it takes in a terminal."""
        return max(Text(self.title).width, *(cell.width for cell in self.cells), 0)

    def render(self, *, titled: bool, color: bool) -> list[str]:
        """Returns the title, if wanted, and the cells, all as wide as the widest."""
        width = self.width
        cells = [Text(self.title, "bold"), *self.cells] if titled else self.cells
        padded = [(cell.render(color=color), " " * (width - cell.width)) for cell in cells]
        return [spaces + text if self.right else text + spaces for text, spaces in padded]


def printable(text: str) -> str:
    """Returns the text with control characters written out, so that a name cannot steer the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def render_columns(
    columns: Sequence[Column], *, color: bool, width: int | None = None, dispensable: Collection[str] = ()
) -> str:
    """Returns the columns side by side; while wider than `width`, `dispensable` titles are left out in turn."""
    for title in dispensable:
        if width is None or sum(column.width + len(_GAP) for column in columns) - len(_GAP) <= width:
            break
        columns = [column for column in columns if column.title != title]
    titled = any(column.title for column in columns)
    rows = zip(*(column.render(titled=titled, color=color) for column in columns), strict=True)
    return _end_lines(_GAP.join(row) for row in rows)


def render_lines(lines: Sequence[Text], *, color: bool) -> str:
    """Returns the lines below each other."""
    return _end_lines(line.render(color=color) for line in lines)


def _end_lines(lines: Iterable[str]) -> str:
    return "".join(f"{line.rstrip()}\n" for line in lines)
