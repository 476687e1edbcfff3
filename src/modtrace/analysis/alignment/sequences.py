"""Aligns two sequences as `diff` does, in nearly linear time."""

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from ..tables.columns import Rows, count_before

#: The largest product of two lengths for which the longest common subsequence is computed exactly.
_WINDOW = 256
_MOST_CELLS = _WINDOW**2

_NONE = np.empty((0, 2), np.int64)
_Gap = tuple[int, int, int, int]  # start and stop in one sequence, start and stop in the other


def align_sequences(*tokens: tuple[Rows, Rows]) -> Rows:
    """Returns pairs (n, 2) of positions of equal elements, ascending in both columns.

    Args:
        tokens: both sequences as numbers; elements with equal numbers match. Elements that stay unmatched are aligned
            by the next pair of sequences, whose numbers should be less strict.
    """
    pairs = _NONE
    for one, other in tokens:
        gaps = [_align_common(one, other, gap) for gap in _find_gaps(pairs, len(one), len(other))]
        pairs = _sort(np.concatenate([pairs, *gaps]))
    return pairs


def _find_gaps(pairs: Rows, length: int, other: int) -> Iterator[_Gap]:
    """Yields the ranges between neighbouring pairs, and at both ends, in which both sequences have elements."""
    edges = np.concatenate([[(-1, -1)], pairs, [(length, other)]])
    widths = np.diff(edges, axis=0) - 1
    for at in np.flatnonzero((widths > 0).all(axis=1)).tolist():
        yield (
            int(edges[at, 0]) + 1,
            int(edges[at + 1, 0]),
            int(edges[at, 1]) + 1,
            int(edges[at + 1, 1]),
        )


def _align_common(one: Rows, other: Rows, gap: _Gap) -> Rows:
    """Returns the matching pairs in a gap, ignoring elements that occur in only one of the two sequences."""
    begin, end, start, stop = gap
    left, right = one[begin:end], other[start:stop]
    if len(left) == len(right) and (left == right).all():
        return np.stack([np.arange(begin, end), np.arange(start, stop)], axis=1)
    kept, others = np.flatnonzero(np.isin(left, right)), np.flatnonzero(np.isin(right, left))
    if not len(kept):
        return _NONE
    pairs = _align(left[kept], right[others])
    return np.stack([kept[pairs[:, 0]] + begin, others[pairs[:, 1]] + start], axis=1)


def _align(one: Rows, other: Rows) -> Rows:
    found, waiting = [_NONE], [(0, len(one), 0, len(other))]
    while waiting:
        gap = waiting.pop()
        ends, (begin, end, start, stop) = _match_ends(one, other, gap)
        found.append(ends)
        if begin == end or start == stop:
            continue
        left, right = one[begin:end], other[start:stop]
        offset = np.array([begin, start])
        if len(left) * len(right) <= _MOST_CELLS:
            found.append(_longest_common(left, right) + offset)
            continue
        anchors = _find_anchors(left, right)
        if anchors is None:  # one pair must be found, or the gap would not shrink
            found.append(_align_windows(left, right) + offset)
        else:
            found.append(anchors + offset)
            waiting.extend(
                (low + begin, high + begin, first + start, last + start)
                for low, high, first, last in _find_gaps(anchors, len(left), len(right))
            )
    return np.concatenate(found)


def _match_ends(one: Rows, other: Rows, gap: _Gap) -> tuple[Rows, _Gap]:
    """Returns the pairs of the common beginning and of the common end, and the gap between them."""
    begin, end, start, stop = gap
    head = _count_common(one[begin:end], other[start:stop])
    begin, start = begin + head, start + head
    tail = _count_common(one[begin:end][::-1], other[start:stop][::-1])
    end, stop = end - tail, stop - tail
    heads = np.arange(head)[:, None] + (begin - head, start - head)
    return np.concatenate([heads, np.arange(tail)[:, None] + (end, stop)]), (begin, end, start, stop)


def _count_common(one: Rows, other: Rows) -> int:
    """Returns how many elements are equal at the beginning; the time does not grow with the elements behind them."""
    least, at, size = min(len(one), len(other)), 0, 16
    while at < least:
        size = min(size * 2, least - at)
        differ = np.flatnonzero(one[at : at + size] != other[at : at + size])
        if len(differ):
            return at + int(differ[0])
        at += size
    return least


def _longest_common(one: Rows, other: Rows) -> Rows:
    """Returns the pairs of a longest common subsequence."""
    lengths = np.zeros((len(one) + 1, len(other) + 1), np.int32)
    for at, token in enumerate(one):
        longer = np.where(other == token, lengths[at, :-1] + 1, 0)
        np.maximum.accumulate(np.maximum(longer, lengths[at, 1:]), out=lengths[at + 1, 1:])
    pairs: list[tuple[int, int]] = []
    at, there = len(one), len(other)
    while lengths[at, there]:
        if lengths[at - 1, there] == lengths[at, there]:
            at -= 1
        elif lengths[at, there - 1] == lengths[at, there]:
            there -= 1
        else:
            at, there = at - 1, there - 1
            pairs.append((at, there))
    return np.array(pairs[::-1], np.int64).reshape(-1, 2)


def _find_anchors(one: Rows, other: Rows) -> Rows | None:
    """Returns pairs of rare elements in ascending order, as patience diff does: unique elements, if there are any.

    If there are none, the rarest elements that both have equally often are taken, else all elements, the n-th with the
    n-th. None is returned if the order of most pairs differs, so that they are unreliable.
    """
    tokens, numbers = np.unique(np.concatenate([one, other]), return_inverse=True)
    numbers = numbers.reshape(-1)
    left, right = numbers[: len(one)], numbers[len(one) :]
    counts, others = (np.bincount(tokens_of_run, minlength=len(tokens)) for tokens_of_run in (left, right))
    equal = np.where((counts == others) & (counts > 0), counts, 0)
    least = equal[equal > 0].min() if equal.any() else 0
    pairs = _pair_occurrences(left, right, equal == least)
    ascending = _ascend(pairs)
    return ascending if len(pairs) and (least == 1 or 2 * len(ascending) >= len(pairs)) else None


def _align_windows(one: Rows, other: Rows) -> Rows:
    """Returns the pairs of a common subsequence, which is computed in one window after the other."""
    found, at, there = [_NONE], 0, 0
    while at < len(one) and there < len(other):
        left, right = one[at : at + _WINDOW], other[there : there + _WINDOW]
        is_last = at + _WINDOW >= len(one) and there + _WINDOW >= len(other)
        pairs = _longest_common(left, right)
        if not is_last:  # elements near the end of a window may have a better match behind it
            pairs = pairs[(pairs < 3 * _WINDOW // 4).all(axis=1)]
        found.append(pairs + np.array([at, there]))
        step = pairs[-1] + 1 if len(pairs) else np.array([_WINDOW // 2, _WINDOW // 2])
        at, there = (len(one), len(other)) if is_last else (at + int(step[0]), there + int(step[1]))
    return np.concatenate(found)


def _pair_occurrences(one: Rows, other: Rows, chosen: Rows) -> Rows:
    """Returns pairs of the n-th occurrences of each chosen number in both sequences."""
    rows, others = np.flatnonzero(chosen[one]), np.flatnonzero(chosen[other])
    width = len(chosen)
    keys, back = (count_before(numbers) * width + numbers for numbers in (one[rows], other[others]))
    _, at, there = np.intersect1d(keys, back, assume_unique=True, return_indices=True)
    return _sort(np.stack([rows[at], others[there]], axis=1))


def _ascend(pairs: Rows) -> Rows:
    """Returns the largest selection of pairs in which both columns ascend."""
    ends: list[int] = []  # the smallest last position of a selection, by its length
    last: list[int] = []
    before = np.full(len(pairs), -1, np.int64)
    for at, there in enumerate(pairs[:, 1].tolist()):
        length = bisect_left(ends, there)
        before[at] = last[length - 1] if length else -1
        ends[length : length + 1] = [there]
        last[length : length + 1] = [at]
    chosen: list[int] = []
    at = last[-1] if last else -1
    while at >= 0:
        chosen.append(at)
        at = int(before[at])
    return pairs[chosen[::-1]]


def _sort(pairs: Rows) -> Rows:
    return pairs[np.argsort(pairs[:, 0], kind="stable")]
