"""Pictures in the fonts of others: no text leaves its box or runs into another, and the file is the same."""

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.ft2font import FT2Font

from helpers.browser import look_at_texts, use_fonts
from helpers.odd_pictures import draw_odd_pictures
from helpers.programs import needs_program

_DOCS = Path(__file__).parents[3] / "docs"
_SVG = "{http://www.w3.org/2000/svg}"

#: Fonts that come with matplotlib: wider than Helvetica, as wide for every letter, and narrower.
_FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
_WIDE = [_FONTS / "DejaVuSans.ttf", _FONTS / "DejaVuSans-Bold.ttf"]
_MONOSPACED = [_FONTS / "DejaVuSansMono.ttf", _FONTS / "DejaVuSansMono-Bold.ttf"]
_NARROW = [_FONTS / "STIXGeneral.ttf", _FONTS / "STIXGeneralBol.ttf"]


def gallery() -> dict[str, str]:
    paths = [*sorted((_DOCS / "gallery").glob("*.svg")), _DOCS / "packages.svg"]
    return {each.stem: each.read_text(encoding="utf-8") for each in paths}


@pytest.mark.browser
@pytest.mark.parametrize("fonts", [_WIDE, _MONOSPACED, _NARROW], ids=["wide", "monospaced", "narrow"])
def test_browser_with_any_font_draws_each_text_in_its_box_and_beside_the_others(
    fonts: list[Path], tmp_path: Path
) -> None:
    needs_program("dot")
    pictures = gallery() | draw_odd_pictures()
    found = look_at_texts(pictures, use_fonts(fonts, tmp_path / "fonts"), tmp_path)
    assert {name: each["faults"] for name, each in found.items()} == {name: [] for name in pictures}
    assert min(each["texts"] for each in found.values()) > 1


def test_program_that_knows_no_text_lengths_draws_the_gallery_in_a_wide_font_in_its_boxes() -> None:
    fonts = [FT2Font(str(each)) for each in _WIDE]
    for name, svg in gallery().items():
        for text, ends in texts_of_nodes(svg):
            width = natural_width(text, fonts)
            assert width <= ends[1] - ends[0], f"{name}: {''.join(text.itertext())} is {width:.1f} wide"


def test_same_file_is_drawn_whatever_fonts_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_program("dot")
    drawn = []
    for at, fonts in enumerate((_WIDE, _NARROW)):
        monkeypatch.setenv("FONTCONFIG_FILE", use_fonts(fonts, tmp_path / f"fonts-{at}")["FONTCONFIG_FILE"])
        drawn.append(draw_odd_pictures())
    assert drawn[0] == drawn[1]


def texts_of_nodes(svg: str) -> list[tuple[ElementTree.Element, tuple[float, float]]]:
    """Each text of each node, and where the node begins and ends."""
    nodes = [each for each in ElementTree.fromstring(svg).iter(f"{_SVG}g") if each.get("class") == "node"]
    return [(text, ends_of(node)) for node in nodes for text in node.iter(f"{_SVG}text")]


def ends_of(node: ElementTree.Element) -> tuple[float, float]:
    path = next(node.iter(f"{_SVG}path"))
    across = [float(x) for x in re.findall(r"(-?[\d.]+),-?[\d.]+", path.attrib["d"])]
    return min(across), max(across)


def natural_width(text: ElementTree.Element, fonts: list[FT2Font]) -> float:
    """How wide a text is in these fonts, a plain and a bold one, where its `textLength` is not known."""
    size, is_bold = float(text.attrib["font-size"]), text.get("font-weight") == "bold"
    width = advance(text.text or "", fonts[is_bold], size)
    for part in text:
        width += advance(part.text or "", fonts[is_bold or part.get("font-weight") == "bold"], size)
        width += advance(part.tail or "", fonts[is_bold], size)
    return width


def advance(text: str, font: FT2Font, size: float) -> float:
    font.set_size(size, 72)
    return float(sum(font.load_char(ord(each)).linearHoriAdvance / 65536 for each in text))
