"""Finds by what the gradients of two runs on meshes of ranks differ, and makes them comparable."""

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.meta import RunMeta
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, OP_OUTPUT
from .columns import ArrowTable, find_rows
from .merged_rows import POWERS
from .rank_values import read_rank_values
from .ranks import RanksData
from .values import PlacedValues

#: The roles of gradients that are those of a mean over a rank's part of the batch.
_SCALED = (GRAD_INPUT, GRAD_OUTPUT)


class GradientFactors(NamedTuple):
    """What makes gradients of two runs comparable."""

    factors: tuple[float, float]  # by which those of the first and of the second run are divided
    text: str | None  # a sentence if one is not 1


def align_gradients(a: RecordingData, b: RecordingData) -> GradientFactors:
    """Returns by what the gradients of activations are to be divided, if they are of a mean over a part of the batch.

    The loss of a rank is then `degree` times as steep in its part as the loss of the whole batch. Whether it is shows
    in the median ratio of the gradients.
    """
    degrees = [run.degree if isinstance(run, RanksData) else 1 for run in (a, b)]
    ratio = degrees[1] / degrees[0]
    if ratio == 1 or not np.isclose(_median_ratio(a, b), ratio, rtol=_SAME_RATIO):
        return GradientFactors((1.0, 1.0), None)
    name, factor = ("second", ratio) if ratio > 1 else ("first", 1 / ratio)
    text = (
        f"gradients of activations: {factor:.4g} x in the {name} run, whose loss is a mean over the part of the batch "
        f"on each of its ranks; they are compared divided by {factor:.4g}"
    )
    return GradientFactors((1.0, factor) if ratio > 1 else (factor, 1.0), text)


#: The relative tolerance within which the median ratio of the gradients' norms has to be that of the degrees of data
#: parallelism: the compared runs may differ a little.
_SAME_RATIO = 1e-2


def _median_ratio(a: RecordingData, b: RecordingData) -> float:
    """Returns the median ratio of the norms of the gradients of activations in two runs; NaN if there are none."""
    one, other = read_rank_values([(0, a), (1, b)])
    at = find_rows(other.key, one.key)
    rows = np.flatnonzero(
        one.placed.is_of(*_SCALED) & (one.placed.numel > 1) & (at >= 0)
    )  # that of a loss is 1
    if not len(rows):
        return math.nan
    with np.errstate(all="ignore"):
        ratios = other.placed.read_stats().l2[at[rows]] / one.placed.read_stats().l2[rows]
    known = ratios[np.isfinite(ratios)]
    return float(np.median(known)) if len(known) else math.nan


def scale_gradients(data: RecordingData, factor: float) -> RecordingData:
    """Returns a recording with its gradients of activations divided by a factor."""
    return data if factor == 1 else _Scaled(data, factor)


class _Scaled:
    """A recording with its gradients of activations divided by a factor."""

    def __init__(self, data: RecordingData, factor: float) -> None:
        self._data, self._factor = data, factor
        self.tensor = data.tensor

    @property
    def meta(self) -> RunMeta:
        return self._data.meta

    def table(self, name: str) -> ArrowTable:
        return self._values if name == "values" else self._data.table(name)

    @cached_property
    def _values(self) -> ArrowTable:
        table = self._data.table("values")
        values = PlacedValues(data=self._data, table=table)
        in_backward = values.is_of(OP_OUTPUT) & (values.phase == PHASES.index(BACKWARD))
        is_scaled = (values.is_of(*_SCALED) | in_backward) & (values.numel > 1)
        for name, power in {"min": 1, "max": 1, "sum": 1, **POWERS}.items():
            numbers = to_numpy(table[name], null=np.nan)
            scaled = np.where(is_scaled, numbers / self._factor**power, numbers)
            column = from_numpy(np.ma.masked_array(scaled, to_numpy(table[name].is_null())), pa.float64())
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
        is_kept = from_numpy(~is_scaled)
        for name in ("hash", "sketch", "sample", "histogram", "channel_max", "blob", "user"):
            field = table.schema.field(name)
            column = pc.if_else(is_kept, table[name], pa.scalar(None, field.type))
            table = table.set_column(table.schema.get_field_index(name), field, column)
        return table
