"""Makes tables of a graph's nodes: ops, leaves and outputs as columns, in any order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...recording.phase import PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ..tables.calls import Calls
from ..tables.columns import Column, Rows, columns_at, find_rows, join_columns, repeat, take
from ..tables.op_flow import OpFlow
from ..tables.ops import StepOps, read_op_details
from .columns import NODE_KINDS, NONE, OP, OUTPUT, NodeColumns, Nodes, Numbers
from .costs import MeasuredValues, empty_numbers
from .layers import LayerTree
from .leaves import Leaves, outermost_phase

_OP, _OUTPUT = (NODE_KINDS.index(kind) for kind in (OP, OUTPUT))
#: The order of nodes at the same time: a leaf precedes the op that reads it, and an output follows.
BEFORE, AT, AFTER = range(3)


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeTable(NodeColumns):
    """Nodes in any order; columns that refer to nodes hold rows of this table."""

    root: Column  # codes of `roots` for leaves and outputs, if there are several roots; else NONE
    roots: tuple[str, ...] = ()
    when: Column

    def to_nodes(self, rows: Rows, rank: Column, new: Column) -> Nodes:
        """Returns the nodes in the order `rows`. `new` is the new position of each row, and `rank` its rank in time."""
        columns = columns_at(self, rows) | {"repeats": new[self.repeats[rows]]}
        del columns["when"]
        return Nodes(
            order=rank[rows],
            numbers=self.numbers.take(rows),
            names=self.names,
            roots=self.roots,
            argument_texts=self.argument_texts,
            **columns,
        )


def blank_table(kind: int, when: int, layer: Rows) -> NodeTable:
    """Returns a table with a node in each of these layers, whose other columns are empty except the kind."""
    size = len(layer)
    unknown, untrue = repeat(NONE, size), repeat(False, size, np.bool_)
    return NodeTable(
        layer=layer,
        kind=repeat(kind, size, np.int8),
        name=unknown,
        nth=repeat(0, size, np.int32),
        root=unknown,
        phase=repeat(NONE, size, np.int8),
        op_id=unknown,
        tensor=unknown,
        args=unknown,
        is_view=untrue,
        repeats=unknown,
        start_ns=unknown,
        when=repeat(when, size, np.int8),
        raised=untrue,
        numbers=empty_numbers(size),
        names=(),
    )


def tabulate_ops(
    data: RecordingData, ops: StepOps, layer: Rows, flow: OpFlow, measured: MeasuredValues
) -> NodeTable:
    """Returns a table with a node for each op."""
    details = read_op_details(data, ops.op_id)
    outputs = measured.take(measured.is_op_output)
    forward = find_rows(ops.op_id, details.forward_op_id)
    return replace(
        blank_table(_OP, AT, layer),
        name=ops.name,
        nth=ops.nth,
        phase=ops.phase,
        op_id=ops.op_id,
        tensor=flow.first_returned,
        args=details.args,
        is_view=details.is_view,
        repeats=np.where(forward >= 0, forward, _find_originals(ops)),
        start_ns=ops.start_ns,
        raised=ops.raised.astype(bool),
        numbers=Numbers(
            duration_ns=ops.duration_ns,
            flops=ops.flops,
            bytes_read=ops.bytes_read,
            bytes_written=ops.bytes_written,
            saved_bytes=ops.saved_bytes,
            **outputs.sum_at(find_rows(ops.op_id, outputs.op_id), len(ops)),
        ),
        names=ops.names,
        argument_texts=details.argument_texts,
    )


def _find_originals(ops: StepOps) -> Rows:
    """Returns, for each op of a recomputed call, the op with the same name and number in the repeated call."""
    calls = ops.calls
    is_recompute = take(calls.phase, ops.call) == PHASES.index(RECOMPUTE)
    original = np.where(is_recompute, take(calls.repeats, ops.call), NONE)
    found = find_rows(_op_keys(ops, ops.call), _op_keys(ops, original))
    return np.where(original >= 0, found, NONE)


def _op_keys(ops: StepOps, call: Rows) -> Column:
    """Returns a key for each op that combines its call, its name, and its number among ops of that name."""
    highest = int(ops.nth.max(initial=0)) + 1
    return np.where(call >= 0, (call * len(ops.names) + ops.name) * highest + ops.nth, NONE)


def tabulate_leaves(leaves: Leaves, measured: MeasuredValues) -> NodeTable:
    size = len(leaves.tensor)
    roots, root = _code_roots(leaves.root)
    names = tuple(dict.fromkeys(leaves.name))
    codes = {name: code for code, name in enumerate(names)}
    sited = measured.take(~measured.is_op_output & (measured.call_id < 0)).first_at_sites()
    return replace(
        blank_table(NONE, BEFORE, leaves.layer),
        kind=leaves.kind,
        name=np.array([codes[name] for name in leaves.name], np.int64),
        root=root,
        roots=roots,
        tensor=leaves.tensor,
        start_ns=leaves.time_ns,
        numbers=replace(empty_numbers(size), **sited.sum_at(find_rows(leaves.site, sited.site), size)),
        names=names,
    )


def tabulate_outputs(flow: OpFlow, ops: StepOps, tree: LayerTree) -> NodeTable:
    """Returns a table with a node for each output of a call, with its name."""
    call, tensor, slot = flow.returned
    roots, root = _code_roots(_roots_of(call, ops))
    return replace(
        blank_table(_OUTPUT, AFTER, outermost_phase(tree)[tree.of_call[call]]),
        name=slot,
        nth=np.maximum(ops.calls.nth[call], 0).astype(np.int32),
        root=root,
        roots=roots,
        phase=ops.calls.phase[call],
        tensor=tensor,
        start_ns=ends_of(ops.calls)[call],
        names=flow.slots,
    )


def _roots_of(call: Rows, ops: StepOps) -> list[str]:
    """Returns the name of each call's root if the recording has several; "" otherwise."""
    places = ops.calls.places
    if len({place.root for place in places} - {None}) < 2:
        return [""] * len(call)
    return [places[where].root or "" if where >= 0 else "" for where in ops.calls.where[call].tolist()]


def _code_roots(roots: Sequence[str]) -> tuple[tuple[str, ...], Column]:
    """Returns the distinct roots, and the code of each root; "" has the code NONE."""
    distinct = tuple(dict.fromkeys(root for root in roots if root))
    codes = {root: code for code, root in enumerate(distinct)}
    return distinct, np.array([codes.get(root, NONE) for root in roots], np.int64)


def ends_of(calls: Calls) -> Column:
    """Returns the end of each call, or its beginning if the end is not known."""
    return np.asarray(calls.start_ns + calls.duration_ns + calls.overhead_ns)


def join_tables(parts: Sequence[NodeTable]) -> NodeTable:
    """Returns several tables as one. Only the first may have entries in `repeats` and `args`."""
    starts = np.cumsum([0, *(len(part.names) for part in parts)])
    name = np.concatenate([table.name + start for table, start in zip(parts, starts, strict=False)])
    roots = tuple(sorted({root for part in parts for root in part.roots}))
    root = [np.array([*map(roots.index, part.roots), NONE], np.int64)[part.root] for part in parts]
    return NodeTable(
        **join_columns(parts) | {"name": name, "root": np.concatenate(root)},
        roots=roots,
        numbers=Numbers(**join_columns([part.numbers for part in parts])),
        names=tuple(name for part in parts for name in part.names),
        argument_texts=parts[0].argument_texts,
    )
