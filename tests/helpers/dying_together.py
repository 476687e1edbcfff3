"""Runs forks in which an object dies while a garbage collection frees weak references to it; prints how many crashed.

    python dying_together.py 0 150 1

CPython 3.11 ends with SIGSEGV if two of those weak references have callbacks (`PyObject_ClearWeakRefs`).
"""

import gc
import itertools
import os
import sys
import weakref
from collections.abc import Iterator

import torch

import modtrace

#: How many tuples are made before, which empties the free list of tuples.
FILLS = (0, 10, 100, 500, 1000, 1999, 2000, 2001, 2500, 5000)

#: When a collection begins.
THRESHOLDS = ((1, 1, 1), (2, 1, 1), (10, 2, 1), (100, 10, 10), (700, 10, 10))


def recording(model: torch.nn.Module, values: object = None) -> Iterator[None]:
    """A recording that is garbage when the generator is."""
    with modtrace.record(model, ops=True, values=values):  # type: ignore[arg-type]
        yield


def storage() -> tuple[torch.Tensor, object]:
    """A storage that two recordings know, one of which is held by what is returned beside it."""
    inner = recording(torch.nn.Linear(2, 2))
    next(inner)
    return torch.ones(1, 2).mul(2), inner


def module() -> tuple[torch.nn.Module, object]:
    """A module that a recording knows, and a weak reference of its user, with a callback that allocates nothing."""
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2))
    return model, weakref.ref(model, id)


KINDS = (storage, module, storage)


def die(number: int) -> None:
    """One variation."""
    variations = list(itertools.product(KINDS, FILLS, THRESHOLDS))
    make, fill, thresholds = variations[number % len(variations)]
    gc.collect()
    gc.disable()
    with modtrace.record(ops=True, values=None):
        dying, known = make()
        cycle: list[object] = [known]
        cycle.append(cycle)
        del cycle, known
        hold = [(at,) * size for size in (4, 6, 8) for at in range(fill)]  # two for each weak reference
        gc.set_threshold(*thresholds)
        gc.enable()
        del dying
        del hold


def main(first: int, last: int, every: int) -> None:
    ended = []
    with modtrace.record(ops=True):  # imports what is needed
        module()
    gc.collect()
    gc.freeze()  # else each collection looks at all of torch
    for number in range(first, last, every):
        child = os.fork()
        if child == 0:
            die(number)
            sys.stdout.flush()
            os._exit(0)
        ended.append(os.waitpid(child, 0)[1])
    print(f"{len(ended)} runs, {sum(each != 0 for each in ended)} crashed")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
