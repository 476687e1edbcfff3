"""Joins the parts of module paths, folds paths that count up, and chooses the alias of a shared module."""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

#: The parts of a path that are numbers: positions in lists.
_NUMBER = re.compile(r"(?<![^./])\d+(?![^.])")


def join(prefix: str, part: str) -> str:
    """Returns `prefix.part`, where either may be empty."""
    return f"{prefix}.{part}" if prefix and part else prefix or part


def is_below(path: str, ancestor: str) -> bool:
    """Returns whether `path` is `ancestor` or inside it; everything is inside the root `""`."""
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def path_and_above(path: str) -> list[str]:
    """Returns the path and the paths of all modules around it, including "" for the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def path_below(parent: str, path: str, aliases: Iterable[str]) -> str:
    """Returns the path of a shared module below `parent`, which is the one with the longest common start.

    A module registered as `x.l` and as `y.l` is `y.l` when `y` runs it.
    """

    def count_shared(alias: str) -> int:
        pairs = zip(parent.split("."), alias.split("."), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max([path, *aliases], key=count_shared)  # the first of several that share as many parts


def number_free(path: str) -> str:
    """Returns a path in which an asterisk stands for each number: equal for modules that repeat."""
    return _NUMBER.sub("*", path)


def order_of(name: str) -> tuple[str | int, ...]:
    """Returns a key that sorts names as people count: `h.2` before `h.10`."""
    parts = re.split(r"(\d+)", name)  # texts and numbers take turns
    return tuple(int(part) if at % 2 else part for at, part in enumerate(parts))


def fold_numbers(paths: Sequence[str]) -> str | None:
    """Returns one path for those that differ in their numbers alone, `blocks.0..31.attn`.

    None if they differ in more, or a number between the least and the largest is missing.
    """
    rows = {tuple(map(int, _NUMBER.findall(path))) for path in paths}
    if len({*map(number_free, paths)}) != 1 or len(rows) != len(paths):
        return None
    ends = [(min(column), max(column)) for column in zip(*rows, strict=True)]
    if len(paths) != math.prod(last - first + 1 for first, last in ends):
        return None
    ranges = (f"{first}..{last}" if last > first else f"{first}" for first, last in ends)
    return _NUMBER.sub(lambda _: next(ranges), paths[0])
