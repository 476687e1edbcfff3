"""What errors say of the things there are, when none of them was meant: which is near, and the first few."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_FEW = 8


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns a sentence with a space in front that names the nearest of the known words; empty if none is near."""
    near = get_close_matches(str(given), list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def first_few(things: Sequence[object], most: int = _FEW) -> str:
    """Returns the first of them with commas between; `…` stands for those that are left out."""
    shown = [str(each) for each in things[:most]]
    return ", ".join([*shown, "…"] if len(things) > most else shown)
