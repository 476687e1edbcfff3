"""Pairs the modules of two recordings."""

import numpy as np

from ..step.calls import Rows
from .sides import Side


def pair_places(a: Side, b: Side) -> tuple[Rows, Rows]:
    """Returns the partner of each place of the module trees; -1 if there is none."""
    roots = _pair_roots(a, b)
    there = {(name.root, name.path): index for index, name in reversed(list(enumerate(b.names)))}
    partner, back = np.full(len(a.names), -1, np.int64), np.full(len(b.names), -1, np.int64)
    for at, name in enumerate(a.names):
        found = there.get((roots.get(name.root, ""), name.path), -1)
        if found >= 0 and back[found] < 0:
            partner[at], back[found] = found, at
    return partner, back


def _pair_roots(a: Side, b: Side) -> dict[str, str]:
    """Returns the root of `b` for roots of `a`: of equal names, and else the only ones, or those in equal order."""
    names = [list(dict.fromkeys(name.root for name in side.names)) for side in (a, b)]
    common = {name: name for name in names[0] if name in names[1]}
    rest = [[name for name in each if name not in common] for each in names]
    return common | dict(zip(*rest, strict=False))
