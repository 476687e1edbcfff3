"""Pairs the steps and the calls of two recordings."""

import numpy as np

from ...recording.protocols import RecordingData
from ..tables.calls import has_threads
from ..tables.chosen_step import find_step_kinds, no_step
from ..tables.columns import Column, Rows, find_rows, number_keys, pair_keys, rows_in_order, take
from ..tables.run import RunTables
from ..tables.values import find_first_values
from .modules import PlacePairs


def pair_steps(
    a: RecordingData, b: RecordingData, chosen: tuple[int | None, int | None] | None
) -> tuple[Rows, set[int], set[int]]:
    """Returns the pairs of steps, and the steps of each recording that are compared at all.

    Steps of equal numbers are a pair. Where they are not of the same kind (one of the two runs evaluated in between),
    or no number is in both, the n-th step of a kind is paired with the n-th of the same kind. Steps of inference, where
    several threads ran those of one of them, are paired by what their first calls were given or returned: their numbers
    are chance.

    Raises:
        ValueError: there is no such step.
    """
    of_a, of_b = find_step_kinds(a), find_step_kinds(b)
    if chosen is not None:
        for number, known in zip(chosen, (of_a, of_b), strict=True):
            if number not in known:
                raise no_step("last" if number is None else number, sorted(known))
        pair = np.array([chosen], np.int64)
        return pair, {int(pair[0, 0])}, {int(pair[0, 1])}
    common = sorted(of_a.keys() & of_b.keys())
    if {*of_a.values(), *of_b.values()} == {"eval"} and (has_threads(a) or has_threads(b)):
        pairs = _pair_contents((sorted(of_a), sorted(of_b)), find_first_values(a), find_first_values(b))
    elif not common or any(len({of_a[step], of_b[step]} - {None}) > 1 for step in common):
        pairs = _pair_kinds(of_a, of_b)
    else:
        pairs = [(step, step) for step in common]
    return np.array(pairs, np.int64).reshape(-1, 2), set(of_a), set(of_b)


def _pair_kinds(of_a: dict[int, str | None], of_b: dict[int, str | None]) -> list[tuple[int, int]]:
    pairs = []
    for kind in {*of_a.values()} | {*of_b.values()}:
        ones, others = ([step for step in sorted(each) if each[step] == kind] for each in (of_a, of_b))
        pairs += list(zip(ones, others, strict=False))
    return sorted(pairs)


def _pair_contents(
    steps: tuple[list[int], list[int]],
    of_a: dict[int, tuple[float, ...]],
    of_b: dict[int, tuple[float, ...]],
) -> list[tuple[int, int]]:
    """Returns the pairs of the same steps by what they hold; what nothing else holds is paired in order."""
    waiting: dict[object, list[int]] = {}
    for step in reversed(steps[1]):
        waiting.setdefault(of_b.get(step), []).append(step)
    partners = {one: known.pop() for one in steps[0] if (known := waiting.get(of_a.get(one)))}
    left = sorted({*steps[1]} - {*partners.values()})
    alone = [one for one in steps[0] if one not in partners]
    return sorted([*partners.items(), *zip(alone, left, strict=False)])


def pair_calls(a: RunTables, b: RunTables, places: PlacePairs, steps: Rows) -> tuple[Rows, Rows]:
    """Returns the partner of each call; -1 if there is none."""
    keys, known = number_calls(a, b, places, steps)
    partner, back = pair_keys(keys[0][known[0]], keys[1][known[1]])
    sizes = len(a.calls.step), len(b.calls.step)
    return _to_all_rows(partner, *known, sizes[0]), _to_all_rows(back, known[1], known[0], sizes[1])


def number_calls(
    a: RunTables, b: RunTables, places: PlacePairs, steps: Rows
) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows]]:
    """Returns keys that are equal for calls that mean the same, and the calls that can have a partner, as started."""
    of_a, of_b = a.calls, b.calls
    step, step_b = translate(of_a.step, steps), of_b.step
    place, place_b = take(places.partner, of_a.place), of_b.place
    keys = number_keys(
        (step, step_b),
        (place, place_b),
        (of_a.phase, of_b.phase),
        (of_a.outer, of_b.outer),
        (of_a.inner, of_b.inner),
        (of_a.wraps, of_b.wraps),
    )
    known = of_a.kept & (step >= 0) & ((place >= 0) | (of_a.place < 0))
    known_b = of_b.kept & np.isin(step_b, steps[:, 1]) & ((place_b < 0) | (take(places.back, place_b) >= 0))
    return keys, (rows_in_order(known, of_a.start_ns), rows_in_order(known_b, of_b.start_ns))


def translate(column: Column, pairs: Rows) -> Rows:
    """Returns the second of the pair that has each number first; -1 if none has."""
    return take(pairs[:, 1], find_rows(pairs[:, 0], column))


def _to_all_rows(partner: Rows, rows: Rows, others: Rows, size: int) -> Rows:
    """Returns partners of all rows, where `partner` has those of some rows among some others."""
    partners = np.full(size, -1, np.int64)
    partners[rows] = take(others, partner)
    return partners
