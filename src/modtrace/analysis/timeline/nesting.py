"""Makes spans nest: one that begins inside another ends inside of it, and siblings do not overlap."""

from dataclasses import dataclass

import numpy as np

from ..step.calls import Column, Rows, iterate_levels

_NEVER_NS = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Nested:
    """Spans that nest, in the order of those that were given."""

    start_ns: Column
    end_ns: Column
    depth: Column  # spans around each, in its lane


def nest(parent: Rows, lane: Column, start_ns: Column, end_ns: Column) -> Nested:
    """Clips spans to those around them, and each to the beginning of its next sibling.

    Args:
        parent: the row of the span around each, which is of its lane; -1 for none.
        lane: spans of one lane without parent are siblings.
        start_ns: when each began.
        end_ns: when it ended; a span that never ended may be given any late end, for it ends with what is
            around it or with the next that begins beside it.
    """
    start_ns, end_ns = start_ns.copy(), np.maximum(start_ns, end_ns)
    depth = np.zeros(len(parent), np.int64)
    for number, level in enumerate(iterate_levels(parent)):
        depth[level] = number
        if number:
            _clip_to_parents(level, parent[level], start_ns, end_ns)
        _clip_to_siblings(level, parent[level] if number else lane[level], start_ns, end_ns)
    return Nested(start_ns, end_ns, depth)


def _clip_to_parents(rows: Rows, above: Rows, start_ns: Column, end_ns: Column) -> None:
    start_ns[rows] = np.clip(start_ns[rows], start_ns[above], end_ns[above])
    end_ns[rows] = np.clip(end_ns[rows], start_ns[rows], end_ns[above])


def _clip_to_siblings(rows: Rows, group: Rows, start_ns: Column, end_ns: Column) -> None:
    order = np.lexsort((end_ns[rows], start_ns[rows], group))
    rows, group = rows[order], group[order]
    follows = group[1:] == group[:-1]
    next_ns = np.where(follows, start_ns[rows[1:]], _NEVER_NS)
    end_ns[rows[:-1]] = np.minimum(end_ns[rows[:-1]], next_ns)


def find_parents(lane: Column, start_ns: Column, end_ns: Column) -> Rows:
    """The innermost span of its lane that each lies in, by times alone; -1 for none."""
    parent = np.full(len(lane), -1, np.int64)
    around: list[tuple[int, int, int]] = []  # lane, end and row of the spans that are open, outermost first
    columns = (lane.tolist(), start_ns.tolist(), end_ns.tolist())
    for row in np.lexsort((-end_ns, start_ns, lane)).tolist():
        own_lane, start, end = (column[row] for column in columns)
        while around and (around[-1][0] != own_lane or around[-1][1] <= start):
            around.pop()
        if around and end <= around[-1][1]:
            parent[row] = around[-1][2]
        around.append((own_lane, end, row))
    return parent
