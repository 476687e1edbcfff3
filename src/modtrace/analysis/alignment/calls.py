"""Pairs the steps and the calls of two recordings."""

import numpy as np

from ...recording.protocols import RecordingData
from ..tables.calls import has_threads
from ..tables.chosen_step import find_step_kinds
from ..tables.columns import Partners, Rows, number_keys, rows_in_order, take
from ..tables.run import RunCalls
from ..tables.values import find_first_values
from .both import Runs, for_both, no_partners, number_partners, number_steps, pair_rows
from .modules import PlacePairs


def pair_steps(
    a: RecordingData, b: RecordingData, chosen: tuple[int, int] | None
) -> tuple[Rows, set[int], set[int]]:
    """Returns the pairs of steps, and for each recording the set of steps that are compared.

    Steps of equal numbers are a pair. If their kinds differ (one of the runs evaluated in between), or if no number
    occurs in both, the n-th step of a kind is paired with the n-th of the same kind. If several threads ran inference,
    the order of steps is chance, and they are paired by what their first calls were given or returned.

    Raises:
        ValueError: there is no such step.
    """
    of_a, of_b = find_step_kinds(a), find_step_kinds(b)
    if chosen is not None:
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
        ones, others = ([step for step in sorted(kinds) if kinds[step] == kind] for kinds in (of_a, of_b))
        pairs += list(zip(ones, others, strict=False))
    return sorted(pairs)


def _pair_contents(
    steps: tuple[list[int], list[int]],
    of_a: dict[int, tuple[float, ...]],
    of_b: dict[int, tuple[float, ...]],
) -> list[tuple[int, int]]:
    """Returns pairs of steps with the same contents; steps whose contents are not unique are paired in order."""
    waiting: dict[object, list[int]] = {}
    for step in reversed(steps[1]):
        waiting.setdefault(of_b.get(step), []).append(step)
    partners = {one: known.pop() for one in steps[0] if (known := waiting.get(of_a.get(one)))}
    left = sorted({*steps[1]} - {*partners.values()})
    alone = [one for one in steps[0] if one not in partners]
    return sorted([*partners.items(), *zip(alone, left, strict=False)])


def pair_calls(runs: Runs, places: PlacePairs, steps: Rows) -> Partners:
    """Returns the partner of each call of both recordings; -1 if there is none."""
    one, other = runs[0].calls, runs[1].calls
    step = number_steps(one.step, other.step, steps)
    place = for_both(take, number_partners(places.partner, places.back), (one.place, other.place))
    keys = number_keys(
        step,
        place,
        (one.phase, other.phase),
        (one.outer, other.outer),
        (one.inner, other.inner),
        (one.wraps, other.wraps),
    )
    partners = no_partners(one.step, other.step)
    pair_rows(for_both(_sort_calls, (one, other), step, place), keys, partners)
    return partners


def _sort_calls(calls: RunCalls, step: Rows, place: Rows) -> Rows:
    """Returns the calls that can have a partner, sorted by their start."""
    return rows_in_order(calls.kept & (step >= 0) & ((place >= 0) | (calls.place < 0)), calls.start_ns)
