"""Draws a random order in which each op comes after the ops it depends on."""

import random
from collections.abc import Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter


def random_order(parents: Mapping[int, set[int]], seed: int) -> list[int]:
    """Returns the keys in a random order, each after its parents. Every key that may come next is equally likely.

    Parents that are not keys are ignored. Keys that depend on themselves are left out.
    """
    drawn = random.Random(seed)
    sorter = TopologicalSorter({each: above & parents.keys() for each, above in parents.items()})
    with suppress(CycleError):  # it gives all other keys nevertheless
        sorter.prepare()
    free: list[int] = []
    order: list[int] = []
    while sorter.is_active():
        free += sorter.get_ready()
        at = drawn.randrange(len(free))
        free[at], free[-1] = free[-1], free[at]
        order.append(free.pop())
        sorter.done(order[-1])
    return order
