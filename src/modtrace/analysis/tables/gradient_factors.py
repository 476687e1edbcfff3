"""Finds by what the gradients of two runs on meshes of ranks differ, and makes them comparable."""

import math
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, OP_OUTPUT
from .columns import ArrowTable, Column, column_of, find_rows
from .merged_rows import POWERS
from .op_flow import read_op_flow
from .rank_values import read_rank_values
from .ranks import RanksData
from .values import PlacedValues
from .with_tables import WithTables

#: The roles of gradients that are those of a mean over a rank's part of the batch.
_SCALED = (GRAD_INPUT, GRAD_OUTPUT)


class GradientFactors(NamedTuple):
    """What makes gradients of two runs comparable."""

    factors: tuple[float, float]  # by which those of the first and of the second run are divided
    text: str | None  # a sentence if one is not 1
    other_mesh: (
        bool  # whether other numbers of ranks have run, or have divided the batch or the parameters otherwise
    )


def align_gradients(a: RecordingData, b: RecordingData) -> GradientFactors:
    """Returns by what the gradients of activations are to be divided, if they are of a mean over a part of the batch.

    The loss of a part is then as many times as steep there as the loss of the whole batch as there are parts: ranks of
    data parallelism, micro-batches of a pipeline, or both. Whether it is shows in the median ratio of the gradients.
    """
    other_mesh = a.meta.world_size != b.meta.world_size
    if not isinstance(a, RanksData) and not isinstance(b, RanksData):
        return GradientFactors((1.0, 1.0), None, other_mesh)
    degrees = [run.degree if isinstance(run, RanksData) else 1 for run in (a, b)]
    layouts = {run.layout for run in (a, b) if isinstance(run, RanksData) and run.layout}
    other_mesh |= degrees[0] != degrees[1] or len(layouts) > 1
    found, calls = _median_ratios(a, b)
    of_ranks, of_calls = "the part of the batch on each of its ranks", "each of its micro-batches"
    parts = {
        calls * degrees[1] / degrees[0]: f"{of_calls} on each of its ranks",
        calls: of_calls,
        degrees[1] / degrees[0]: of_ranks,
    }  # of equal ratios the last
    for ratio, part in parts.items():
        if ratio == 1 or not np.isclose(found, ratio, rtol=_SAME_RATIO):
            continue
        name, factor = ("second", ratio) if ratio > 1 else ("first", 1 / ratio)
        text = (
            f"gradients of activations: {factor:.4g} x in the {name} run, whose loss is a mean over {part}; they are "
            f"compared divided by {factor:.4g}"
        )
        return GradientFactors((1.0, factor) if ratio > 1 else (factor, 1.0), text, other_mesh)
    return GradientFactors((1.0, 1.0), None, other_mesh)


#: The relative tolerance within which the median ratio of the gradients' norms has to be that of the number of parts:
#: the compared runs may differ a little.
_SAME_RATIO = 1e-2


def _median_ratios(a: RecordingData, b: RecordingData) -> tuple[float, float]:
    """Returns the median ratios of the norms of the gradients of activations in two runs, and of their numbers.

    The gradients of a module in one step count together. The ratios are NaN if there are none.
    """
    runs = read_rank_values([(0, a), (1, b)], of_calls=False)
    size = max((int(run.key.max(initial=-1)) + 1 for run in runs), default=0)
    squares, counts = [], []
    for run in runs:
        rows = np.flatnonzero(run.placed.is_of(*_SCALED) & (run.placed.numel > 1))  # that of a loss is 1
        sums = to_numpy(run.placed.table["sumsq"], null=np.nan)[rows]
        squares.append(np.bincount(run.key[rows], sums, size))
        counts.append(np.bincount(run.key[rows], minlength=size))
    with np.errstate(all="ignore"):
        ratios = np.stack([np.sqrt(squares[1] / squares[0]), counts[1] / counts[0]])
    ratios = ratios[:, np.isfinite(ratios).all(axis=0) & (ratios > 0).all(axis=0)]
    if not ratios.shape[1]:
        return math.nan, math.nan
    return float(np.median(ratios[0])), float(np.median(ratios[1]))


def scale_gradients(data: RecordingData, factor: float) -> RecordingData:
    """Returns a recording with its gradients of activations divided by a factor."""
    return data if factor == 1 else WithTables(data, values=lambda: _scale(data, factor))


def _find_ops_without_gradient(data: RecordingData) -> Column:
    """Returns the ids of ops of backward that read no gradient, but what their forward op read or returned.

    Such an op computes a factor, as `x ** 1` for a square; others of the same backward may compute it on from there.
    """
    flow, ops = read_op_flow(data), data.table("ops")
    forward = find_rows(flow.op_id, column_of(ops, "forward_op_id"))
    size, maker = len(flow.tensors), flow.tensors.producer
    made = np.flatnonzero(maker >= 0)
    known = np.concatenate([flow.reader * size + flow.read, maker[made] * size + made])
    is_free, count = np.zeros(len(flow.op_id), bool), -1
    while is_free.sum() > count:
        count = is_free.sum()
        is_free = np.zeros(len(flow.op_id), bool)
        is_free[flow.reader] = forward[flow.reader] >= 0
        is_free[flow.reader[~np.isin(forward[flow.reader] * size + flow.read, known)]] = False
        of_free = made[is_free[maker[made]]]
        known = np.append(known, forward[maker[of_free]] * size + of_free)
    return flow.op_id[is_free]


def _scale(data: RecordingData, factor: float) -> ArrowTable:
    table = data.table("values")
    values = PlacedValues(data=data, table=table)
    in_backward = values.is_of(OP_OUTPUT) & (values.phase == PHASES.index(BACKWARD))
    in_backward &= ~np.isin(column_of(table, "op_id"), _find_ops_without_gradient(data))
    is_scaled = (values.is_of(*_SCALED) | in_backward) & (values.numel > 1)
    for name, power in {"min": 1, "max": 1, "sum": 1, **POWERS}.items():
        numbers = to_numpy(table[name], null=np.nan)
        scaled = np.where(is_scaled, numbers / factor**power, numbers)
        column = from_numpy(np.ma.masked_array(scaled, to_numpy(table[name].is_null())), pa.float64())
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    is_kept = from_numpy(~is_scaled)
    for name in ("hash", "sketch", "sample", "histogram", "channel_max", "blob", "user"):
        field = table.schema.field(name)
        column = pc.if_else(is_kept, table[name], pa.scalar(None, field.type))
        table = table.set_column(table.schema.get_field_index(name), field, column)
    return table
