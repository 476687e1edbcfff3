"""Makes the nodes and edges of a step whose ops were recorded."""

from dataclasses import replace

import numpy as np

from ...recording.protocols import RecordingData
from ..tables.columns import Rows
from ..tables.op_flow import OpFlow, TensorsOfCalls, read_op_flow
from ..tables.ops import StepOps
from ..tables.tensors import Tensors
from .columns import NONE, Edges
from .costs import MeasuredValues
from .layers import LayerTree
from .leaves import Leaves, Readers, find_leaves, outermost_phase
from .node_tables import NodeTable, ends_of, join_tables, tabulate_leaves, tabulate_ops, tabulate_outputs
from .of_calls import tabulate_idle_calls


def graph_of_ops(
    data: RecordingData, ops: StepOps, busy: Rows, tree: LayerTree, measured: MeasuredValues
) -> tuple[NodeTable, Edges, Tensors]:
    """Returns a node for each op, each leaf that ops read, each output of a root, and each call without ops.

    Args:
        data: the recording.
        ops: the ops of the step.
        busy: the calls in which ops ran.
        tree: the layers.
        measured: the statistics of the step.
    """
    calls = ops.calls
    kept = np.flatnonzero(tree.of_call >= 0)
    flow = read_op_flow(data, op_id=ops.op_id, call_id=calls.call_id[kept])
    flow = replace(flow, returned=_without_strays(flow, kept))
    layer = np.append(tree.of_phase, NONE)[ops.phase]
    if len(tree.of_call):
        layer = np.where(ops.call >= 0, tree.of_call[ops.call], layer)
    readers = _readers(flow, ops, layer, tree)
    leaves = find_leaves(data, readers, flow.tensors, _name_given(flow), tree)
    parts = (
        tabulate_ops(data, ops, layer, flow, measured),
        tabulate_leaves(leaves, measured),
        tabulate_outputs(flow, ops, tree),
        tabulate_idle_calls(ops, tree, busy),
    )
    edges, tensors = _join_edges(flow, readers, leaves, len(ops)), flow.tensors
    del flow, readers  # which for a million ops take 60 MB
    return join_tables(parts), edges, tensors


def _without_strays(flow: OpFlow, calls: Rows) -> TensorsOfCalls:
    """Returns the outputs of calls, except those that no op of the graph made or read and that are not of the model.

    Args:
        flow: the ops and tensors.
        calls: the row in `Calls` of each call that `flow` numbers.
    """
    is_known = (flow.tensors.producer >= 0) | (flow.tensors.site_id >= 0)
    is_known[flow.read] = True
    call, tensor, slot = (column[is_known[flow.returned.tensor]] for column in flow.returned)
    return TensorsOfCalls(calls[call], tensor, slot)


def _readers(flow: OpFlow, ops: StepOps, layer: Rows, tree: LayerTree) -> Readers:
    around = outermost_phase(tree)[tree.of_call[flow.returned.call]]
    return Readers(
        tensor=np.concatenate([flow.read, flow.returned.tensor]),
        layer=np.concatenate([layer[flow.reader], around]),
        time_ns=np.concatenate([ops.start_ns[flow.reader], ends_of(ops.calls)[flow.returned.call]]),
        op_count=len(flow.reader),
    )


def _name_given(flow: OpFlow) -> dict[int, str]:
    """Returns the position of each tensor among the arguments of a root, such as `[0]`."""
    slots = [slot.removeprefix("input") for slot in flow.slots]
    given = zip(flow.given.tensor[::-1].tolist(), flow.given.slot[::-1].tolist(), strict=True)
    return {tensor: slots[slot] for tensor, slot in given}  # the first slot of a tensor counts


def _join_edges(flow: OpFlow, readers: Readers, leaves: Leaves, op_count: int) -> Edges:
    """Returns the edges from the nodes that made tensors, or are leaves, to the nodes that read them.

    Nodes are numbered with the ops first, then the leaves, then the outputs.
    """
    maker = flow.tensors.producer.copy()
    maker[leaves.tensor] = op_count + np.arange(len(leaves.tensor))
    output = op_count + len(leaves.tensor) + np.arange(len(flow.returned.call))
    source = maker[readers.tensor]
    target = np.concatenate([flow.reader, output])
    edges = Edges(
        source=source,
        target=target,
        tensor=readers.tensor,
        slot=np.concatenate([flow.slot, flow.returned.slot]),
        slots=flow.slots,
    )
    known = source >= 0  # a model may return a tensor that no op has read or made
    return edges if known.all() else edges.take(np.flatnonzero(known))
