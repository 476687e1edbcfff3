"""Joins two tables by their columns: equal keys are paired in their order."""

from collections.abc import Sequence

import numpy as np

from ..step.calls import Column, Rows, count_before, take

Partners = tuple[Rows, Rows]  # of each row of `a`, of each row of `b`; -1 for none
Coded = tuple[Sequence[str | None], Column]  # texts, and a column of their codes


def number_keys(*columns: tuple[Column, Column]) -> tuple[Rows, Rows]:
    """Returns a number for each row of two tables. Rows with equal values in all columns have equal numbers.

    Args:
        columns: pairs of the same column of both tables, of integers of at least -1.
    """
    split = len(columns[0][0])
    keys = np.zeros(split + len(columns[0][1]), np.int64)
    room = 1
    for one, other in columns:
        column = np.concatenate([one, other]).astype(np.int64) + 1
        width = int(column.max(initial=0)) + 1
        if room * width >= 2**62:
            keys, room = _compact(keys)
            if room * width >= 2**62:
                column, width = _compact(column)
        keys, room = keys * width + column, room * width
    return keys[:split], keys[split:]


def _compact(keys: Column) -> tuple[Rows, int]:
    distinct, compact = np.unique(keys, return_inverse=True)
    return compact.reshape(-1).astype(np.int64), len(distinct)


def pair_keys(one: Rows, other: Rows) -> tuple[Rows, Rows]:
    """Returns the partner of each row: the row of the other table with the same key; -1 if there is none.

    The n-th row of a key is paired with the n-th of the same key.
    """
    keys, others = number_keys((one, other), (count_before(one), count_before(other)))
    partner, back = np.full(len(keys), -1, np.int64), np.full(len(others), -1, np.int64)
    _, at, there = np.intersect1d(keys, others, assume_unique=True, return_indices=True)
    partner[at], back[there] = there, at
    return partner, back


def to_pairs(partner: Rows, order: Rows) -> Rows:
    """Returns the pairs of rows in the order of the first table."""
    rows = np.lexsort((np.arange(len(partner)), order))
    rows = rows[partner[rows] >= 0]
    return np.stack([rows, partner[rows]], axis=1)


def rows_in_order(kept: Column, order: Rows) -> Rows:
    """Returns the rows that are kept, in an order."""
    rows = np.flatnonzero(kept)
    return rows[np.argsort(order[rows], kind="stable")]


def number_texts(one: Sequence[str | None], other: Sequence[str | None]) -> tuple[Rows, Rows]:
    """Returns a number for each text of two lists. Equal texts have equal numbers; None is -1."""
    known: dict[str, int] = {}
    numbers = [
        np.array([-1 if text is None else known.setdefault(text, len(known)) for text in texts], np.int64)
        for texts in (one, other)
    ]
    return numbers[0], numbers[1]


def number_codes(one: Coded, other: Coded) -> Partners:
    """Returns a number for each row of two coded columns. Rows with equal texts have equal numbers; -1 stays."""
    numbers = number_texts(one[0], other[0])
    return take(numbers[0], one[1]), take(numbers[1], other[1])
