"""Makes tables of a graph's nodes: ops, leaves and outputs as columns, in any order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from ...recording.phase import PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ..step.calls import Column, RowFinder, Rows, column_of
from ..step.ops import PlacedCalls, StepOps, dictionary_codes
from .columns import NODE_KINDS, NONE, OP, OUTPUT, Nodes, Numbers, Tensors
from .costs import MeasuredValues, empty_numbers, join_numbers
from .layers import LayerTree
from .leaves import Leaves, outermost_phase
from .reads import Reads

_OP, _OUTPUT = (NODE_KINDS.index(each) for each in (OP, OUTPUT))
#: The order at one time: a leaf comes before the op that reads it, an output after it.
BEFORE, AT, AFTER = range(3)


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeTable:
    """Nodes in any order; references are to rows of the table."""

    layer: Rows
    kind: Column
    name: Column
    nth: Column
    root: list[str]  # "": no matter
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
        """Returns the nodes in the order `rows`; `new` is the new position of each row, and `rank` its rank in time."""
        codes = {root: at for at, root in enumerate(sorted({*self.root} - {""}))}
        return Nodes(
            layer=self.layer[rows],
            order=rank[rows],
            kind=self.kind[rows],
            name=self.name[rows],
            nth=self.nth[rows],
            root=np.array([codes.get(each, NONE) for each in self.root], np.int64)[rows],
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
            roots=tuple(codes),
            argument_texts=self.argument_texts,
        )


def tabulate_ops(
    data: RecordingData, ops: StepOps, layer: Rows, tensors: Tensors, measured: MeasuredValues
) -> NodeTable:
    rows = RowFinder(column_of(data.table("ops"), "op_id"))(ops.op_id)
    table = data.table("ops").select(["args", "is_view", "forward_op_id"]).take(pa.array(rows))
    args, texts = dictionary_codes(table["args"])
    outputs = measured.take(measured.is_op_output)
    forward = RowFinder(ops.op_id)(column_of(table, "forward_op_id"))
    return NodeTable(
        layer=layer,
        kind=np.full(len(ops), _OP, np.int8),
        name=ops.name,
        nth=ops.nth,
        root=[""] * len(ops),
        phase=ops.phase,
        op_id=ops.op_id,
        tensor=_first_returned(tensors, len(ops)),
        args=args,
        is_view=column_of(table, "is_view").astype(bool),
        repeats=np.where(forward >= 0, forward, _find_originals(ops)),
        time_ns=ops.start_ns,
        when=np.full(len(ops), AT, np.int8),
        raised=ops.raised.astype(bool),
        numbers=Numbers(
            duration_ns=ops.duration_ns,
            flops=ops.flops,
            bytes_read=ops.bytes_read,
            bytes_written=ops.bytes_written,
            saved_bytes=ops.saved_bytes,
            **outputs.sum_at(RowFinder(ops.op_id)(outputs.op_id), len(ops)),
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
    """Returns, for each op of a recomputed call, the op with the same name and number in the repeated call."""
    calls = ops.placed.calls
    if not len(calls) or not len(ops):
        return np.full(len(ops), NONE, np.int64)
    is_recompute = (ops.call >= 0) & (calls.phase[ops.call] == PHASES.index(RECOMPUTE))
    original = np.where(is_recompute, calls.repeats[ops.call], NONE)
    found = RowFinder(_op_keys(ops, ops.call))(_op_keys(ops, original))
    return np.where(original >= 0, found, NONE)


def _op_keys(ops: StepOps, call: Rows) -> Column:
    """Returns a key for each op, which combines its call, its name, and its index among ops with that name."""
    highest = int(ops.nth.max()) + 1
    return np.where(call >= 0, (call * len(ops.names) + ops.name) * highest + ops.nth, NONE)


def tabulate_leaves(leaves: Leaves, measured: MeasuredValues) -> NodeTable:
    size = len(leaves.tensor)
    names = tuple(dict.fromkeys(leaves.name))
    codes = {name: code for code, name in enumerate(names)}
    sited = measured.take(~measured.is_op_output & (measured.call_id < 0)).first_at_sites()
    return NodeTable(
        layer=leaves.layer,
        kind=leaves.kind,
        name=np.array([codes[each] for each in leaves.name], np.int64),
        nth=np.zeros(size, np.int32),
        root=leaves.root,
        phase=np.full(size, NONE, np.int8),
        op_id=np.full(size, NONE, np.int64),
        tensor=leaves.tensor,
        args=np.full(size, NONE, np.int64),
        is_view=np.zeros(size, bool),
        repeats=np.full(size, NONE, np.int64),
        time_ns=leaves.time_ns,
        when=np.full(size, BEFORE, np.int8),
        raised=np.zeros(size, bool),
        numbers=replace(empty_numbers(size), **sited.sum_at(RowFinder(leaves.site)(sited.site), size)),
        names=names,
    )


def tabulate_outputs(reads: Reads, ops: StepOps, tree: LayerTree) -> NodeTable:
    """Returns a node for each output of a call, with its name."""
    size = len(reads.call)
    calls = ops.placed.calls
    nth = ops.placed.column("nth")[reads.call] if size else np.zeros(0, np.int32)
    around = outermost_phase(tree)
    return NodeTable(
        layer=around[tree.of_call[reads.call]],
        kind=np.full(size, _OUTPUT, np.int8),
        name=reads.place,
        nth=np.maximum(nth, 0).astype(np.int32),
        root=_roots_of(reads.call, ops),
        phase=calls.phase[reads.call],
        op_id=np.full(size, NONE, np.int64),
        tensor=reads.returned,
        args=np.full(size, NONE, np.int64),
        is_view=np.zeros(size, bool),
        repeats=np.full(size, NONE, np.int64),
        time_ns=ends_of(ops.placed)[reads.call],
        when=np.full(size, AFTER, np.int8),
        raised=np.zeros(size, bool),
        numbers=empty_numbers(size),
        names=reads.slots,
    )


def _roots_of(call: Rows, ops: StepOps) -> list[str]:
    """Returns the root of each call if the recording has several; else ""."""
    places = ops.placed.places
    if len({each.root for each in places} - {None}) < 2:
        return [""] * len(call)
    return [places[where].root or "" if where >= 0 else "" for where in ops.placed.where[call].tolist()]


def ends_of(placed: PlacedCalls) -> Column:
    """Returns the end of each call, or its beginning if the end is not known."""
    calls = placed.calls
    return np.asarray(calls.start_ns + calls.duration_ns + calls.overhead_ns)


def join_tables(parts: Sequence[NodeTable]) -> NodeTable:
    """Joins several tables. Only the first one's `repeats` and `args` may refer to anything."""
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
    root = [each for part in parts for each in part.root]
    name = np.concatenate([each.name + start for each, start in zip(parts, starts, strict=False)])
    return NodeTable(
        **joined,
        name=name,
        root=root,
        numbers=join_numbers([each.numbers for each in parts]),
        names=tuple(name for each in parts for name in each.names),
        argument_texts=parts[0].argument_texts,
    )
