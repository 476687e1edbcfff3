"""Makes nodes for calls without ops, and for a step without ops the edges from each call to the next."""

from dataclasses import replace

import numpy as np

from ...recording.schema import schema
from ..tables.columns import Column, Rows, repeat
from ..tables.device_times import on_device
from ..tables.ops import StepOps
from ..tables.tensors import Tensors
from .columns import CALL, NODE_KINDS, NONE, Edges
from .costs import empty_numbers, with_costs
from .layers import LayerTree
from .node_tables import AT, NodeTable, blank_table

_CALL = NODE_KINDS.index(CALL)


def graph_of_calls(ops: StepOps, tree: LayerTree) -> tuple[NodeTable, Edges, Tensors]:
    """Returns a node for each call without inner calls, and an edge to the call that began next."""
    table = tabulate_calls(ops, tree, np.flatnonzero(_is_innermost(tree)))
    unknown = repeat(NONE, len(table.layer))
    table = replace(table, numbers=with_costs(table.numbers, unknown))
    no = np.zeros(0, np.int64)
    nothing = schema("tensors").empty_table()
    return table, _next_edges(table), Tensors(tensor_id=no, producer=no, slot=no, table=nothing, slots=())


def tabulate_idle_calls(ops: StepOps, tree: LayerTree, busy: Rows) -> NodeTable:
    """Returns a node for each call without inner calls and ops. The cost of a compiled call is not known.

    Args:
        ops: the ops of the step.
        tree: the layers.
        busy: the calls in which ops ran.
    """
    is_idle = np.append(_is_innermost(tree), False)  # the last element stands for calls that have no layer
    is_idle[tree.of_call[busy]] = False
    table = tabulate_calls(ops, tree, np.flatnonzero(is_idle))
    is_compiled = ops.calls.column("compiled")[tree.call[table.layer]] == 1
    return replace(table, numbers=with_costs(table.numbers, np.where(is_compiled, NONE, 0)))


def _is_innermost(tree: LayerTree) -> Column:
    return np.asarray((tree.call >= 0) & (tree.last == np.arange(len(tree.parent))))


def tabulate_calls(ops: StepOps, tree: LayerTree, rows: Rows) -> NodeTable:
    """Returns a node in each of the layers `rows`, for the layer's call."""
    calls, call = ops.calls, tree.call[rows]
    types = tuple(dict.fromkeys(place.type or place.name for place in tree.places))
    codes = {name: code for code, name in enumerate(types)}
    of_place = np.array([codes[place.type or place.name] for place in tree.places], np.int64)
    return replace(
        blank_table(_CALL, AT, rows),
        name=of_place[tree.place[rows]],
        phase=tree.phase[rows],
        start_ns=calls.start_ns[call],
        raised=calls.raised[call].astype(bool),
        numbers=replace(empty_numbers(len(rows)), duration_ns=on_device(calls).duration_ns[call]),
        names=types,
    )


def _next_edges(table: NodeTable) -> Edges:
    """Returns edges that join the calls of each phase in the order in which they began."""
    order = np.lexsort((table.start_ns, table.phase))
    same = table.phase[order][1:] == table.phase[order][:-1]
    source, target = order[:-1][same], order[1:][same]
    return Edges(
        source=source,
        target=target,
        tensor=repeat(NONE, len(source)),
        slot=repeat(NONE, len(source)),
        slots=(),
    )
