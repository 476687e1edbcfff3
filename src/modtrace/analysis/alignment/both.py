"""Numbers the rows of two recordings by what they mean, so that both have the same number for the same."""

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
from ..tables.tensors import count_elements, number_sizes, sort_sizes

Runs = tuple[RunTables, RunTables]
_Result = TypeVar("_Result")


def for_both(function: Callable[..., _Result], *pairs: Iterable[Any]) -> tuple[_Result, _Result]:
    """Returns what a function returns for the first of all pairs, and for the second of all."""
    one, other = (function(*arguments) for arguments in zip(*pairs, strict=True))
    return one, other


def swap(pair: tuple[_Result, _Result], *, is_swapped: bool) -> tuple[_Result, _Result]:
    """Returns a pair in the other order if it `is_swapped`."""
    return pair[::-1] if is_swapped else pair


def no_partners(one: Sized, other: Sized) -> Partners:
    """Returns the partners of the rows of two tables that have none yet."""
    return np.full(len(one), -1, np.int64), np.full(len(other), -1, np.int64)


def pair_rows(rows: Partners, keys: Partners, partners: Partners) -> None:
    """Makes some rows of both tables partners, the n-th of a key and the n-th of the same key.

    Args:
        rows: the rows.
        keys: of all rows.
        partners: of all rows; those of the given rows are set.
    """
    found = pair_keys(*for_both(lambda key, at: key[at], keys, rows))
    partners[0][rows[0]], partners[1][rows[1]] = for_both(take, rows[::-1], found)


def translate(column: Column, pairs: Rows) -> Rows:
    """Returns the second of the pair that has each number first; -1 if none has."""
    return take(pairs[:, 1], find_rows(pairs[:, 0], column))


def number_steps(one: Column, other: Column, steps: Rows) -> Partners:
    """Returns the steps of both recordings by their numbers in the second; -1 for steps that are in no pair."""
    return translate(one, steps), translate(other, steps[:, [1, 1]])


def number_partners(partner: Rows, back: Rows) -> Partners:
    """Returns the rows of both recordings by their numbers in the second; -1 for rows without partner."""
    return partner, np.where(back >= 0, np.arange(len(back)), -1)


def have_equal_extremes(runs: Runs, rows: Partners) -> bool:
    """Returns whether all pairs of rows of `values` have equal extremes; or nothing is known."""
    one, other = for_both(_read_extremes, runs, rows)
    return all(np.array_equal(*pair, equal_nan=True) for pair in zip(one, other, strict=True))


def number_contents(runs: Runs, rows: Partners) -> Partners:
    """Returns a number of what each of some rows of `values` holds, by its sizes, in any order, and its extremes.

    It is -1 for all other rows and for constants.
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
    """Returns numbers of shape, count of elements and dtype of what the ops of both returned first; -1 for none."""
    first = for_both(lambda run: np.where(run.ops.kept, run.flow.first_returned, -1), runs)
    sizes = for_both(lambda run, row: run.flow.tensors.read_sizes(row[row >= 0]), runs, first)
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


def _read_dtypes(run: RunTables, rows: Rows) -> Coded:
    code, names = run.flow.tensors.dtype
    return names, code[rows[rows >= 0]]
