"""Makes the nodes and edges of a step whose ops were recorded."""

from dataclasses import replace

import numpy as np

from ...recording.protocols import RecordingData
from ..step.calls import Rows, column_of
from ..step.ops import StepOps
from .columns import NONE, Edges, Tensors
from .costs import MeasuredValues
from .layers import LayerTree
from .leaves import Leaves, Readers, find_leaves, outermost_phase
from .node_tables import NodeTable, ends_of, join_tables, tabulate_leaves, tabulate_ops, tabulate_outputs
from .of_calls import tabulate_idle_calls
from .reads import Reads, read_uses


def graph_of_ops(
    data: RecordingData, ops: StepOps, busy: Rows, tree: LayerTree, measured: MeasuredValues
) -> tuple[NodeTable, Edges, Tensors]:
    """Returns a node for each op, for each leaf that it reads, for the outputs of roots, and for calls without ops.

    Args:
        data: the recording.
        ops: the ops of the step.
        busy: the calls in which ops ran.
        tree: the layers.
        measured: the statistics of the step.
    """
    calls = ops.placed.calls
    reads, tensors = read_uses(data, ops.op_id, calls.call_id[tree.of_call >= 0])
    reads = replace(reads, call=np.flatnonzero(tree.of_call >= 0)[reads.call])
    reads = _without_strays(reads, tensors)
    layer = np.append(tree.of_phase, NONE)[ops.phase]
    if len(tree.of_call):
        layer = np.where(ops.call >= 0, tree.of_call[ops.call], layer)
    readers, given = _readers(reads, ops, layer, tree), _name_given(reads)
    leaves = find_leaves(data, readers, tensors, given, tree)
    parts = (
        tabulate_ops(data, ops, layer, tensors, measured),
        tabulate_leaves(leaves, measured),
        tabulate_outputs(reads, ops, tree),
        tabulate_idle_calls(ops, tree, busy),
    )
    return join_tables(parts), _join_edges(reads, readers, leaves, tensors, len(parts[0].layer)), tensors


def _without_strays(reads: Reads, tensors: Tensors) -> Reads:
    """Drops outputs that nothing in the graph has made or read and that do not belong to the model."""
    is_read = np.zeros(len(tensors), bool)
    is_read[reads.tensor] = True
    known = (tensors.producer >= 0) | is_read | (column_of(tensors.table, "site_id") >= 0)
    kept = known[reads.returned]
    return replace(reads, call=reads.call[kept], returned=reads.returned[kept], place=reads.place[kept])


def _readers(reads: Reads, ops: StepOps, layer: Rows, tree: LayerTree) -> Readers:
    around = outermost_phase(tree)[tree.of_call[reads.call]]
    return Readers(
        tensor=np.concatenate([reads.tensor, reads.returned]),
        layer=np.concatenate([layer[reads.op], around]),
        time_ns=np.concatenate([ops.start_ns[reads.op], ends_of(ops.placed)[reads.call]]),
        op_count=len(reads.op),
    )


def _name_given(reads: Reads) -> dict[int, str]:
    """Returns the position of each tensor among the arguments of a root, such as `[0]`."""
    slots = [each.removeprefix("input") for each in reads.slots]
    given = zip(reads.given[::-1].tolist(), reads.given_as[::-1].tolist(), strict=True)
    return {tensor: slots[slot] for tensor, slot in given}  # of several the first


def _join_edges(reads: Reads, readers: Readers, leaves: Leaves, tensors: Tensors, op_count: int) -> Edges:
    """Returns the edges from the nodes that made tensors, or are leaves, to their readers.

    Nodes are numbered as ops, then leaves, then outputs.
    """
    maker = tensors.producer.copy()
    maker[leaves.tensor] = op_count + np.arange(len(leaves.tensor))
    output = op_count + len(leaves.tensor) + np.arange(len(reads.call))
    source = maker[readers.tensor]
    target = np.concatenate([reads.op, output])
    known = source >= 0  # what a model returns may be something that no op has read or made
    return Edges(
        source=source[known],
        target=target[known],
        tensor=readers.tensor[known],
        slot=np.concatenate([reads.slot, reads.place])[known],
        time_ns=readers.time_ns[known],
        slots=reads.slots,
    )
