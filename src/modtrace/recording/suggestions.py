"""Helps messages to say how many things there are, to list the first few, and to suggest a similar name."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby

_FEW = 8
_MOST = 2**20  # numbers in a range that is read


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" with the nearest known name, or "" if none is near."""
    near = get_close_matches(str(given), list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def count_of(number: int, noun: str, form: Callable[[int], str] = "{:,}".format, *, plural: str = "s") -> str:
    """Returns a number of things: `1 step`, `3,000 steps`.

    Args:
        form: formats the number.
        plural: the ending of the noun for several things.
    """
    return f"{form(number)} {noun}{'' if number == 1 else plural}"


def first_few(things: Sequence[object], most: int = _FEW) -> str:
    """Returns the first things, separated by commas; `…` stands for the rest."""
    shown = [str(thing) for thing in things[:most]]
    return ", ".join([*shown, "…"] if len(things) > most else shown)


def ranges_of(numbers: Iterable[int]) -> str:
    """Returns ascending numbers with ranges for neighbours: `0-3,8`."""
    texts = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        texts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ",".join(texts)


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns `rank 1`, or `the ranks 0-3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"the ranks {ranges_of(ranks)}"


def numbers_of(ranges: str) -> tuple[int, ...]:
    """Returns the numbers that `ranges_of` has written; none of what is not understood."""
    found: list[int] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            found += range(int(first), min(int(last or first), int(first) + _MOST) + 1)
    return tuple(found)
