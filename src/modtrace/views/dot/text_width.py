"""Computes the width of a text from a table, independently of the fonts on this machine."""

import re
import unicodedata
from functools import lru_cache

#: Characters by their width in Helvetica, in thousandths of the font size (Adobe's Core 14 font metrics). Arial,
#: Liberation Sans and Nimbus Sans have the same widths.
_REGULAR = {
    191: "'", 222: "ijl", 260: "|", 278: " !,./:;I[\\]ft·", 333: "()-`r", 334: "{}", 355: '"', 389: "*",
    469: "^", 500: "Jcksvxyz", 556: "#$0123456789?L_abdeghnopqu", 584: "+<=>~×", 611: "FTZ",
    667: "&ABEKPSVXY", 722: "CDHNRUw", 778: "GOQ", 833: "Mm", 889: "%", 944: "W", 1000: "…—→←", 1015: "@",
}  # fmt: skip
_BOLD = {
    238: "'", 278: " ,./I\\ijl·", 280: "|", 333: "!()-:;[]`ft", 389: "*r{}", 474: '"', 500: "z",
    556: "#$0123456789J_aceksvxy", 584: "+<=>^~×", 611: "?FLTZbdghnopqu", 667: "EPSVXY", 722: "&ABCDHKNRU",
    778: "GOQw", 833: "M", 889: "%m", 944: "W", 975: "@", 1000: "…—→←",
}  # fmt: skip
_WIDTHS = tuple(
    {character: width for width, characters in table.items() for character in characters}
    for table in (_REGULAR, _BOLD)
)

#: The widths of characters that are not in the tables: like digits, like capitals, and of ideographs.
_USUAL, _CAPITAL, _IDEOGRAPH = 556, 722, 1000
_MONOSPACED = 600
_WITHOUT_WIDTH = ("Mn", "Me", "Cf")  # categories of accents and control characters

_IS_MONOSPACED = re.compile("mono|courier|consol|menlo", re.IGNORECASE)
_IS_BOLD = re.compile("bold", re.IGNORECASE)


def measure(text: str, size: float, *, bold: bool = False, font: str = "") -> float:
    """Returns the width of a text in the unit of its size, as Helvetica or a monospaced font would have it."""
    is_bold, is_monospaced = bold or bool(_IS_BOLD.search(font)), bool(_IS_MONOSPACED.search(font))
    return _thousandths(text, is_bold, is_monospaced) * size / 1000


@lru_cache(16384)
def _thousandths(text: str, bold: bool, monospaced: bool) -> int:
    known = {} if monospaced else _WIDTHS[bold]
    usual, capital = (_MONOSPACED, _MONOSPACED) if monospaced else (_USUAL, _CAPITAL)
    total = 0
    for character in text:
        letter = unicodedata.normalize("NFD", character)[0]  # é is as wide as e
        if letter in known:
            total += known[letter]
        elif unicodedata.east_asian_width(character) in "WF":
            total += _IDEOGRAPH
        elif unicodedata.category(character) not in _WITHOUT_WIDTH:
            total += capital if character.isupper() else usual
    return total
