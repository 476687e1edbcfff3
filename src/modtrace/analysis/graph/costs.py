"""Computes the costs and contents of a graph's nodes and layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...recording import role
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ..tables.calls import Calls, iterate_levels
from ..tables.columns import Bools, Column, Rows, columns_at, find_rows, repeat, take
from ..tables.values import read_measured_values
from .columns import NONE, Numbers
from .layers import LayerTree

_SUMMED = ("flops", "bytes_read", "bytes_written", "saved_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredValues:
    """The raw statistics of the tensors measured in a step, with the op or call that each belongs to."""

    op_id: Column  # -1 for none
    call_id: Column
    site: Column
    is_gradient: Column  # whether it is a gradient of a call's output; `call_id` is then that of the forward
    is_op_output: Column
    nonfinite: Column
    infinite: Column
    count: Column
    sumsq: Column

    def take(self, rows: Column) -> "MeasuredValues":
        """Returns a selection of the rows."""
        return MeasuredValues(**columns_at(self, rows))

    def sum_at(self, rows: Rows, size: int) -> Mapping[str, Column]:
        """Returns the columns of `Numbers` on measured elements, summed for each index below `size`; -1 for no rows."""
        is_empty = np.ones(size + 1, bool)
        is_empty[rows] = False
        columns = {
            "nonfinite": self.nonfinite,
            "infinite": self.infinite,
            "measured": self.count,
            "sumsq": self.sumsq,
        }
        sums = {name: sum_at(rows, column, size) for name, column in columns.items()}
        for column in sums.values():
            column[is_empty[:size]] = -1  # in place: of a million calls each column takes 8 MB
        return sums

    def first_at_sites(self) -> "MeasuredValues":
        """Returns one row for each site: the first row that belongs to an op, or else the first row."""
        order = np.argsort(self.op_id < 0, kind="stable")
        _, first = np.unique(self.site[order], return_index=True)
        return self.take(order[first])


def read_measured(data: RecordingData, step: int | None) -> MeasuredValues:
    """Returns the statistics of all tensors measured in a step."""
    values = read_measured_values(data, step)
    stats = values.read_stats()
    is_call = values.is_of(role.OUTPUT, role.GRAD_OUTPUT)
    return MeasuredValues(
        op_id=np.where(is_call, NONE, values.op_id),
        call_id=np.where(is_call, values.call_id, NONE),
        site=values.site_id,
        is_gradient=values.is_of(role.GRAD_OUTPUT),
        is_op_output=values.is_of(role.OP_OUTPUT),
        nonfinite=stats.nan_count + stats.inf_count,
        infinite=stats.inf_count,
        count=stats.count,
        sumsq=stats.sumsq,
    )


def empty_numbers(size: int) -> Numbers:
    """Returns `size` rows without costs and measurements."""
    free, unknown = repeat(0, size), repeat(NONE, size)
    return Numbers(
        duration_ns=free,
        flops=free,
        bytes_read=free,
        bytes_written=free,
        saved_bytes=free,
        nonfinite=unknown,
        infinite=unknown,
        measured=unknown,
        sumsq=repeat(NONE, size, np.float64),
    )


def with_costs(numbers: Numbers, cost: Column) -> Numbers:
    """Returns the numbers with the same cost of every kind in each row."""
    return replace(numbers, **dict.fromkeys(_SUMMED, cost))


def numbers_of_layers(
    tree: LayerTree, calls: Calls, of_node: Rows, nodes: Numbers, measured: MeasuredValues
) -> Numbers:
    """Returns the summed costs of the nodes inside each layer. Times are those of the layers' calls, if known.

    Args:
        tree: the layers.
        calls: the calls of the step.
        of_node: the layer of each node.
        nodes: the costs of the nodes.
        measured: the statistics of the step.
    """
    size = len(tree.parent)
    costs = {name: getattr(nodes, name) for name in _SUMMED}
    distinct = {id(cost): cost for cost in costs.values()}  # costs that are not known are one column
    totals = {number: _sum_inside(cost, of_node, tree) for number, cost in distinct.items()}
    sums = {name: totals[id(cost)] for name, cost in costs.items()}
    is_region, saved = _find_regions(tree, calls, of_node, nodes.saved_bytes)
    if is_region.any():
        sums["saved_bytes"] = _saved_of_layers(tree, is_region, saved, of_node, nodes.saved_bytes)
    return Numbers(
        duration_ns=_durations(tree, calls, of_node, nodes.duration_ns),
        **sums,
        **measured.sum_at(_layers_of(measured, tree, calls), size),
    )


def forget_saved_in_regions(tree: LayerTree, calls: Calls, of_node: Rows, saved: Column) -> Column:
    """Returns what nodes save, with -1 for 0 in compiled code that saves by itself what its ops need in backward."""
    is_region, _ = _find_regions(tree, calls, of_node, saved)
    is_inside = take(with_inner(is_region, tree.last), of_node) > 0
    return np.where(is_inside & (saved == 0), NONE, saved)


def _find_regions(tree: LayerTree, calls: Calls, of_node: Rows, saved: Column) -> tuple[Bools, Column]:
    """Returns which layers are compiled calls that save more than the ops inside, and what each layer's call saves."""
    of_call = take(calls.column("saved_bytes"), tree.call)
    of_ops = _to_totals(sum_at(of_node, np.maximum(saved, 0), len(tree.parent)), tree)
    return (take(calls.column("compiled"), tree.call) == 1) & (of_call > of_ops), of_call


def _saved_of_layers(
    tree: LayerTree, is_region: Bools, of_call: Column, of_node: Rows, saved: Column
) -> Column:
    """Returns what each layer saves: a region what its call does, and of what is inside a region 0 is not known."""
    is_within = with_inner(is_region, tree.last)
    is_known = take(is_within, of_node) > 0
    total = _sum_inside(np.where(is_known, np.maximum(saved, 0), saved), of_node, tree)
    more = _to_totals(np.where(is_region, of_call - total, 0), tree)
    total = np.where(total >= 0, total + more, NONE)
    return np.where(is_within & (total == 0), NONE, total)


def with_inner(chosen: Column, last: Rows) -> Bools:
    """Returns the chosen layers and all inside of them."""
    begun = np.cumsum(chosen)
    ended = np.cumsum(np.bincount(last[chosen] + 1, minlength=len(chosen) + 1))
    return np.asarray(begun > ended[: len(chosen)])


def _sum_inside(column: Column, of_node: Rows, tree: LayerTree) -> Column:
    """Returns the sum over all nodes inside each layer; -1 if one of them is not known."""
    if not column.any():
        return repeat(0, len(tree.parent))
    totals = _to_totals(sum_at(of_node, np.maximum(column, 0), len(tree.parent)), tree)
    unknown = _to_totals(sum_at(of_node, column < 0, len(tree.parent)), tree)
    return np.where(unknown > 0, NONE, totals)


def sum_at(rows: Rows, values: Column, size: int) -> Column:
    """Returns the sum of the values at each of `size` rows, which for integers is exact, unlike in float64.

    Values at row -1 belong to none.
    """
    total = np.zeros(size + 1, np.float64 if values.dtype.kind == "f" else np.int64)
    np.add.at(total, rows, values)
    return total[:size]


def _to_totals(own: Column, tree: LayerTree) -> Column:
    """Returns, for each layer, the sum of its value and those of all layers inside it."""
    before = np.zeros(len(own) + 1, np.int64)
    np.cumsum(own, out=before[1:])
    totals = before[tree.last + 1]
    totals -= before[:-1]
    return totals


def _durations(tree: LayerTree, calls: Calls, of_node: Rows, durations: Column) -> Column:
    """Returns the time of each layer's call; without a call or its end, the time of what is inside."""
    took_ns = sum_at(of_node, durations, len(tree.parent))
    is_known = take(calls.ended, tree.call) > 0
    took_ns[is_known] = calls.duration_ns[tree.call[is_known]]
    is_added = is_known & (tree.parent >= 0) & ~is_known[tree.parent]
    np.add.at(took_ns, tree.parent[is_added], took_ns[is_added])
    unknown = np.flatnonzero(~is_known)
    around = find_rows(unknown, tree.parent[unknown])  # -1 if the layer around it is known
    for level in reversed(list(iterate_levels(around))[1:]):
        np.add.at(took_ns, unknown[around[level]], took_ns[unknown[level]])
    return took_ns


def _layers_of(measured: MeasuredValues, tree: LayerTree, calls: Calls) -> Rows:
    """Returns the layer to which each row belongs; for a gradient, that of the backward."""
    call = find_rows(calls.call_id, measured.call_id)
    is_own = take(tree.call, tree.of_call) == np.arange(len(calls))
    stands_for = np.where(is_own, tree.of_call, NONE)  # a wrapper's layer is not of the wrapped call
    backward = np.full(len(calls) + 1, NONE, np.int64)
    is_backward = (calls.phase == PHASES.index(BACKWARD)) & (calls.repeats >= 0) & (stands_for >= 0)
    rows = np.flatnonzero(is_backward)
    backward[calls.repeats[rows]] = stands_for[rows]
    return np.where(measured.is_gradient, backward[call], take(stands_for, call))
