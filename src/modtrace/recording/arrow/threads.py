"""Calls functions of Arrow on several processors: while they run, they hold no lock of Python's."""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_THREADS = 8

#: For fewer rows no threads are started, which takes half a millisecond.
_FEWEST_ROWS = 100_000


def map_in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item], rows: int) -> list[_Result]:
    """Returns what a function returns for each item.

    Args:
        function: spends its time in Arrow, and raises nothing.
        items: what it is called with.
        rows: the number of rows in all of them.
    """
    if rows < _FEWEST_ROWS:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))
