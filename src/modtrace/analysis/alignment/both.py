"""Numbers the rows of two recordings so that rows with the same meaning have the same number."""

from collections.abc import Callable, Iterable, Sized
from typing import Any, TypeVar

import numpy as np

from ..tables.columns import (
    Coded,
    Column,
    Partners,
    Rows,
    find_rows,
    number_codes,
    number_keys,
    pair_keys,
    take,
)
from ..tables.run import RunTables
from ..tables.tensors import Sizes, count_elements, number_sizes, sort_sizes, widen

Runs = tuple[RunTables, RunTables]
_Result = TypeVar("_Result")


def for_both(function: Callable[..., _Result], *pairs: Iterable[Any]) -> tuple[_Result, _Result]:
    """Returns the results of a function for the first elements of all pairs, and for the second elements."""
    one, other = (function(*arguments) for arguments in zip(*pairs, strict=True))
    return one, other


def swap(pair: tuple[_Result, _Result], *, is_swapped: bool) -> tuple[_Result, _Result]:
    """Returns a pair, with its two elements exchanged if `is_swapped`."""
    return pair[::-1] if is_swapped else pair


def no_partners(one: Sized, other: Sized) -> Partners:
    """Returns columns of partners for two tables, in which no row has a partner yet."""
    return np.full(len(one), -1, np.int64), np.full(len(other), -1, np.int64)


def pair_rows(rows: Partners, keys: Partners, partners: Partners) -> None:
    """Makes rows of two tables partners: the n-th row with a key and the n-th row of the other table with that key.

    Args:
        rows: the rows of each table to pair.
        keys: the keys of all rows of each table.
        partners: the partners of all rows of each table; those of `rows` are overwritten.
    """
    found = pair_keys(*for_both(lambda key, at: key[at], keys, rows))
    partners[0][rows[0]], partners[1][rows[1]] = for_both(take, rows[::-1], found)


def translate(column: Column, pairs: Rows) -> Rows:
    """Returns for each number in a column the second element of the pair that begins with it; -1 if there is none."""
    return take(pairs[:, 1], find_rows(pairs[:, 0], column))


def number_steps(one: Column, other: Column, steps: Rows) -> Partners:
    """Returns the step of each row of both recordings, numbered as in the second; -1 for steps that are in no pair."""
    return translate(one, steps), translate(other, steps[:, [1, 1]])


def number_partners(partner: Rows, back: Rows) -> Partners:
    """Returns for each row of both recordings the row of the second in its pair; -1 for rows without partner."""
    return partner, np.where(back >= 0, np.arange(len(back)), -1)


def have_equal_extremes(runs: Runs, rows: Partners) -> bool:
    """Returns whether the minima and maxima of all pairs of rows of `values` are equal, where they are recorded."""
    one, other = for_both(_read_extremes, runs, rows)
    return all(np.array_equal(*pair, equal_nan=True) for pair in zip(one, other, strict=True))


def number_contents(runs: Runs, rows: Partners) -> Partners:
    """Returns for rows of `values` a number of their contents: of minimum, maximum and the sorted sizes.

    All other rows have -1, and so have constants, which are too common to identify a tensor.
    """
    sizes = number_sizes(*for_both(lambda run, at: sort_sizes(run.values.sizes[at]), runs, rows))
    extremes = for_both(_read_extremes, runs, rows)
    codes = [
        np.split(np.unique(np.concatenate(both), return_inverse=True)[1].reshape(-1), [len(rows[0])])
        for both in zip(*extremes, strict=True)
    ]
    numbers = number_keys(sizes, *((one, other) for one, other in codes))
    contents = no_partners(runs[0].values.step, runs[1].values.step)
    for content, at, number, (low, high) in zip(contents, rows, numbers, extremes, strict=True):
        content[at] = np.where(low < high, number, -1)
    return contents


def _read_extremes(run: RunTables, rows: Rows) -> tuple[Column, Column]:
    least, largest = run.values.read_extremes()
    return least[rows], largest[rows]


def number_shapes(runs: Runs) -> tuple[Partners, Partners, Partners]:
    """Returns numbers of the shape, element count and dtype of the first output of each op in both; -1 for none."""
    first = for_both(lambda run: np.where(run.ops.kept, run.flow.first_returned, -1), runs)
    sizes = for_both(_read_sizes, runs, first)
    dtypes = for_both(_read_dtypes, runs, first)

    def to_ops(row: Rows, number: Rows) -> Rows:
        of_op: Rows = row.copy()
        of_op[row >= 0] = number
        return of_op

    shapes, counts, of_dtypes = (
        for_both(to_ops, first, numbers)
        for numbers in (
            number_sizes(*sizes),
            number_keys(for_both(lambda sizes: count_elements(sizes).reshape(-1), sizes)),
            number_codes(*dtypes),
        )
    )
    return shapes, counts, of_dtypes


def _read_sizes(run: RunTables, rows: Rows) -> Sizes:
    """Returns the sizes of tensors: as they were measured, which of several ranks is together."""
    rows = rows[rows >= 0]
    measured = run.value_of_tensor[rows]
    sizes, known = widen(run.flow.tensors.read_sizes(rows), run.values.sizes[measured[measured >= 0]])
    sizes[measured >= 0] = known
    return sizes


def _read_dtypes(run: RunTables, rows: Rows) -> Coded:
    code, names = run.flow.tensors.dtype
    return names, code[rows[rows >= 0]]
