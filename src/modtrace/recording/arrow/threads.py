"""Calls functions of Arrow on several processors: while they run, they hold no lock of Python's."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: For fewer rows no threads are started, which takes half a millisecond. 10,000,000 rows take 0.7 s in one.
_FEWEST_ROWS = 100_000


def map_in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item], rows: int) -> list[_Result]:
    """Returns what a function returns for each item. Where no thread can be started, it is called in this one.

    Args:
        function: spends its time in Arrow. It must not raise.
        items: what it is called with.
        rows: the number of rows in all of them.
    """
    if rows < _FEWEST_ROWS:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    try:
        with ThreadPoolExecutor(pa.cpu_count()) as pool:
            return list(pool.map(function, items))
    except RuntimeError:  # the interpreter ends, or the process may have no more threads
        return [function(item) for item in items]
