"""Finds the place in the module tree that a row of `values` belongs to."""

import numpy as np

from .calls import NO_MODULE, Calls, Column, RowFinder, Rows, iterate_levels
from .placement import NOWHERE, Placer, place_calls


def place_values(module: Column, call_id: Column, calls: Calls, placer: Placer) -> Rows:
    """The index of each row's place; NOWHERE for a parameter that no module owns.

    A row stands where its call stands, which for a shared module is not always its own path. Without a call
    (a parameter, or a call that is not in `calls`) it stands at its module's own path.

    Args:
        module: the module of the row's site; NO_MODULE for none.
        call_id: -1 for none.
    """
    return place_by_calls(module, call_id, calls, place_calls(calls, _levels(calls), placer), placer)


def place_by_calls(module: Column, call_id: Column, calls: Calls, placed: Rows, placer: Placer) -> Rows:
    """The same, where the places of the calls are known."""
    row = RowFinder(calls.call_id)(call_id)
    found = np.where(row >= 0, placed[row], NOWHERE) if len(placed) else np.full(len(row), NOWHERE, np.int64)
    alone = np.flatnonzero((found == NOWHERE) & (module != NO_MODULE))
    distinct, which = np.unique(module[alone], return_inverse=True)
    places = [placer.place(int(each), NOWHERE) for each in distinct]
    found[alone] = np.array(places, np.int64)[which]
    return found


def _levels(calls: Calls) -> list[Rows]:
    return list(iterate_levels(calls.parent))
