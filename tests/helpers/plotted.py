"""What is drawn in tests of plots, typed by hand, and what can be read of a picture."""

from typing import Any

import numpy as np

from modtrace.analysis.values.exponents import LOWEST, Exponents
from modtrace.analysis.values.history import History

NAN = float("nan")


def history(values: list[list[float]], steps: list[int] | None = None, **more: Any) -> History:
    """A history whose NaN stand for NaN in the tensors, unless `measured` says that nothing was measured there."""
    array = np.array(values, np.float64).reshape(len(values), -1)
    measured = more.pop("measured", np.ones(array.shape, bool))
    fields = {
        "steps": np.array(range(len(values)) if steps is None else steps, np.int64),
        "sites": tuple(f"blocks.{at}" for at in range(array.shape[1])),
        "values": array,
        "stat": "rms",
        "role": "grad_output",
        "measured": np.array(measured, bool),
        "nonfinite": ~np.isfinite(array) & measured,
        "kinds": ("train",) * len(values),
        "others_before": np.zeros(len(values), np.int64),
    }
    return History(**fields | more)


def exponents(shares: list[dict[int, float]], **more: Any) -> Exponents:
    """Rows with these shares, by power of two."""
    table = np.zeros((len(shares), 256))
    for row, each in enumerate(shares):
        for power, share in each.items():
            table[row, power - LOWEST + 1] = share
    nothing = np.zeros(len(shares))
    fields = {
        "steps": tuple(range(len(shares))),
        "sites": ("fc",) * len(shares),
        "shares": table,
        "zero": nothing,
        "nonfinite": nothing,
        "role": "output",
    }
    return Exponents(**fields | more)


def words(labels: Any) -> list[str]:
    """The texts of labels."""
    return [each.get_text() for each in labels]
