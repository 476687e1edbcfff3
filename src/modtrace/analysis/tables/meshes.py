"""Makes two runs comparable of which one or both ran on several ranks: the shapes and the gradients of activations."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, OP_OUTPUT
from .columns import (
    ArrowTable,
    Bools,
    Column,
    Groups,
    Rows,
    column_of,
    find_rows,
    follow,
    number_keys,
    phase_codes,
    take,
)
from .merged_rows import POWERS
from .op_flow import OpFlow, read_op_flow
from .rank_values import read_rank_values
from .ranks import BATCHED, RanksData
from .tensors import read_sizes, widen
from .values import PlacedValues
from .with_tables import WithTables

#: The roles of gradients that are those of a mean over a rank's part of the batch.
_SCALED = (GRAD_INPUT, GRAD_OUTPUT)

#: The relative tolerance within which the median ratio of the gradients' norms has to be that of the number of parts:
#: the compared runs may differ a little.
_SAME_RATIO = 1e-2


class ComparableRuns(NamedTuple):
    """Two runs, and further ones of the first configuration, as they are compared."""

    a: RecordingData
    b: RecordingData
    noise: list[RecordingData]
    text: str | None  # a sentence on what gradients were divided by; None for nothing
    other_mesh: (
        bool  # whether other numbers of ranks have run, or have divided the batch or the parameters otherwise
    )


class SameRank(NamedTuple):
    """One rank of several runs on one mesh."""

    rank: int
    runs: list[RecordingData]


def pair_ranks(runs: Sequence[RecordingData]) -> list[SameRank]:
    """Returns the ranks that all runs have, if they have one mesh, so that each rank has one part of the batch.

    The list is empty for other runs. Those of a pipeline, whose ranks have other modules, are read as one anyway.
    """
    several = [run for run in runs if isinstance(run, RanksData) and not run.has_stages]
    if len(several) < len(runs) or any(_have_other_meshes(several[0], other) for other in several[1:]):
        return []
    of_ranks = [dict(run.ranks) for run in several]
    return [
        SameRank(rank, [of_run[rank] for of_run in of_ranks])
        for rank in of_ranks[0]
        if all(rank in of_run for of_run in of_ranks)
    ]


def make_comparable(a: RecordingData, b: RecordingData, noise: Sequence[RecordingData]) -> ComparableRuns:
    """Returns runs, in whose merged ranks activations have one shape in both, and gradients one scale."""
    factors, text = _find_factors(a, b)
    noise = [_scale_gradients(_align_shapes(a, run)[1], factors[0]) for run in noise]
    one, other = map(_scale_gradients, _align_shapes(a, b), factors)
    return ComparableRuns(one, other, noise, text, _have_other_meshes(a, b))


def _have_other_meshes(a: RecordingData, b: RecordingData) -> bool:
    """Returns whether two runs are laid out otherwise, by their parameters, else by their process groups.

    Only where neither tells, or the lowest ranks have other sizes of parameters, it is measured: how many ranks have
    other outputs, which a lost sampler changes, too.
    """
    if a.meta.world_size != b.meta.world_size or not isinstance(a, RanksData) or not isinstance(b, RanksData):
        return a.meta.world_size != b.meta.world_size or _degree_of(a) != _degree_of(b)
    common = a.parameters.keys() & b.parameters.keys()  # one run may have more than the other
    layouts, layouts_b = ([layout for layout, _ in run.parameters.values()] for run in (a, b))
    if any(a.parameters[name][0] != b.parameters[name][0] for name in common):
        return True
    if not common and layouts and layouts_b and {*layouts} != {*layouts_b}:
        return True
    has_groups = bool(a.groups and b.groups)
    if has_groups and a.groups != b.groups:
        return True
    if any(mesh is not None for mesh, _ in (*layouts, *layouts_b)) or a.degree == b.degree:
        return False
    # Ranks that cut plain parameters by hand may use the groups of those that have copies.
    return not has_groups or any(a.parameters[name][1] != b.parameters[name][1] for name in common)


def _degree_of(run: RecordingData) -> int:
    """Returns into how many parts the batch is divided."""
    return run.degree if isinstance(run, RanksData) else 1


# Gradients.


def _find_factors(a: RecordingData, b: RecordingData) -> tuple[tuple[float, float], str | None]:
    """Returns by what the gradients of activations are to be divided, if they are of a mean over a part of the batch.

    The loss of a part is then as many times as steep there as the loss of the whole batch as there are parts: ranks of
    data parallelism, micro-batches of a pipeline, or both. Whether it is shows in the median ratio of the gradients.

    Returns:
        The factors of both runs, and a sentence if one is not 1.
    """
    if not isinstance(a, RanksData) and not isinstance(b, RanksData):
        return (1.0, 1.0), None
    of_degrees = _degree_of(b) / _degree_of(a)
    found, calls = _median_ratios(a, b)
    of_ranks, of_calls = "the part of the batch on each of its ranks", "each of its micro-batches"
    parts = {
        calls * of_degrees: f"{of_calls} on each of its ranks",
        calls: of_calls,
        of_degrees: of_ranks,
    }  # of equal ratios the last
    for ratio, part in parts.items():
        if ratio == 1 or not np.isclose(found, ratio, rtol=_SAME_RATIO):
            continue
        name, factor = ("second", ratio) if ratio > 1 else ("first", 1 / ratio)
        text = (
            f"gradients of activations: {factor:.4g} x in the {name} run, whose loss is a mean over {part}; they are "
            f"compared divided by {factor:.4g}"
        )
        return ((1.0, factor) if ratio > 1 else (factor, 1.0)), text
    return (1.0, 1.0), None


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


def _scale_gradients(data: RecordingData, factor: float) -> RecordingData:
    """Returns a recording with its gradients of activations divided by a factor."""
    return data if factor == 1 else WithTables(data, values=lambda: _scale(data, factor))


def find_ops_without_gradient(data: RecordingData) -> Column:
    """Returns the ids of ops of backward whose outputs do not depend on the gradient that their autograd node is given.

    Such an op reads nothing, or what was there after forward, or what other such ops of its node returned. It computes
    a factor, as `x ** 1` for a square. What was there is what the node's op read or returned; for a custom
    `autograd.Function`, which is no op, what the ops of its module's forward read or returned. Of a function outside of
    modules that is not known: the gradient that the program passes would look alike.
    """
    flow, ops = read_op_flow(data), data.table("ops")
    sequence, thread = (column_of(ops, name) for name in ("sequence_nr", "sequence_thread"))
    phase = phase_codes(ops["phase"])
    in_node = (phase == PHASES.index(BACKWARD)) & (sequence >= 0)
    node, _ = number_keys((sequence, sequence[:0]), (thread, thread[:0]))
    of_forward, of_module = _number_makers(data, ops)
    base = _find_bases(flow, column_of(ops, "is_view") > 0)
    # The reads of ops in nodes: from an op of the same node, or of what was there before.
    rows = np.flatnonzero(in_node[flow.reader])
    reader, read = flow.reader[rows], flow.read[rows]
    maker = flow.tensors.producer[read]
    from_node = (maker >= 0) & in_node[maker] & (node[maker] == node[reader])
    was_there = _are_there(flow, base, np.arange(len(ops)), of_forward[reader], read)
    is_own = (phase >= 0) & (phase != PHASES.index(BACKWARD))
    was_there |= _are_there(
        flow, base, np.where(is_own, of_module, -1), np.where(of_forward < 0, of_module, -1)[reader], read
    )
    has_gradient = ~in_node
    waiting = np.unique(reader[~from_node & ~was_there])
    behind = Groups(maker[from_node], reader[from_node], len(ops))
    while len(waiting):
        has_gradient[waiting] = True
        readers = np.concatenate([behind[op] for op in waiting.tolist()])
        waiting = np.unique(readers[~has_gradient[readers]])
    return np.asarray(flow.op_id[~has_gradient])


def _number_makers(data: RecordingData, ops: ArrowTable) -> tuple[Rows, Rows]:
    """Returns the forward op of each op, as a row, and a number of the forward call it belongs to; -1 for none."""
    calls, op_id = data.table("calls"), column_of(ops, "op_id")
    call_id = column_of(calls, "call_id")
    origin = np.arange(len(calls))
    for name in ("forward_call_id", "recompute_of"):  # a backward may refer to a recompute
        earlier = find_rows(call_id, column_of(calls, name))
        origin = np.where(earlier[origin] >= 0, earlier[origin], origin)
    return (
        find_rows(op_id, column_of(ops, "forward_op_id")),
        take(origin, find_rows(call_id, column_of(ops, "call_id"))),
    )


def _find_bases(flow: OpFlow, is_view: Bools) -> Rows:
    """Returns for each tensor the one that it is a view of, as of a saved output that autograd has detached."""
    base, made = np.arange(len(flow.tensors)), np.flatnonzero(flow.tensors.producer >= 0)
    viewed = flow.first_read[flow.tensors.producer[made]]
    is_of_view = is_view[flow.tensors.producer[made]] & (
        viewed < flow.first_read[flow.tensors.producer[made] + 1]
    )
    base[made[is_of_view]] = flow.read[viewed[is_of_view]]
    return follow(base)


def _are_there(flow: OpFlow, base: Rows, owner: Rows, of_reads: Rows, read: Rows) -> Bools:
    """Returns which tensors that are read were read or returned by ops with the same owner; -1 is none."""
    size, made = len(flow.tensors), np.flatnonzero(flow.tensors.producer >= 0)
    owners = np.concatenate([owner[flow.reader], owner[flow.tensors.producer[made]]])
    tensors = np.concatenate([flow.read, made])
    known = (owners * size + base[tensors])[owners >= 0]
    return np.asarray((of_reads >= 0) & np.isin(of_reads * size + base[read], known))


def _scale(data: RecordingData, factor: float) -> ArrowTable:
    table = data.table("values")
    values = PlacedValues(data=data, table=table)
    in_backward = values.is_of(OP_OUTPUT) & (values.phase == PHASES.index(BACKWARD))
    in_backward &= ~np.isin(column_of(table, "op_id"), find_ops_without_gradient(data))
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


# Shapes.


def _align_shapes(a: RecordingData, b: RecordingData) -> tuple[RecordingData, RecordingData]:
    """Returns two runs, of which activations that were merged from ranks have one shape in both.

    Ranks may have parts of the batch, of the sequence or of the features. A plain tensor does not say which, so the
    shape that the parts have together is taken from the run on the other side, if it has as many elements.
    """
    are_merged = isinstance(a, RanksData), isinstance(b, RanksData)
    made = [
        partial(_take_shapes, b, a, are_known=are_merged[1]),
        partial(_take_shapes, a, b, are_known=False),
    ]
    one, other = (
        WithTables(run, values=values) if is_merged else run
        for run, values, is_merged in zip((a, b), made, are_merged, strict=True)
    )
    return one, other


def _take_shapes(known: RecordingData, merged: RecordingData, *, are_known: bool) -> ArrowTable:
    """Returns `values` of a merged run, with the shapes of parts taken from another run.

    With `are_known`, only what was not measured takes them: the other run takes those of the rest.
    """
    most_parts = merged.most_parts if isinstance(merged, RanksData) else 1
    runs = read_rank_values([(0, known), (1, merged)])
    one, other = runs[0].placed, runs[1].placed
    at, table = find_rows(runs[0].key, runs[1].key), other.table
    given, wanted = widen(read_sizes(table["shape"]), read_sizes(one.table["shape"])[at])
    is_measured = to_numpy(table["count"].is_valid())
    is_taken = (at >= 0) & other.is_of(*BATCHED) & ~to_numpy(table["global_shape"].is_valid())
    is_taken &= (given != wanted).any(axis=1) & ((given < 0) == (wanted < 0)).all(axis=1)
    ratio = take(one.numel, at) / np.maximum(other.numel, 1)
    is_whole = ~is_measured & (ratio > 0) & (most_parts % np.maximum(ratio, 1) == 0)
    is_taken &= is_whole & (ratio > 1) if are_known else is_whole | (ratio == 1)
    if not is_taken.any():
        return table
    rows = np.where(is_taken, len(table) + at, np.arange(len(table)))
    for name in ("shape", "numel"):
        both = pa.chunked_array([*table[name].chunks, *one.table[name].chunks], table[name].type)
        table = table.set_column(
            table.schema.get_field_index(name), table.schema.field(name), both.take(from_numpy(rows))
        )
    return table
