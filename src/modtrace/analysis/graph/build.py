"""Builds the execution graph of one step of a recording."""

from dataclasses import fields, replace

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData
from ..tables.columns import Column, Rows, take
from ..tables.device_times import has_device_times, on_device
from ..tables.inside import with_inside
from ..tables.op_flow import find_ops_with_tensors
from ..tables.ops import StepOps, read_step_ops
from .columns import CONTAINER, LAYER_KINDS, NONE, Edges, Graph, LayerBoxes, Layers, Nodes
from .costs import MeasuredValues, forget_saved_in_regions, numbers_of_layers, read_measured, with_inner
from .layers import LayerTree, build_layers
from .of_calls import graph_of_calls
from .of_ops import graph_of_ops
from .parts import WHOLE, Part


def build_graph(data: RecordingData, *, step: int | None = None, part: Part = WHOLE) -> Graph:
    """Returns the graph of a step: every call is a layer, every op a node, every tensor that an op reads an edge.

    Without ops the nodes are the calls of modules that call no others, joined in the order in which they began.

    Args:
        data: the recording.
        step: the number of the step; None chooses as `build_module_tree` does.
        part: the part of the step. Tensors that its ops read and other ops made are leaves.

    Raises:
        ValueError: the recording has no such step.
    """
    ops = read_step_ops(data, step=step)
    if ops.step is not None and (inside := with_inside(data, ops.step.step)) is not data:
        data = inside
        ops = read_step_ops(data, step=ops.step.step)
    has_ops = len(ops) > 0 or bool(data.meta.options.get("ops"))
    busy = np.unique(ops.call[ops.call >= 0])
    if has_ops:
        kept = find_ops_with_tensors(data, ops.op_id) & part.of_ops(ops)
        ops = ops if kept.all() else ops.take(np.flatnonzero(kept))  # of all ops a copy takes 100 bytes each
    tree = build_layers(ops.calls, _kept_calls(ops, part, busy if has_ops else None), ops.phase, ops.start_ns)
    measured = read_measured(data, ops.step.step if ops.step else None)
    table, edges, tensors = (
        graph_of_ops(data, ops, busy, tree, measured) if has_ops else graph_of_calls(ops, tree)
    )
    measured = measured.take(measured.call_id >= 0)
    order = np.lexsort((np.arange(len(table.layer)), table.when, table.start_ns))
    rank = np.argsort(order).astype(np.int32)
    sorted_rows = np.lexsort((rank, table.layer))
    new = np.append(np.empty(len(order), np.int32), np.int32(NONE))
    new[sorted_rows] = np.arange(len(order))
    nodes = table.to_nodes(sorted_rows, rank, new)
    del table, order, rank, sorted_rows  # which for a million nodes takes 150 MB
    saved = forget_saved_in_regions(tree, ops.calls, nodes.layer, nodes.numbers.saved_bytes)
    edges = _sort_edges(edges, new, nodes.order)
    tensors = replace(tensors, producer=new[tensors.producer])
    del new
    return Graph(
        command=data.meta.argv,
        marks=data.meta.marks,
        step=ops.step,
        has_ops=has_ops or not len(tree.call),
        layers=_to_layers(ops, tree, nodes, measured),
        nodes=replace(nodes, numbers=replace(nodes.numbers, saved_bytes=saved)),
        edges=edges,
        tensors=tensors,
        device_times=has_device_times(ops.calls),
    )


def _sort_edges(edges: Edges, new: Rows, order: Rows) -> Edges:
    """Returns edges between the new rows of nodes in order of time; `order` is the rank of each new row."""
    target = new[edges.target]
    # A stable sort keeps the edges of one target in the order of its arguments.
    by_time = np.argsort(order[target], kind="stable")
    return replace(edges.take(by_time), source=new[edges.source][by_time], target=target[by_time])


def _kept_calls(ops: StepOps, part: Part, busy: Rows | None) -> Column:
    """Returns for each call of the recording whether the graph has a layer for it.

    These are the calls in which a shown op ran, the outermost calls and calls without any op that belong to the part,
    and the callers of all these.

    Args:
        ops: the ops of the step.
        part: the part of the step that is shown.
        busy: the calls in which ops ran, shown or not; None if no ops were recorded, so that all calls of the part are
            kept.
    """
    calls, where = ops.calls, ops.calls.where
    is_place = np.array([*part.has_places([place.path for place in ops.calls.places]), part.paths is None])
    kept = calls.in_step.astype(bool) & part.has_phase(calls.phase) & is_place[np.maximum(where, -1)]
    if busy is not None:
        kept[busy[calls.parent[busy] >= 0]] = False
        kept &= part.ops is None
        kept[ops.call[ops.call >= 0]] = True
    waiting = np.flatnonzero(kept)
    while len(waiting):
        kept[waiting] = True
        above = calls.parent[waiting]
        waiting = np.unique(above[above >= 0])
        waiting = waiting[~kept[waiting]]
    return np.asarray(kept)


def _to_layers(ops: StepOps, tree: LayerTree, nodes: Nodes, measured: MeasuredValues) -> Layers:
    calls = ops.calls
    at = tree.call
    repeats = take(tree.of_call, take(calls.repeats, at))
    is_compiled = calls.column("compiled").astype(bool)
    compiled = take(is_compiled | is_compiled[calls.origin], at) > 0
    repeats = np.where(at >= 0, repeats, _find_containers(tree))
    return Layers(
        **{field.name: getattr(tree, field.name) for field in fields(LayerBoxes)},
        nth=take(calls.nth[calls.origin], at),
        call_id=take(calls.call_id, at),
        repeats=repeats,
        raised=take(calls.raised, at) > 0,
        compiled=with_inner(compiled, tree.last),
        numbers=numbers_of_layers(tree, on_device(calls), nodes.layer, nodes.numbers, measured),
    )


def _find_containers(tree: LayerTree) -> Rows:
    """Returns, for each container in another phase, the first layer of the forward at the same place."""
    keys: dict[tuple[str | None, str | None], int] = {}
    code = np.array([keys.setdefault((place.root, place.path), len(keys)) for place in tree.places], np.int64)
    key = code[tree.place]
    is_forward = tree.phase == PHASES.index(FORWARD)
    rows = np.flatnonzero(is_forward)[::-1]
    first = np.full(len(keys), NONE, np.int64)
    first[key[rows]] = rows  # reversed, so that the first is written last
    is_wanted = (tree.kind == LAYER_KINDS.index(CONTAINER)) & ~is_forward
    return np.where(is_wanted, first[key], NONE)
