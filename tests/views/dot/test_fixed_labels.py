"""Labels whose room no font decides: what `dot` is given, and what comes into its picture."""

import re

import pytest

from helpers.drawn_views import layer, op, view
from helpers.programs import needs_program
from modtrace.views.dot.fixed_labels import FixedLabels
from modtrace.views.dot.graphviz import render_svg
from modtrace.views.dot.style import GraphStyle
from modtrace.views.dot.text import Html
from modtrace.views.dot.text_width import measure

_CELL = '<table border="0" cellborder="0" cellspacing="0" cellpadding="0" {0} align="{1}"><tr><td {0} align="left">'


def room(width: int, height: int, align: str = "center") -> str:
    return _CELL.format(f'fixedsize="true" width="{width}" height="{height}"', align)


def drawn(x: float, y: float, mark: int, more: str = "") -> str:
    return f'<text text-anchor="start" x="{x}" y="{y}" font-size="1.00"{more}>@{mark}</text>\n'


def lines_of(label: object) -> list[str]:
    """The lines of a label that was drawn, each as one text."""
    labels = FixedLabels()
    marks = re.findall(r"@(\d+)", labels.reserve(label, size=10))
    filled = labels.fill("".join(drawn(0, 0, int(each)) for each in marks))
    return re.findall(r">(.*)</text>", filled)


@pytest.mark.parametrize(
    ("text", "bold", "font", "width"),
    [
        ("conv1 (Conv2d)", False, "Helvetica", 70.58),
        ("conv1 (Conv2d)", True, "Helvetica", 75.01),
        ("conv1 (Conv2d)", False, "Helvetica-Bold", 75.01),
        ("conv1 (Conv2d)", False, "DejaVu Sans Mono", 84.0),
        ("2×8", False, "Helvetica", 16.96),
        ("größe", False, "Helvetica", 25.57),
        ("층층", False, "Courier", 20.0),
        ("", False, "Helvetica", 0.0),
    ],
)
def test_width_of_a_text_is_that_of_helvetica_or_of_a_monospaced_font(
    text: str, bold: bool, font: str, width: float
) -> None:
    assert measure(text, 10, bold=bold, font=font) == pytest.approx(width)


def test_label_takes_the_room_of_its_widest_line_and_the_height_of_all() -> None:
    label = FixedLabels().reserve("iii\nWWW", size=10)
    assert label == (
        f'{room(35, 24)}<font point-size="1">@0</font><font point-size="1">@0</font>'
        '<br align="left"/></td></tr></table>'
    )


def test_room_for_wider_fonts_may_lie_in_the_margin() -> None:
    labels = FixedLabels()
    assert measure("WWWWW.", 10) == pytest.approx(49.98)
    assert 'width="61"' in labels.reserve("WWWWW.", size=10)
    assert 'width="50"' in labels.reserve("WWWWW.", size=10, margin=14)


def test_line_of_words_in_several_fonts_becomes_one_text() -> None:
    labels = FixedLabels()
    labels.reserve(Html('<b>conv1 </b>(Conv2d)<br/><font point-size="9">2×8</font>'), size=10)
    svg = labels.fill(
        "<a>\n"
        + drawn(7, -10, 0, ' font-weight="bold" fill="red"')
        + drawn(9, -10, 0, ' fill="red"')
        + drawn(11, -10, 0, ' fill="red"')
        + "</a>\n"
    )
    assert svg == (
        "<a>\n"
        '<text text-anchor="middle" x="51.5" y="-11.9" fill="red" font-size="10.00" textLength="72.8" '
        'lengthAdjust="spacingAndGlyphs" xml:space="preserve"><tspan font-weight="bold">conv1 </tspan>(Conv2d)</text>\n'
        '<text text-anchor="middle" x="51.5" y="-1.2" fill="red" font-size="9.00" textLength="15.3" '
        'lengthAdjust="spacingAndGlyphs">2×8</text>\n'
        "</a>\n"
    )


def test_lines_begin_where_the_label_says() -> None:
    labels = FixedLabels()
    labels.reserve(Html('aaaa<br/>b<br align="left"/>c<br align="right"/>'), size=10)
    svg = labels.fill(drawn(0, 0, 0) * 3)
    assert re.findall(r'text-anchor="(\w+)" x="([\d.]+)"', svg) == [
        ("middle", "14.0"),
        ("start", "0.0"),
        ("end", "28.0"),
    ]


def test_lines_of_a_cell_begin_where_the_cell_says() -> None:
    labels = FixedLabels()
    cell = labels.reserve(
        Html('<table><tr><td align="text" balign="LEFT">aaaa<br/>b</td></tr></table>'), size=10
    )
    assert room(28, 24) in cell
    assert re.findall(r'text-anchor="(\w+)"', labels.fill(drawn(0, 0, 0) * 2)) == ["start", "start"]


def test_each_cell_of_a_table_has_its_room_and_blank_cells_stay() -> None:
    table = '<table><tr><td align="right">one</td><td bgcolor="red"> </td></tr></table>'
    assert FixedLabels().reserve(Html(table), size=10) == (
        f'<table><tr><td align="right">{room(21, 12, "right")}<font point-size="1">@0</font><br align="left"/>'
        '</td></tr></table></td><td bgcolor="red"> </td></tr></table>'
    )


def test_equal_labels_beside_each_other_are_two_texts() -> None:
    labels = FixedLabels()
    assert labels.reserve("0", size=10) == labels.reserve("0", size=10)
    assert len(re.findall(r">0</text>", labels.fill(drawn(0, 0, 0) + drawn(20, 0, 0)))) == 2


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        ("a\n\nb", ["a", "b"]),
        ("  two  blanks ", ["  two  blanks "]),
        (Html("&lt;x&gt; &amp;amp; &#215;"), ["&lt;x&gt; &amp;amp; ×"]),
        (Html('<font color="red" face="a>b">x</font>'), ["x"]),
        (Html("one<!-- not seen --> text"), ["one text"]),
        ("@0", ["@0"]),
        (7, ["7"]),
        ("", []),
    ],
)
def test_text_is_written_as_it_is(label: object, lines: list[str]) -> None:
    assert lines_of(label) == lines


def test_record_is_left_to_dot() -> None:
    needs_program("dot")
    svg = render_svg(view([op("a")]), style=Fields(shape="record"))
    assert re.findall(r">(\w+)</text>", svg) == ["left", "right"]
    assert "textLength" not in svg


class Fields(GraphStyle):
    def node(self, node):  # type: ignore[no-untyped-def]
        return super().node(node) | {"label": "left|right"}


def test_no_mark_is_left_in_a_picture() -> None:
    needs_program("dot")
    svg = render_svg(view([layer("head", "Linear", raised=True), op("relu", shape=(2, 8))]), overlay="time")
    assert "@" not in svg
    assert svg.count("<text ") == svg.count("textLength=") == 9
