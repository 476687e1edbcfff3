"""An order of ops drawn at random, in which everything comes after what it depends on."""

import random
from collections.abc import Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter


def random_order(parents: Mapping[int, set[int]], seed: int) -> list[int]:
    """All keys, each behind its parents; each that is free to come next is drawn with equal chance.

    A parent that is no key is left out of account. Keys that depend on themselves are left out.
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
