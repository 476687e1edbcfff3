"""Builds the execution graph of one step of a recording."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from ..recording.phase import PHASES, RECOMPUTE
from ..recording.protocols import RecordingData
from ..recording.schema import schema
from .calls import Column, RowFinder, Rows, column_of
from .graph import CALL, NODE_KINDS, NONE, OP, OUTPUT, Edges, Graph, Layers, Nodes, Numbers, Tensors
from .graph_layers import LayerTree, build_layers
from .graph_leaves import Leaves, Readers, find_leaves, outermost_phase
from .graph_numbers import Measured, empty_numbers, join_numbers, numbers_of_layers, read_measured
from .graph_parts import WHOLE, Part
from .graph_reads import Reads, read_uses
from .step_ops import PlacedCalls, StepOps, read_step_ops, word_codes

_OP, _CALL, _OUTPUT = (NODE_KINDS.index(each) for each in (OP, CALL, OUTPUT))
# Of what happens at one time: a leaf is there before the op that reads it, an output after it.
_BEFORE, _AT, _AFTER = range(3)


def build_graph(data: RecordingData, *, step: int | None = None, part: Part = WHOLE) -> Graph:
    """The graph of a step: every call is a layer, every op a node, every tensor that an op reads an edge.

    Without ops the nodes are the calls of modules that call no other, joined in the order in which they began.

    Args:
        step: None chooses as `build_module_tree` does.
        part: what of the step; what its ops read of what others have made are leaves.

    Raises:
        ValueError: the recording has no such step.
    """
    ops = read_step_ops(data, step=step)
    has_ops = len(ops) > 0
    if has_ops:
        ops = ops.take(np.flatnonzero(_has_tensors(data, ops) & part.of_ops(ops)))
    tree = build_layers(ops.placed, _kept_calls(ops, part, has_ops), ops.phase, ops.start_ns)
    measured = read_measured(data, ops.step.step if ops.step else None)
    draft, edges, tensors = _build_ops(data, ops, tree, measured) if has_ops else _build_calls(ops, tree)
    order = np.lexsort((np.arange(len(draft.layer)), draft.when, draft.time_ns))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    sorted_rows = np.lexsort((rank, draft.layer))
    new = np.append(np.empty(len(order), np.int64), NONE)
    new[sorted_rows] = np.arange(len(order))
    nodes = draft.to_nodes(sorted_rows, rank, new)
    return Graph(
        command=data.meta.argv,
        marks=data.meta.marks,
        step=ops.step,
        has_ops=has_ops or not len(tree.call),
        layers=_to_layers(ops, tree, nodes, measured),
        nodes=nodes,
        edges=_sort_edges(edges, new, nodes),
        tensors=replace(tensors, producer=new[tensors.producer]),
    )


def _has_tensors(data: RecordingData, ops: StepOps) -> Column:
    """Whether each op reads or returns a tensor: marks of the profiler do neither."""
    reading = column_of(data.table("uses"), "consumer_op")
    making = column_of(data.table("tensors"), "producer_op")
    return np.asarray(np.isin(ops.op_id, reading) | np.isin(ops.op_id, making))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Draft:
    """Nodes in any order; references are to rows of the draft."""

    layer: Rows
    kind: Column
    name: Column
    nth: Column
    phase: Column
    op_id: Column
    tensor: Rows
    args: Column
    is_view: Column
    repeats: Rows
    time_ns: Column
    when: Column
    raised: Column
    numbers: Numbers
    names: tuple[str, ...]
    argument_texts: tuple[str, ...] = ()

    def to_nodes(self, rows: Rows, rank: Rows, new: Rows) -> Nodes:
        """The nodes in the order `rows`; `new` is where each row goes."""
        return Nodes(
            layer=self.layer[rows],
            order=rank[rows],
            kind=self.kind[rows],
            name=self.name[rows],
            nth=self.nth[rows],
            phase=self.phase[rows],
            op_id=self.op_id[rows],
            tensor=self.tensor[rows],
            args=self.args[rows],
            is_view=self.is_view[rows],
            repeats=new[self.repeats[rows]],
            start_ns=self.time_ns[rows],
            raised=self.raised[rows],
            numbers=self.numbers.take(rows),
            names=self.names,
            argument_texts=self.argument_texts,
        )


def _kept_calls(ops: StepOps, part: Part, has_ops: bool) -> Column:
    """The calls that ops ran in, with all around them; without ops those of the step."""
    calls = ops.placed.calls
    kept = np.zeros(len(calls), bool)
    if has_ops:
        waiting = np.unique(ops.call[ops.call >= 0])
    else:
        places = np.array([*part.has_places([each.path for each in ops.placed.places]), part.paths is None])
        at = places[np.maximum(ops.placed.where, -1)]
        waiting = np.flatnonzero(calls.in_step.astype(bool) & part.has_phase(calls.phase) & at)
    while len(waiting):
        kept[waiting] = True
        above = calls.parent[waiting]
        waiting = np.unique(above[above >= 0])
        waiting = waiting[~kept[waiting]]
    return kept


# Of a recording with ops.


def _build_ops(
    data: RecordingData, ops: StepOps, tree: LayerTree, measured: Measured
) -> tuple[_Draft, Edges, Tensors]:
    calls = ops.placed.calls
    reads, tensors = read_uses(data, ops.op_id, calls.call_id[tree.of_call >= 0])
    reads = replace(reads, call=np.flatnonzero(tree.of_call >= 0)[reads.call])
    every = data.table("tensors")
    row = RowFinder(column_of(every, "tensor_id"))(tensors.tensor_id)
    made_by = column_of(every, "producer_op")[row]
    reads = _without_strays(reads, tensors)
    layer = _layers_of_ops(ops, tree)
    readers, given = _readers(reads, ops, layer, tree), _name_given(reads)
    leaves = find_leaves(data, readers, tensors, made_by, given, tree)
    parts = (
        _draft_ops(data, ops, layer, tensors, measured),
        _draft_leaves(leaves, measured),
        _draft_outputs(reads, ops, tree),
    )
    return _join(parts), _join_edges(reads, ops, leaves, tensors, len(parts[0].layer)), tensors


def _without_strays(reads: Reads, tensors: Tensors) -> Reads:
    """The same without outputs that nothing in the graph has made or reads, and that are none of the model's."""
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
        time_ns=np.concatenate([ops.start_ns[reads.op], _ends(ops.placed)[reads.call]]),
        op_count=len(reads.op),
    )


def _name_given(reads: Reads) -> dict[int, str]:
    """Where each tensor that a root was given is among its arguments: `[0]`."""
    slots = [each.removeprefix("input") for each in reads.slots]
    given = zip(reads.given[::-1].tolist(), reads.given_as[::-1].tolist(), strict=True)
    return {tensor: slots[slot] for tensor, slot in given}  # of several the first


def _ends(placed: PlacedCalls) -> Column:
    """When calls ended, or began if that is not known."""
    calls = placed.calls
    return np.asarray(calls.start_ns + calls.duration_ns + calls.overhead_ns)


def _layers_of_ops(ops: StepOps, tree: LayerTree) -> Rows:
    by_phase = np.append(tree.of_phase, NONE)[ops.phase]
    return np.where(ops.call >= 0, tree.of_call[ops.call], by_phase) if len(tree.of_call) else by_phase


def _draft_ops(
    data: RecordingData, ops: StepOps, layer: Rows, tensors: Tensors, measured: Measured
) -> _Draft:
    rows = RowFinder(column_of(data.table("ops"), "op_id"))(ops.op_id)
    table = data.table("ops").select(["args", "is_view", "forward_op_id"]).take(pa.array(rows))
    args, texts = word_codes(table["args"])
    nonfinite, count, sumsq = measured.take(measured.is_op_output).sum_at(
        RowFinder(ops.op_id)(measured.op_id[measured.is_op_output]), len(ops)
    )
    forward = RowFinder(ops.op_id)(column_of(table, "forward_op_id"))
    return _Draft(
        layer=layer,
        kind=np.full(len(ops), _OP, np.int8),
        name=ops.name,
        nth=ops.nth,
        phase=ops.phase,
        op_id=ops.op_id,
        tensor=_first_returned(tensors, len(ops)),
        args=args,
        is_view=column_of(table, "is_view").astype(bool),
        repeats=np.where(forward >= 0, forward, _find_originals(ops)),
        time_ns=ops.start_ns,
        when=np.full(len(ops), _AT, np.int8),
        raised=ops.raised.astype(bool),
        numbers=Numbers(
            duration_ns=ops.duration_ns,
            flops=ops.flops,
            bytes_read=ops.bytes_read,
            bytes_written=ops.bytes_written,
            saved_bytes=ops.saved_bytes,
            nonfinite=nonfinite,
            measured=count,
            sumsq=sumsq,
        ),
        names=ops.names,
        argument_texts=texts,
    )


def _first_returned(tensors: Tensors, size: int) -> Rows:
    first = np.full(size, NONE, np.int64)
    made = np.flatnonzero(tensors.producer >= 0)[::-1]
    first[tensors.producer[made]] = made
    return first


def _find_originals(ops: StepOps) -> Rows:
    """Of each op of a recomputed call: the op of that name and number in the call that it repeats."""
    calls = ops.placed.calls
    if not len(calls) or not len(ops):
        return np.full(len(ops), NONE, np.int64)
    is_recompute = (ops.call >= 0) & (calls.phase[ops.call] == PHASES.index(RECOMPUTE))
    original = np.where(is_recompute, calls.repeats[ops.call], NONE)
    found = RowFinder(_op_keys(ops, ops.call))(_op_keys(ops, original))
    return np.where(original >= 0, found, NONE)


def _op_keys(ops: StepOps, call: Rows) -> Column:
    """A number for each name and number of its name in a call."""
    highest = int(ops.nth.max()) + 1
    return np.where(call >= 0, (call * len(ops.names) + ops.name) * highest + ops.nth, NONE)


def _draft_leaves(leaves: Leaves, measured: Measured) -> _Draft:
    size = len(leaves.tensor)
    names = tuple(dict.fromkeys(leaves.name))
    codes = {name: code for code, name in enumerate(names)}
    sited = measured.take(~measured.is_op_output & (measured.call_id < 0)).first_at_sites()
    nonfinite, count, sumsq = sited.sum_at(RowFinder(leaves.site)(sited.site), size)
    return _Draft(
        layer=leaves.layer,
        kind=leaves.kind,
        name=np.array([codes[each] for each in leaves.name], np.int64),
        nth=np.zeros(size, np.int32),
        phase=np.full(size, NONE, np.int8),
        op_id=np.full(size, NONE, np.int64),
        tensor=leaves.tensor,
        args=np.full(size, NONE, np.int64),
        is_view=np.zeros(size, bool),
        repeats=np.full(size, NONE, np.int64),
        time_ns=leaves.time_ns,
        when=np.full(size, _BEFORE, np.int8),
        raised=np.zeros(size, bool),
        numbers=replace(empty_numbers(size), nonfinite=nonfinite, measured=count, sumsq=sumsq),
        names=names,
    )


def _draft_outputs(reads: Reads, ops: StepOps, tree: LayerTree) -> _Draft:
    """What calls return, and how it is called."""
    size = len(reads.call)
    calls = ops.placed.calls
    around = outermost_phase(tree)
    return _Draft(
        layer=around[tree.of_call[reads.call]],
        kind=np.full(size, _OUTPUT, np.int8),
        name=reads.place,
        nth=np.zeros(size, np.int32),
        phase=calls.phase[reads.call],
        op_id=np.full(size, NONE, np.int64),
        tensor=reads.returned,
        args=np.full(size, NONE, np.int64),
        is_view=np.zeros(size, bool),
        repeats=np.full(size, NONE, np.int64),
        time_ns=_ends(ops.placed)[reads.call],
        when=np.full(size, _AFTER, np.int8),
        raised=np.zeros(size, bool),
        numbers=empty_numbers(size),
        names=reads.slots,
    )


def _join(parts: Sequence[_Draft]) -> _Draft:
    """One draft of several; only the first one's `repeats` and `args` may refer to anything."""
    columns = (
        "layer",
        "kind",
        "nth",
        "phase",
        "op_id",
        "tensor",
        "args",
        "is_view",
        "repeats",
        "time_ns",
        "when",
        "raised",
    )
    joined = {name: np.concatenate([getattr(each, name) for each in parts]) for name in columns}
    starts = np.cumsum([0, *(len(each.names) for each in parts)])
    name = np.concatenate([each.name + start for each, start in zip(parts, starts, strict=False)])
    return _Draft(
        **joined,
        name=name,
        numbers=join_numbers([each.numbers for each in parts]),
        names=tuple(name for each in parts for name in each.names),
        argument_texts=parts[0].argument_texts,
    )


def _join_edges(reads: Reads, ops: StepOps, leaves: Leaves, tensors: Tensors, op_count: int) -> Edges:
    """From what made each tensor, or is it, to what reads it; outputs stand behind ops and leaves."""
    maker = tensors.producer.copy()
    maker[leaves.tensor] = op_count + np.arange(len(leaves.tensor))
    output = op_count + len(leaves.tensor) + np.arange(len(reads.call))
    source = np.concatenate([maker[reads.tensor], maker[reads.returned]])
    target = np.concatenate([reads.op, output])
    known = source >= 0  # what a model returns may be something that no op has read or made
    return Edges(
        source=source[known],
        target=target[known],
        tensor=np.concatenate([reads.tensor, reads.returned])[known],
        slot=np.concatenate([reads.slot, reads.place])[known],
        time_ns=np.concatenate([ops.start_ns[reads.op], _ends(ops.placed)[reads.call]])[known],
        slots=reads.slots,
    )


def _sort_edges(edges: Edges, new: Rows, nodes: Nodes) -> Edges:
    """The edges between the nodes where they now are, by time; those of one target as it takes them."""
    source, target = new[edges.source], new[edges.target]
    order = np.argsort(nodes.order[target], kind="stable")
    return replace(edges.take(order), source=source[order], target=target[order])


# Of a recording without ops.


def _build_calls(ops: StepOps, tree: LayerTree) -> tuple[_Draft, Edges, Tensors]:
    """A node for each call that has no other inside, and an edge to the one that began next."""
    rows = np.flatnonzero((tree.call >= 0) & (tree.last == np.arange(len(tree.parent))))
    calls, call = ops.placed.calls, tree.call[rows]
    types = tuple(dict.fromkeys(each.type or each.name for each in tree.places))
    codes = {name: code for code, name in enumerate(types)}
    of_place = np.array([codes[each.type or each.name] for each in tree.places], np.int64)
    unknown = np.full(len(rows), NONE, np.int64)
    draft = _Draft(
        layer=rows,
        kind=np.full(len(rows), _CALL, np.int8),
        name=of_place[tree.place[rows]],
        nth=np.zeros(len(rows), np.int32),
        phase=tree.phase[rows],
        op_id=unknown,
        tensor=unknown,
        args=unknown,
        is_view=np.zeros(len(rows), bool),
        repeats=unknown,
        time_ns=calls.start_ns[call],
        when=np.full(len(rows), _AT, np.int8),
        raised=calls.raised[call].astype(bool),
        numbers=replace(empty_numbers(len(rows)), duration_ns=calls.duration_ns[call]),
        names=types,
    )
    return draft, _next_edges(draft, tree), _no_tensors()


def _next_edges(draft: _Draft, tree: LayerTree) -> Edges:
    """Joins the calls of one phase in the order in which they began."""
    order = np.lexsort((draft.time_ns, draft.phase))
    same = draft.phase[order][1:] == draft.phase[order][:-1]
    source, target = order[:-1][same], order[1:][same]
    return Edges(
        source=source,
        target=target,
        tensor=np.full(len(source), NONE, np.int64),
        slot=np.full(len(source), NONE, np.int64),
        time_ns=draft.time_ns[target],
        slots=(),
    )


def _no_tensors() -> Tensors:
    nothing = np.zeros(0, np.int64)
    return Tensors(
        tensor_id=nothing, producer=nothing, slot=nothing, table=schema("tensors").empty_table(), slots=()
    )


def _to_layers(ops: StepOps, tree: LayerTree, nodes: Nodes, measured: Measured) -> Layers:
    calls, placed = ops.placed.calls, ops.placed
    at = tree.call
    is_call = at >= 0
    if not len(calls):
        calls_of, nth, repeats, raised = np.full(len(at), NONE), np.full(len(at), NONE), at, is_call
    else:
        calls_of = np.where(is_call, calls.call_id[at], NONE)
        nth = np.where(is_call, placed.column("nth")[placed.origin[at]], NONE)
        repeats = np.where(is_call & (calls.repeats[at] >= 0), tree.of_call[calls.repeats[at]], NONE)
        raised = is_call & calls.raised[at].astype(bool)
    return Layers(
        parent=tree.parent,
        last=tree.last,
        depth=tree.depth,
        kind=tree.kind,
        phase=tree.phase,
        place=tree.place,
        nth=nth,
        call_id=calls_of,
        repeats=repeats,
        start_ns=tree.start_ns,
        raised=raised,
        numbers=numbers_of_layers(tree, calls, nodes.layer, nodes.numbers, measured),
        places=tree.places,
    )
