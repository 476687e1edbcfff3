"""Pairs the steps of two recordings."""

import numpy as np

from ...recording.protocols import RecordingData
from ..step.calls import Rows, column_of


def pair_steps(
    a: RecordingData, b: RecordingData, chosen: tuple[int | None, int | None] | None
) -> tuple[Rows, set[int], set[int]]:
    """Returns the pairs of steps, and the steps of each recording that are compared at all."""
    if chosen is not None:
        pair = np.array([chosen], np.int64)
        return pair, {int(pair[0, 0])}, {int(pair[0, 1])}
    of_a, of_b = _find_steps(a), _find_steps(b)
    common = np.array(sorted(of_a & of_b), np.int64)
    return np.stack([common, common], axis=1), of_a, of_b


def _find_steps(data: RecordingData) -> set[int]:
    tables = ("steps", "calls", "ops", "values")
    return {step for name in tables for step in np.unique(column_of(data.table(name), "step")).tolist()}
