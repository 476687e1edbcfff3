"""Pairs the steps of two recordings."""

import numpy as np

from ...recording.protocols import RecordingData
from ..step.calls import Rows, column_of
from ..step.chosen_step import no_step


def pair_steps(
    a: RecordingData, b: RecordingData, chosen: tuple[int | None, int | None] | None
) -> tuple[Rows, set[int], set[int]]:
    """Returns the pairs of steps, and the steps of each recording that are compared at all.

    Steps of equal numbers are a pair. Where they are not of the same kind (one of the two runs evaluated in between),
    or no number is in both, the n-th step of a kind is paired with the n-th of the same kind.

    Raises:
        ValueError: there is no such step.
    """
    of_a, of_b = _find_steps(a), _find_steps(b)
    if chosen is not None:
        for number, known in zip(chosen, (of_a, of_b), strict=True):
            if number not in known:
                raise no_step("last" if number is None else number, sorted(known))
        pair = np.array([chosen], np.int64)
        return pair, {int(pair[0, 0])}, {int(pair[0, 1])}
    common = sorted(of_a.keys() & of_b.keys())
    pairs = [(step, step) for step in common]
    if not common or any(len({of_a[step], of_b[step]} - {None}) > 1 for step in common):
        pairs = _pair_kinds(of_a, of_b)
    return np.array(pairs, np.int64).reshape(-1, 2), set(of_a), set(of_b)


def _pair_kinds(of_a: dict[int, str | None], of_b: dict[int, str | None]) -> list[tuple[int, int]]:
    pairs = []
    for kind in {*of_a.values()} | {*of_b.values()}:
        ones, others = ([step for step in sorted(each) if each[step] == kind] for each in (of_a, of_b))
        pairs += list(zip(ones, others, strict=False))
    return sorted(pairs)


def _find_steps(data: RecordingData) -> dict[int, str | None]:
    """Returns the kind of each step; None of one whose end was not recorded."""
    steps = data.table("steps")
    kinds = dict(zip(steps["step"].to_pylist(), steps["kind"].to_pylist(), strict=True))
    tables = ("steps", "calls", "ops", "values")
    known = {step for name in tables for step in np.unique(column_of(data.table(name), "step")).tolist()}
    return {step: kinds.get(step) for step in known}
