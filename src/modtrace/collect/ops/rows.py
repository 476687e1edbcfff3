"""Turns the ops of ended steps into the columns of the tables `ops`, `tensors` and `uses`."""

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...recording.arrow.arrays import from_codes, from_encoded, from_numpy, null_below_zero
from ...recording.role import BUFFER, LEAF, PARAMETER
from ..log.nesting import Ints
from ..steps.call_rows import count_before
from ..steps.step import Step
from ..tensor_ids.tensor_ids import (
    GEOMETRY,
    NO_TENSOR,
    OFFSET,
    STORAGE,
    VERSION,
)
from ..values.sites import SiteIds
from .alive import alive_columns
from .batches import OpBatch
from .boundary import AtRoot
from .calls import OpCalls
from .charges import Charges, charge_ops
from .flop_column import OpFlops
from .joined import JoinedOps
from .mode import ACCUMULATES, ADDING, END_NS, FLAGS, NOT_ADDING, OP, RAISED, SCHEMA, START_NS, OpMode
from .nodes import NodesOfOps, OpNodes
from .tensor_columns import GeometryFacts, tensor_columns

Columns = dict[str, Any]

_WHERE = [STORAGE, OFFSET, GEOMETRY]


class OpRows(NamedTuple):
    """The rows of the ops of ended steps, and what other tables need of them."""

    tables: dict[str, Columns]
    events: Ints
    calls: OpCalls
    nth: npt.NDArray[np.int32]
    flops: Ints  # UNKNOWN: not known
    names: Sequence[str]  # by number of schema
    charges: Charges


class _SchemaFacts(NamedTuple):
    """Properties of ops, by number of schema."""

    writes: npt.NDArray[np.bool_]
    is_view: npt.NDArray[np.bool_]
    is_differentiable: npt.NDArray[np.bool_]


class OpTables:
    """Makes rows of ops, and remembers what they have in common from step to step."""

    def __init__(self, mode: OpMode, nodes: OpNodes) -> None:
        self._mode = mode
        self._nodes = nodes
        self._flops = OpFlops()
        #: Sites of parameters and buffers, by what they show of which storage.
        self._kept: dict[tuple[int, ...], int] = {}
        self._schemas = _SchemaFacts(*(np.zeros(0, bool) for _ in range(3)))
        self._geometries = GeometryFacts()

    def copy(self) -> "OpTables":
        """Returns tables that go on from here, and leave these as they are."""
        other = copy(self)
        other._nodes, other._kept = self._nodes.copy(), dict(self._kept)
        return other

    def of(self, steps: Sequence[Step], optimizer_ids: Sequence[int], sites: SiteIds) -> "OpRows | None":
        """Returns the rows of ended steps; None if they have no ops.

        Args:
            optimizer_ids: the call ids of the optimizer steps in these steps, in order.
        """
        batches: list[OpBatch] = [batch for step in steps for batch in step.ops]
        if not batches:
            return None
        found = JoinedOps(batches)
        self._learn()
        calls = OpCalls(found, steps, optimizer_ids)
        nodes = self._find_nodes(found)
        saved = [saved_memory for step in steps for saved_memory in step.saved]
        charges = charge_ops(found, nodes, calls, saved)
        flops = self._flops.of(found, self._mode.schemas, self._mode.ids.geometries)
        counts = [sum(map(len, step.ops)) for step in steps]
        step = np.repeat(np.array([step.number for step in steps], np.int32), counts)
        tables = {
            "ops": {
                **self._op_columns(found, step, calls, nodes, flops),
                "saved_bytes": null_below_zero(charges.of_op),
            },
            "uses": _use_columns(found, _at_roots(steps)),
            "tensors": tensor_columns(
                found, self._mode.ids, self._geometries, self._leaf_sites(found, sites)
            ),
        }
        alive = [
            (step.number or 0, batch.alive) for step in steps for batch in step.ops if batch.alive is not None
        ]
        if alive:
            tables["alive"] = alive_columns(alive)
        names = [schema.name for schema in self._mode.schemas]
        return OpRows(tables, found.events, calls, tables["ops"]["nth"], flops, names, charges)

    def _leaf_sites(self, found: JoinedOps, sites: SiteIds) -> npt.NDArray[np.int32]:
        """Returns the site of each tensor whose memory no op has made; -1 for other tensors.

        A parameter that an optimizer has written to keeps its site.
        """
        site = np.full(len(found.tensors), -1, np.int32)
        leaves = [leaf for batch in found.batches for leaf in batch.leaves]
        owners = [-1 if leaf.owner is None else leaf.owner.module_id for leaf in leaves]
        names = sites.names((leaf.role, leaf.slot, None, -1) for leaf in leaves)
        ids = sites.get(owners, [-1] * len(leaves), names.tolist()).tolist()
        leaf_ids = np.array([leaf.tensor_id for leaf in leaves], np.int64)
        rows = np.searchsorted(found.tensor_ids, leaf_ids)
        is_here = np.append(found.tensor_ids, NO_TENSOR)[rows] == leaf_ids
        rows, here = rows[is_here], np.flatnonzero(is_here).tolist()
        for row, at, where in zip(rows.tolist(), here, _wheres(found, rows), strict=True):
            role = leaves[at].role
            site[row] = self._kept.get(where, ids[at]) if role == LEAF else ids[at]
            if role in (PARAMETER, BUFFER):
                self._kept[where] = ids[at]
        is_view = found.is_output.copy()
        is_view[is_view] = self._schemas.is_view[found.events[found.op_of_tensor[is_view], SCHEMA]]
        is_written = (site < 0) & ~is_view & (found.tensors[:, VERSION] > 0)
        kept = [storage for storage, *_ in self._kept]
        written = np.flatnonzero(is_written)
        written = written[np.isin(found.tensors[written, STORAGE], kept)]  # few: a look-up takes 1 us
        site[written] = [self._kept.get(where, -1) for where in _wheres(found, written)]
        return site

    def _learn(self) -> None:
        """Caches properties of the schemas and geometries that are new."""
        schemas = self._mode.schemas
        if len(schemas) > len(self._schemas.writes):
            facts = ([getattr(schema, name) for schema in schemas] for name in _SchemaFacts._fields)
            self._schemas = _SchemaFacts(*(np.array(fact, bool) for fact in facts))
        self._geometries = self._geometries.with_new(self._mode.ids.geometries)

    def _are_differentiable(self, found: JoinedOps) -> npt.NDArray[np.bool_]:
        """Returns whether each op may make an autograd node.

        Such an op returns floating-point numbers, or writes to an argument.
        """
        schema = found.events[:, SCHEMA]
        has_numbers = self._geometries.has_numbers[found.tensors[:, GEOMETRY]]
        returns = np.zeros(len(schema), bool)
        returns[found.op_of_tensor[found.is_output & has_numbers]] = True
        are: npt.NDArray[np.bool_] = self._schemas.is_differentiable[schema] & (
            returns | self._schemas.writes[schema]
        )
        return are

    def _written_bytes(self, found: JoinedOps) -> Ints:
        """Returns the bytes written by ops that return nothing (`_foreach_add_`)."""
        sizes = self._geometries.size_bytes
        written = np.zeros(len(found.events), np.int64)
        writes = self._schemas.writes[found.events[:, SCHEMA]]
        returns = np.zeros(len(found.events), bool)
        returns[found.op_of_tensor[found.is_output]] = True
        ops = np.flatnonzero(writes & ~returns)
        for op, (arguments, given, _) in zip(ops.tolist(), found.keys_of(ops), strict=True):
            written[op] = sizes[np.frombuffer(given, np.int64)[arguments.shown.is_written]].sum()
        return written

    def _find_nodes(self, found: JoinedOps) -> NodesOfOps:
        schema, known = found.events[:, SCHEMA], self._schemas

        def writes_into_view(op: int) -> bool:
            return (
                op >= 0
                and bool(known.writes[schema[op]])
                and found.is_view(found.first_use(op), known.is_view)
            )

        return self._nodes.of(found, known.writes, self._are_differentiable(found), writes_into_view)

    def _op_columns(
        self,
        found: JoinedOps,
        step: npt.NDArray[np.int32],
        calls: OpCalls,
        nodes: NodesOfOps,
        flops: Ints,
    ) -> Columns:
        events, schemas, known = found.events, self._mode.schemas, self._schemas
        sizes = self._geometries.size_bytes
        names = [schema.name for schema in schemas]
        schema = events[:, SCHEMA]
        is_view = known.is_view[schema] & ~found.has_allocated()
        outside = -1 - (step.astype(np.int64) * 8 + calls.phase + 1)
        # Equal for ops of one call or, outside of calls, of one phase of one step.
        run_key = np.where(calls.call_id >= 0, calls.call_id, outside)
        return {
            "op_id": events[:, OP],
            "step": step,
            "call_id": null_below_zero(calls.call_id),
            "phase": np.ma.masked_array(calls.phase, calls.phase < 0),
            "name": from_codes(schema, names),
            "nth": count_before(run_key, schema),
            "args": from_codes(found.argument, [shown.template for shown in found.shown]),
            "sequence_nr": null_below_zero(nodes.node),
            "sequence_thread": np.ma.masked_array(nodes.thread, nodes.node < 0),
            "forward_op_id": null_below_zero(nodes.forward_op),
            "thread": calls.thread,
            "is_view": is_view,
            "start_ns": events[:, START_NS],
            "end_ns": events[:, END_NS],
            "flops": null_below_zero(flops),
            "bytes_read": np.where(is_view, 0, found.sum_of_uses(sizes)),
            "bytes_written": np.where(is_view, 0, found.sum_of_outputs(sizes) + self._written_bytes(found)),
            "raised": (events[:, FLAGS] & RAISED) != 0,
            **_origin_columns(found, nodes.forward_op),
            "accumulation": _accumulation(found, names),
        }


def _wheres(found: JoinedOps, rows: Any) -> list[tuple[int, ...]]:
    """Returns what these tensors show of which storage."""
    return [*map(tuple, found.tensors[rows][:, _WHERE].tolist())]


def _origin_columns(found: JoinedOps, forward_op: Ints) -> Columns:
    """Returns the columns of the Python source of ops, if it was recorded. A backward op has that of its forward op."""
    columns: Columns = {}
    for name, column in (("sources", "source"), ("python_names", "python_name")):
        known: dict[int, str] = {}
        for batch in found.batches:
            known.update(getattr(batch, name))
        if known:
            ops = zip(found.events[:, OP].tolist(), forward_op.tolist(), strict=True)
            columns[column] = [known.get(op, known.get(forward)) for op, forward in ops]
    return columns


def _use_columns(found: JoinedOps, at_roots: Sequence[AtRoot]) -> Columns:
    """Returns the uses of tensors by ops, and then those by outermost calls as arguments and outputs."""
    ops = np.repeat(found.events[:, OP], found.use_counts)
    calls = np.array([at_root.segment.first_id for at_root in at_roots], np.int64)
    of_roots = [at_root.slot.encode() for at_root in at_roots]
    lengths = [
        *(shown.lengths for shown in found.shown),
        np.array([len(slot) for slot in of_roots], np.int64),
    ]
    slots = from_encoded(
        np.concatenate(lengths), b"".join([*(shown.slots for shown in found.shown), *of_roots])
    )
    ends = np.cumsum([len(shown.lengths) for shown in found.shown], dtype=np.int64)[found.argument]
    behind = found.use_ends - ends  # how much further a use is among all uses than its slot among all slots
    at = np.append(
        np.arange(len(ops)) - np.repeat(behind, found.use_counts),
        np.arange(len(slots) - len(calls), len(slots)),
    )
    return {
        "consumer_op": null_below_zero(np.concatenate([ops, np.full(len(calls), -1, np.int64)])),
        "consumer_call": null_below_zero(np.concatenate([np.full(len(ops), -1, np.int64), calls])),
        "slot": slots.take(from_numpy(at, pa.int64())),
        "tensor_id": np.append(
            found.used[:, 0], np.array([at_root.tensor_id for at_root in at_roots], np.int64)
        ),
    }


def _at_roots(steps: Sequence[Step]) -> list[AtRoot]:
    """Returns the arguments and outputs of those outermost calls of ended steps whose rows are written."""
    written = {segment for step in steps for segment in step.segments if segment.is_closed}
    found = (at_root for step in steps for batch in step.ops for at_root in batch.at_roots)
    return [at_root for at_root in found if at_root.segment in written]


def _accumulation(found: JoinedOps, names: Sequence[str]) -> Any:
    """Returns whether each op is a sum of gradients by the engine; masked where this is not known."""
    flags = found.events[:, FLAGS]
    is_addition = np.array([name in ("aten.add.Tensor", "aten.add_.Tensor") for name in names], bool)
    accumulates = (flags & ACCUMULATES) != 0
    has_two_tensors = found.use_counts == 2  # a hook of the user's may add a number
    of_tensors = is_addition[found.events[:, SCHEMA]] & has_two_tensors
    adds = ((flags & ADDING) != 0) | (accumulates & of_tensors)
    return np.ma.masked_array(adds, ((flags & (ADDING | NOT_ADDING)) == 0) & ~accumulates)


#: Columns of `ops` that a run has too.
_SHARED = ("op_id", "step", "call_id", "phase", "thread", "start_ns")


def part_runs(rows: OpRows, batches: Iterable[OpBatch]) -> dict[str, Columns]:
    """Returns the tables of ops with the runs of compiled code in a table of their own."""
    runs = {run.op: run for batch in batches for run in batch.compiled_runs}
    if not runs:
        return rows.tables
    ops = rows.tables["ops"]
    is_run = np.isin(ops["op_id"], np.array([*runs], np.int64))
    found = [runs[op] for op in ops["op_id"][is_run].tolist()]
    return {
        **rows.tables,
        "ops": {name: _choose(column, ~is_run) for name, column in ops.items()},
        "compiled_runs": {
            **{name: _choose(ops[name], is_run) for name in _SHARED},
            "end_ns": [run.end_ns for run in found],
            "compile_id": [run.graph.compile_id for run in found],
            "given": [run.given for run in found],
            "returned": [run.returned for run in found],
        },
    }


def _choose(column: Any, chosen: npt.NDArray[np.bool_]) -> Any:
    if isinstance(column, list):
        return [*compress(column, chosen)]
    return column.filter(from_numpy(chosen, pa.bool_())) if isinstance(column, pa.Array) else column[chosen]
