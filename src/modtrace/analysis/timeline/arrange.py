"""Puts spans into the lanes of a timeline, and clips them so that they nest."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...recording.phase import OPTIMIZER
from ..tables.calls import iterate_levels
from ..tables.columns import Column, Rows, find_rows
from .spans import DEVICE, LANE_KINDS, STEPS, Detail, SpanRows, Wanted, choose_details

_NEVER_NS = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Nested:
    """Spans after clipping, so that they nest; they keep the given order."""

    start_ns: Column
    end_ns: Column
    depth: Column  # the number of spans around each in its lane


def nest(parent: Rows, lane: Column, start_ns: Column, end_ns: Column) -> Nested:
    """Clips spans to their parents, and each to the beginning of its next sibling.

    Args:
        parent: the row of each span's parent, which is in the same lane; -1 for none.
        lane: the lane of each span. Spans of one lane without parent are siblings.
        start_ns: the beginning of each span.
        end_ns: the end of each span. A span that never ended may have any late end, since it ends with its parent or
            with its next sibling.
    """
    start_ns, end_ns = start_ns.copy(), np.maximum(start_ns, end_ns)
    depth = np.zeros(len(parent), np.int32)
    for number, level in enumerate(iterate_levels(parent)):
        depth[level] = number
        if number:
            above = parent[level]
            start_ns[level] = np.clip(start_ns[level], start_ns[above], end_ns[above])
            end_ns[level] = np.clip(end_ns[level], start_ns[level], end_ns[above])
        _clip_to_siblings(level, parent[level] if number else lane[level], start_ns, end_ns)
    return Nested(start_ns, end_ns, depth)


def _clip_to_siblings(rows: Rows, group: Rows, start_ns: Column, end_ns: Column) -> None:
    order = np.lexsort((end_ns[rows], start_ns[rows], group))
    rows, group = rows[order], group[order]
    follows = group[1:] == group[:-1]
    next_ns = np.where(follows, start_ns[rows[1:]], _NEVER_NS)
    end_ns[rows[:-1]] = np.minimum(end_ns[rows[:-1]], next_ns)


def find_parents(lane: Column, start_ns: Column, end_ns: Column) -> Rows:
    """Returns the innermost span that contains each span in its lane, judging by times alone; -1 if there is none."""
    parent = np.full(len(lane), -1, np.int64)
    around: list[tuple[int, int, int]] = []  # lane, end and row of open spans, outermost first
    columns = (lane.tolist(), start_ns.tolist(), end_ns.tolist())
    for row in np.lexsort((-end_ns, start_ns, lane)).tolist():
        own_lane, start, end = (column[row] for column in columns)
        while around and (around[-1][0] != own_lane or around[-1][1] <= start):
            around.pop()
        if around and end <= around[-1][1]:
            parent[row] = around[-1][2]
        around.append((own_lane, end, row))
    return parent


SPAN_KINDS = ("call", "op", "step")

#: A time that was moved by more than this is also given as measured; clocks and hooks explain smaller moves.
_ROUNDING_NS = 1_000


@dataclass(frozen=True)
class Lane:
    """A row of the timeline, whose spans nest and are drawn below each other."""

    kind: str  # one of LANE_KINDS
    thread: int | None  # counts threads as they were first seen; None for steps and devices


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Spans in the order in which they begin, outer ones before inner ones."""

    lane: Rows  # index in the timeline's lanes
    kind: Column  # codes of SPAN_KINDS
    start_ns: Column  # counts from the timeline's start
    duration_ns: Column  # includes the time that modtrace spent measuring inside
    depth: Column  # the number of spans around each in its lane
    row_id: Column  # the id of the call, op or step
    name: Column  # codes of `names`
    names: tuple[str, ...]
    details: tuple[Detail, ...]

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Arranged:
    """The spans of a timeline in order, with their lanes."""

    lanes: tuple[Lane, ...]
    spans: Spans
    start_ns: int  # the start of the first span
    place: Rows  # the index in the spans of each given row


def arrange(rows: SpanRows, kind: Column, details: Wanted) -> Arranged:
    """Returns the spans in lanes, in the order in which they begin.

    Args:
        rows: the spans as measured.
        kind: the code of SPAN_KINDS of each span.
        details: the details to include.
    """
    lane, lanes = _number_lanes(rows)
    end_ns = _find_ends(rows)
    nested = nest(_find_around(rows, lane, end_ns), lane, rows.start_ns, end_ns)
    duration_ns = nested.end_ns - nested.start_ns
    order = np.lexsort((duration_ns, nested.depth, lane, nested.start_ns))
    zero_ns = int(rows.start_ns.min()) if len(rows) else 0
    spans = Spans(
        lane=lane[order],
        kind=kind[order],
        start_ns=nested.start_ns[order] - zero_ns,
        duration_ns=duration_ns[order],
        depth=nested.depth[order],
        row_id=rows.row_id[order],
        name=rows.name.values[order],
        names=rows.name.dictionary or (),
        details=tuple(
            detail.take(order)
            for detail in (*rows.details, *choose_details(_describe_clips(rows, nested, zero_ns), details))
        ),
    )
    return Arranged(lanes=lanes, spans=spans, start_ns=zero_ns, place=np.argsort(order))


def _number_lanes(rows: SpanRows) -> tuple[Rows, tuple[Lane, ...]]:
    """Returns the lane of each row, and the lanes."""
    keys = rows.thread.astype(np.int64) * len(LANE_KINDS) + rows.lane
    keys, number = (distinct := np.unique(keys)), np.searchsorted(distinct, keys)
    found = zip((keys // len(LANE_KINDS)).tolist(), (keys % len(LANE_KINDS)).tolist(), strict=True)
    return number.astype(np.int32), tuple(
        Lane(LANE_KINDS[kind], None if thread < 0 else thread) for thread, kind in found
    )


def _find_ends(rows: SpanRows) -> Column:
    """Returns the end of each span. A span that never ended ends with its step, or with the last known span."""
    last_ns = max(int(rows.start_ns.max(initial=0)), int(rows.end_ns[rows.ended].max(initial=0)))
    steps = np.flatnonzero((rows.lane == LANE_KINDS.index(STEPS)) & rows.ended)
    step = find_rows(rows.step[steps], rows.step)
    end_ns: Column = np.where(rows.ended, rows.end_ns, np.append(rows.end_ns[steps], last_ns)[step])
    return end_ns


def _find_around(rows: SpanRows, lane: Rows, end_ns: Column) -> Rows:
    """Returns the parent of each span. Parents of steps, optimizers and spans on devices are found by their times."""
    lanes = [LANE_KINDS.index(kind) for kind in (STEPS, OPTIMIZER, DEVICE)]
    by_time = np.isin(rows.lane, lanes) & (rows.parent < 0)
    at = np.flatnonzero(by_time)
    found = find_parents(lane[at], rows.start_ns[at], end_ns[at])
    parent: Rows = rows.parent.copy()
    parent[at] = np.append(at, -1)[found]
    return parent


def _describe_clips(rows: SpanRows, nested: Nested, zero_ns: int) -> Iterator[Detail]:
    start_moved = np.abs(nested.start_ns - rows.start_ns) > _ROUNDING_NS
    end_moved = rows.ended & (np.abs(nested.end_ns - rows.end_ns) > _ROUNDING_NS)
    yield Detail("unfinished", ~rows.ended)
    yield Detail("measured_start_ns", np.where(start_moved, rows.start_ns - zero_ns, -1))
    yield Detail("measured_end_ns", np.where(end_moved, rows.end_ns - zero_ns, -1))
