"""An order of ops drawn at random, in which everything comes after what it depends on."""

import random
from collections import defaultdict
from collections.abc import Mapping


def random_order(parents: Mapping[int, set[int]], seed: int) -> list[int]:
    """All keys, each behind its parents; each that is free to come next is drawn with equal chance.

    A parent that is no key is left out of account. Keys that depend on themselves are left out.
    """
    drawn = random.Random(seed)
    missing = {each: len(above & parents.keys()) for each, above in parents.items()}
    children: dict[int, list[int]] = defaultdict(list)
    for each, above in parents.items():
        for parent in above & parents.keys():
            children[parent].append(each)
    free = [each for each, count in missing.items() if count == 0]
    order: list[int] = []
    while free:
        at = drawn.randrange(len(free))
        free[at], free[-1] = free[-1], free[at]
        order.append(free.pop())
        for child in children[order[-1]]:
            missing[child] -= 1
            if missing[child] == 0:
                free.append(child)
    return order
