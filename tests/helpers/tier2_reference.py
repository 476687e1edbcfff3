"""What tier 2 says of some numbers, computed one after the other in float64, and as rows of `values`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from builders import raw_statistics
from modtrace.recording.arrow.batches import to_batch


def bin_of(number: float) -> int:
    """The bin of a finite number that is not zero: of its exponent, by `frexp`."""
    exponent = math.frexp(number)[1] - 1  # 2^exponent <= |number| < 2^(exponent + 1)
    return min(max(exponent + 127, 0), 255)


def tier2_of(numbers: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """The columns of tier 2; `numbers` in the order of the tensor."""
    array = np.asarray(numbers, np.float64).reshape(-1)
    magnitudes = np.abs(array)
    finite = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    bins = np.clip(np.frexp(finite)[1] + 126, 0, 255)  # as `bin_of`
    histogram = np.bincount(bins, minlength=256).tolist()
    with np.errstate(all="ignore"):
        squares = array * array
        return {
            "sumabs": _sum(magnitudes),
            "zero_count": int((array == 0).sum()),
            "sum4": _sum(squares * squares),
            "argmax": int(np.argmax(magnitudes)) if len(array) else None,  # the first NaN, if there is one
            "histogram": histogram,
        }


def _sum(numbers: np.ndarray) -> float:
    if not np.isfinite(numbers).all():
        return float(np.sum(numbers))
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.inf


def value_rows(rows: Sequence[Sequence[float] | None], **columns: Sequence[Any]) -> pa.Table:
    """A row of `values` for each tensor of these numbers; None: not measured."""
    measured = [{} if each is None else tier2_of(each) for each in rows]
    names = ("sumabs", "zero_count", "sum4", "argmax", "histogram")
    tier2 = {name: [each.get(name) for each in measured] for name in names}
    raw = [raw_statistics(each) for each in rows]
    usual = {name: [each[name] for each in raw] for name in raw_statistics(None)}
    return pa.Table.from_batches([to_batch("values", {**usual, **tier2, **columns})])
