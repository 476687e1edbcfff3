"""Joins the parts of module paths, and chooses the alias of a shared module below a parent."""

from collections.abc import Iterable
from itertools import takewhile


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
