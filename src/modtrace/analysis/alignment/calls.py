"""Pairs the calls of two recordings."""

import numpy as np

from ..tables.columns import Column, RowFinder, Rows, number_keys, pair_keys, rows_in_order, take
from .modules import PlacePairs
from .sides import Side


def pair_calls(a: Side, b: Side, places: PlacePairs, steps: Rows) -> tuple[Rows, Rows]:
    """Returns the partner of each call; -1 if there is none."""
    keys, known = number_calls(a, b, places, steps)
    partner, back = pair_keys(keys[0][known[0]], keys[1][known[1]])
    sizes = len(a.calls.step), len(b.calls.step)
    return _to_all_rows(partner, *known, sizes[0]), _to_all_rows(back, known[1], known[0], sizes[1])


def number_calls(
    a: Side, b: Side, places: PlacePairs, steps: Rows
) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows]]:
    """Returns keys that are equal for calls that mean the same, and the calls that can have a partner, as started."""
    of_a, of_b = a.calls, b.calls
    step, step_b = translate(of_a.step, steps), of_b.step
    place, place_b = take(places.partner, of_a.place), of_b.place
    keys = number_keys(
        (step, step_b),
        (place, place_b),
        (of_a.calls.phase, of_b.calls.phase),
        (of_a.outer, of_b.outer),
        (of_a.inner, of_b.inner),
        (of_a.wraps, of_b.wraps),
    )
    known = of_a.kept & (step >= 0) & ((place >= 0) | (of_a.place < 0))
    known_b = of_b.kept & np.isin(step_b, steps[:, 1]) & ((place_b < 0) | (take(places.back, place_b) >= 0))
    return keys, (rows_in_order(known, of_a.calls.start_ns), rows_in_order(known_b, of_b.calls.start_ns))


def translate(column: Column, pairs: Rows) -> Rows:
    """Returns the second of the pair that has each number first; -1 if none has."""
    return take(pairs[:, 1], RowFinder(pairs[:, 0])(column))


def _to_all_rows(partner: Rows, rows: Rows, others: Rows, size: int) -> Rows:
    """Returns partners of all rows, where `partner` has those of some rows among some others."""
    partners = np.full(size, -1, np.int64)
    partners[rows] = take(others, partner)
    return partners
