"""Gives every text of an SVG picture a fixed width, whatever fonts its maker and its reader have."""

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .text import Html, escape_html, to_html
from .text_width import measure

_COMMENT = re.compile("<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"""(<(?:"[^"]*"|'[^']*'|[^>"'])*>)""")
_NAME = re.compile(r"<(/?)\s*(\w+)", re.ASCII)
_ATTRIBUTE = re.compile(r"""([\w:-]+)\s*=\s*(["'])(.*?)\2""")

#: Elements that separate texts, so that the texts on both sides have positions of their own.
_STRUCTURE = frozenset({"table", "tr", "td", "hr", "vr", "img"})

#: The factor by which names and shapes are wider in the widest common fonts, DejaVu Sans and Verdana, than in
#: Helvetica: 1.12 to 1.22. Programs that do not know `textLength` (librsvg, Qt) draw them this wide.
_WIDEST = 1.22

#: The distance from the middle of a line to the baseline of its letters, as a fraction of their size.
_DROP = 0.35

#: The attributes of nodes, boxes and edges that are labels.
_LABELS = ("label", "xlabel", "headlabel", "taillabel")

_ANCHORS = {"left": "start", "right": "end"}

#: The mark that `dot` draws in place of a text: the text's number, in a size that takes no space in any font.
_MARK = '<font point-size="1">@{}</font>'
_DRAWN_MARK = re.compile(r"<text ([^>]*)>@(\d+)</text>\n")

_PLACE_OF_MARK = ("x", "y", "text-anchor", "font-size")


class _Font(NamedTuple):
    size: float
    bold: bool
    name: str


class _Line(NamedTuple):
    """A line of a label, with texts in different fonts."""

    runs: Sequence[tuple[str, _Font]]
    align: str
    height: int

    def width(self) -> float:
        return sum(measure(text, font.size, bold=font.bold, font=font.name) for text, font in self.runs)


class _Block(NamedTuple):
    """The lines of a label that are at one position in a picture."""

    lines: Sequence[_Line]
    room: int

    @property
    def height(self) -> int:
        return sum(line.height for line in self.lines)


class FixedLabels:
    """Reserves space for labels in the text of a picture, and writes the labels into the picture that `dot` has drawn.

    `dot` would measure a label in the fonts of this machine, and place each of its words as in these fonts.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._reserved: dict[tuple[object, ...], Html] = {}
        self._seen: list[Mapping[str, str]] = []

    def reserve_all(
        self, attributes: Mapping[str, Any], *, margin: float = 0, align: str = "center"
    ) -> dict[str, Html]:
        """Returns the attributes that are labels, with marks in place of their texts.

        Args:
            margin: the space beside the label, for both sides together.
            align: left, center or right, for lines without an alignment of their own.
        """
        if "record" in str(
            attributes.get("shape")
        ):  # the label is in Graphviz's language for records, not HTML
            return {}
        size, font = float(attributes.get("fontsize") or 14), str(attributes.get("fontname") or "")
        return {
            name: self.reserve(attributes[name], size=size, font=font, margin=margin, align=align)
            for name in _LABELS
            if attributes.get(name) not in (None, "")
        }

    def reserve(
        self, label: object, *, size: float, font: str = "", margin: float = 0, align: str = "center"
    ) -> Html:
        """Returns a label, plain or `Html`, with marks in place of its texts; see `reserve_all`."""
        content = to_html(label)
        key = (content, size, font, margin, align)
        if key not in self._reserved:
            self._reserved[key] = _Reader(self._blocks, _Font(size, False, font), margin, align).read(content)
        return self._reserved[key]

    def fill(self, svg: str) -> str:
        """Returns the picture with each line of each label as one text, in the width that was reserved."""
        return _DRAWN_MARK.sub(self._write, svg)

    def _write(self, found: re.Match[str]) -> str:
        self._seen.append(_attributes_of(found[1]))
        block = self._blocks[int(found[2])]
        # The block is complete once the marks of all its texts have been found.
        if len(self._seen) < sum(len(line.runs) for line in block.lines):
            return ""
        seen, self._seen = self._seen, []
        return "".join(_write_block(block, seen))


class _Reader:
    """Reads a label once, and puts marks in place of its texts."""

    def __init__(self, blocks: list[_Block], font: _Font, margin: float, align: str) -> None:
        self._blocks = blocks
        self._fonts = [font]
        self._margin = margin
        self._align = self._align_of_lines = align

    def read(self, label: Html) -> Html:
        """Returns the label with marks."""
        found: list[str] = []
        block: list[str] = []
        for token in _TAG.split(_COMMENT.sub("", label)):
            name = _NAME.match(token)
            if name is None or name[2].lower() not in _STRUCTURE:
                block.append(token)
                continue
            found += [self._mark(block), token]
            block = []
            if name[2].lower() == "td":
                self._margin, self._align = 0, _attribute(token, "align", "center").lower()
                self._align_of_lines = _attribute(token, "balign", self._align).lower()
        return Html("".join([*found, self._mark(block)]))

    def _mark(self, tokens: Sequence[str]) -> str:
        """Returns a table of fixed size with a mark for each text, and the tags around it."""
        marked: list[str] = []
        lines: list[_Line] = []
        runs: list[tuple[str, _Font]] = []
        for token in tokens:
            name = _NAME.match(token)
            if name is None:
                text = html.unescape(token.replace("\n", ""))  # `dot` treats it like this
                runs += [(text, self._fonts[-1])] if text else []
                marked += [_MARK.format(len(self._blocks))] if text else []
            elif name[2].lower() == "br":
                lines.append(self._line(runs, _attribute(token, "align", self._align_of_lines).lower()))
                runs = []
            else:
                self._step_into(token, name)
                marked.append(token)
        lines += [self._line(runs, self._align_of_lines)] if runs else []
        if not any(text.strip() for line in lines for text, _ in line.runs):
            return "".join(tokens)
        self._blocks.append(_Block(lines, self._room(lines)))
        return _reserve_cell(self._blocks[-1], "".join(marked), self._align)

    def _step_into(self, tag: str, name: re.Match[str]) -> None:
        """Remembers the font that applies after a tag."""
        if name[1]:
            self._fonts = self._fonts[:-1] or self._fonts
            return
        size, bold, font = self._fonts[-1]
        if name[2].lower() == "b":
            bold = True
        elif name[2].lower() == "font":
            given = _attribute(tag, "point-size", "")
            size, font = float(given) if given.isdecimal() else size, _attribute(tag, "face", font)
        self._fonts.append(_Font(size, bold, font))

    def _line(self, runs: Sequence[tuple[str, _Font]], align: str) -> _Line:
        size = max((font.size for _, font in runs), default=self._fonts[-1].size)
        return _Line(runs, align, int(1.1 * size + 1))  # `dot` computes it like this

    def _room(self, lines: Sequence[_Line]) -> int:
        width = max(line.width() for line in lines)
        return math.ceil(max(width, width * _WIDEST - self._margin))


def _attribute(tag: str, name: str, otherwise: str) -> str:
    return _attributes_of(tag).get(name, otherwise)


def _attributes_of(tag: str) -> dict[str, str]:
    return {name.lower(): value for name, _, value in _ATTRIBUTE.findall(tag)}


def _reserve_cell(block: _Block, content: str, align: str) -> str:
    align = align if align in _ANCHORS else "center"
    size = f'fixedsize="true" width="{block.room}" height="{block.height}"'
    return (
        f'<table border="0" cellborder="0" cellspacing="0" cellpadding="0" {size} align="{align}">'
        f'<tr><td {size} align="left">{content}<br align="left"/></td></tr></table>'
    )


def _write_block(block: _Block, marks: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yields a text for each line; the marks are at the left, in the middle of the line's height."""
    left, middle = float(marks[0]["x"]), float(marks[0]["y"]) - _DROP
    top = middle - block.height / 2
    pending = iter(marks)
    for line in block.lines:
        looks = [_look_of(next(pending), font) for _, font in line.runs]
        if line.runs:
            size = max(font.size for _, font in line.runs)
            yield _write_line(line, looks, (left, left + block.room), top + line.height / 2 + _DROP * size)
        top += line.height


def _look_of(mark: Mapping[str, str], font: _Font) -> dict[str, str]:
    look = {name: value for name, value in mark.items() if name not in _PLACE_OF_MARK}
    return look | {"font-size": f"{font.size:.2f}"}


def _write_line(line: _Line, looks: Sequence[dict[str, str]], ends: tuple[float, float], y: float) -> str:
    """Returns a line as one text, in which common attributes of its parts are written once."""
    anchor = _ANCHORS.get(line.align, "middle")
    x = {"start": ends[0], "end": ends[1]}.get(anchor, sum(ends) / 2)
    common = dict(set.intersection(*(set(look.items()) for look in looks)))
    parts = [
        _write_part(text, {name: value for name, value in look.items() if name not in common})
        for (text, _), look in zip(line.runs, looks, strict=True)
    ]
    ordered = {name: value for name, value in looks[0].items() if name in common}
    # Otherwise SVG drops blanks at both ends, and librsvg those between two fonts.
    has_blanks = any(text != " ".join(text.split()) for text, _ in line.runs)
    given = {
        "text-anchor": anchor,
        "x": f"{x:.1f}",
        "y": f"{y:.1f}",
        **ordered,
        "textLength": f"{line.width():.1f}",
    }
    given |= {"lengthAdjust": "spacingAndGlyphs"} | ({"xml:space": "preserve"} if has_blanks else {})
    return f"<text{_write_attributes(given)}>{''.join(parts)}</text>\n"


def _write_part(text: str, look: Mapping[str, str]) -> str:
    shown = escape_html(text)
    return f"<tspan{_write_attributes(look)}>{shown}</tspan>" if look else shown


def _write_attributes(attributes: Mapping[str, str]) -> str:
    return "".join(f' {name}="{value}"' for name, value in attributes.items())
