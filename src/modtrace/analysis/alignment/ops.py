"""Pairs the ops of two recordings, by the sequence in which they ran inside of each pair of calls."""

import numpy as np

from ..step.calls import Rows, iterate_levels
from .calls import translate
from .keys import number_keys, number_texts, take
from .sequences import align_sequences
from .sides import Side


def pair_ops(a: Side, b: Side, calls: tuple[Rows, Rows], steps: Rows) -> tuple[Rows, Rows]:
    """Returns the partner of each op; -1 if there is none.

    What ran in a call without partner is aligned as a part of the call around it: it may be that one of the two models
    has a module where the other has a few lines.
    """
    groups = _number_groups(a, b, calls, steps)
    texts = number_texts(a.ops.names, b.ops.names)
    tokens = take(texts[0], a.ops.name), take(texts[1], b.ops.name)
    rows = [
        np.flatnonzero(side.ops.kept)[np.lexsort((side.ops.order[side.ops.kept], group[side.ops.kept]))]
        for side, group in zip((a, b), groups, strict=True)
    ]
    partner, back = np.full(len(a.ops.step), -1, np.int64), np.full(len(b.ops.step), -1, np.int64)
    pairs = _align_groups((groups[0][rows[0]], groups[1][rows[1]]), (tokens[0][rows[0]], tokens[1][rows[1]]))
    at, there = rows[0][pairs[:, 0]], rows[1][pairs[:, 1]]
    partner[at], back[there] = there, at
    return partner, back


def _number_groups(a: Side, b: Side, calls: tuple[Rows, Rows], steps: Rows) -> tuple[Rows, Rows]:
    around = _find_paired(a, calls[0], calls[0]), _find_paired(b, calls[1], np.arange(len(calls[1])))
    call, call_b = take(around[0], a.ops.call), take(around[1], b.ops.call)
    is_alone, is_alone_b = call < 0, call_b < 0
    return number_keys(
        (call, call_b),
        (np.where(is_alone, translate(a.ops.step, steps), -1), np.where(is_alone_b, b.ops.step, -1)),
        (np.where(is_alone, a.ops.phase, -1), np.where(is_alone_b, b.ops.phase, -1)),
    )


def _find_paired(side: Side, partner: Rows, number: Rows) -> Rows:
    """Returns the number of each call or, if it has no partner, of the innermost call around it that has one."""
    found = np.full(len(partner), -1, np.int64)
    for level in iterate_levels(side.calls.parent):
        found[level] = np.where(partner[level] >= 0, number[level], take(found, side.calls.parent[level]))
    return found


def _align_groups(groups: tuple[Rows, Rows], tokens: tuple[Rows, Rows]) -> Rows:
    """Returns pairs of positions, where the ops of a group are adjacent."""
    pairs = [np.empty((0, 2), np.int64)]
    distinct, first, counts = np.unique(groups[0], return_index=True, return_counts=True)
    begins = np.searchsorted(groups[1], distinct)
    ends = np.searchsorted(groups[1], distinct, side="right")
    for begin, count, start, end in zip(
        first.tolist(), counts.tolist(), begins.tolist(), ends.tolist(), strict=True
    ):
        found = align_sequences(tokens[0][begin : begin + count], tokens[1][start:end])
        pairs.append(found + np.array([begin, start]))
    return np.concatenate(pairs)
