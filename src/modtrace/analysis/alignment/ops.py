"""Pairs the ops of two recordings, by the sequence in which they ran inside of each pair of calls."""

from collections.abc import Sequence

import numpy as np

from ..step.calls import Column, Rows, iterate_levels
from ..step.ops import base_name
from .calls import translate
from .keys import number_keys, number_texts, take
from .op_shapes import number_shapes
from .sequences import align_sequences
from .sides import Side


def pair_ops(a: Side, b: Side, calls: tuple[Rows, Rows], steps: Rows) -> tuple[Rows, Rows]:
    """Returns the partner of each op; -1 if there is none.

    What ran in a call without partner is aligned as a part of the call around it: it may be that one of the two models
    has a module where the other has a few lines.
    """
    groups = _number_groups(a, b, calls, steps)
    tokens = _number_ops(a, b)
    rows = [
        np.flatnonzero(side.ops.kept)[np.lexsort((side.ops.order[side.ops.kept], group[side.ops.kept]))]
        for side, group in zip((a, b), groups, strict=True)
    ]
    partner, back = np.full(len(a.ops.step), -1, np.int64), np.full(len(b.ops.step), -1, np.int64)
    pairs = _align_groups(
        (groups[0][rows[0]], groups[1][rows[1]]), [(one[rows[0]], other[rows[1]]) for one, other in tokens]
    )
    at, there = rows[0][pairs[:, 0]], rows[1][pairs[:, 1]]
    partner[at], back[there] = there, at
    return partner, back


def _number_ops(a: Side, b: Side) -> list[tuple[Rows, Rows]]:
    """Returns numbers of the ops of both, equal for: equal ops; those that differ in dtypes; also in shapes."""
    names = number_texts(a.ops.names, b.ops.names)
    name = take(names[0], a.ops.name), take(names[1], b.ops.name)
    bases = number_texts(*([base_name(each) for each in side.ops.names] for side in (a, b)))
    base = take(bases[0], a.ops.name), take(bases[1], b.ops.name)
    shape, dtype = number_shapes(a, b)
    return [number_keys(name, shape, dtype), number_keys(base, shape), base]


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


def _align_groups(groups: tuple[Rows, Rows], tokens: Sequence[tuple[Rows, Rows]]) -> Rows:
    """Returns pairs of positions, where the ops of a group are adjacent."""
    distinct, begins, counts = np.unique(groups[0], return_index=True, return_counts=True)
    starts = np.searchsorted(groups[1], distinct)
    others = np.searchsorted(groups[1], distinct, side="right") - starts
    pairs, is_equal = _pair_equal(begins, counts, starts, counts == others, tokens[0])
    found = [pairs]
    for at in np.flatnonzero(~is_equal & (others > 0)).tolist():
        one = slice(begins[at], begins[at] + counts[at])
        other = slice(starts[at], starts[at] + others[at])
        aligned = align_sequences(*((left[one], right[other]) for left, right in tokens))
        found.append(aligned + np.array([begins[at], starts[at]]))
    return np.concatenate(found)


def _pair_equal(
    begins: Rows, counts: Rows, starts: Rows, same_size: Column, tokens: tuple[Rows, Rows]
) -> tuple[Rows, Column]:
    """Returns the pairs of groups that are equal throughout, and which groups are; most are, so no loop is run."""
    group = np.repeat(np.flatnonzero(same_size), counts[same_size])
    within = np.arange(len(group)) - np.repeat(
        np.cumsum(counts[same_size]) - counts[same_size], counts[same_size]
    )
    pairs = np.stack([begins[group] + within, starts[group] + within], axis=1)
    is_equal = same_size.copy()
    is_equal[group[tokens[0][pairs[:, 0]] != tokens[1][pairs[:, 1]]]] = False
    return pairs[is_equal[group]], is_equal
