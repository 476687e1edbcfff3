"""Reads the rows of one step of a recording; batches without rows of the step are skipped."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.meta import RunMeta
from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ...recording.role import LOSS
from ...recording.statistics.moments import sites_of_roles
from .calls import Calls, outermost_calls
from .columns import Bools, Column, Rows, column_of, find_rows, ranges
from .op_flow import OpFlow, read_op_flow
from .op_rules import PLAIN
from .ops import StepOps, bare_name, read_step_ops
from .sites import Site, read_sites
from .tensors import Tensors

#: The largest number of batches that stay sorted by a column, enough for those of one step and the next.
_MOST_SORTED = 64


class IndexedTables:
    """Finds rows of a recording by their ids, and the rows of a step, with an index over batches."""

    def __init__(self, data: RecordingData) -> None:
        self.data = data
        self._batches_of = cache(lambda name: _Batches(data.table(name)))
        self._sites_of = cache(self._find_sites)

    @cached_property
    def sites(self) -> dict[int, Site]:
        """The sites of the recording by their ids."""
        return read_sites(self.data)

    @cached_property
    def has_lines(self) -> bool:
        """True if source lines of the program were recorded for ops."""
        lines = self.data.table("ops")["source"]
        return bool(lines.null_count < len(lines))

    def sites_of(self, *roles: str) -> Column:
        """Returns the ids of the sites at which tensors of some roles are seen."""
        return self._sites_of(roles)

    def _find_sites(self, roles: tuple[str, ...]) -> Column:
        return sites_of_roles(self.data.table("sites"), roles).astype(np.int64)

    def find(self, name: str, columns: Sequence[str] | None = None, **wanted: Column) -> pa.Table:
        """Returns the rows of a table in which one of the given columns holds one of the given ids, in table order.

        Args:
            name: the name of the table.
            columns: the columns to read; None for all.
            **wanted: for each column to search, the ids to look for; -1 finds nothing.
        """
        table = self._batches_of(name)
        rows = [table.find(column, np.unique(ids[ids >= 0])) for column, ids in wanted.items()]
        ordered = np.sort(np.concatenate(rows))  # np.unique takes ten times as long
        return table.take(ordered if len(rows) == 1 else ordered[np.diff(ordered, prepend=-1) > 0], columns)

    def find_op(self, op_id: int) -> Mapping[str, Any] | None:
        """Returns the row of an op; None if it is not in the recording."""
        rows: list[Mapping[str, Any]] = self.find("ops", op_id=np.array([op_id])).to_pylist()
        return rows[0] if rows else None

    def find_writer(self, tensor_id: int) -> Mapping[str, Any] | None:
        """Returns the row of the op that wrote a tensor; None if the recording has no such op."""
        written_by = self.find("tensors", ["producer_op"], tensor_id=np.array([tensor_id]))
        rows: list[Mapping[str, Any]] = self.find(
            "ops", op_id=column_of(written_by, "producer_op")
        ).to_pylist()
        return rows[0] if rows else None


class MemoryRegion(NamedTuple):
    """The memory that a tensor spans, in elements from `start` up to `stop`; a dense tensor uses all of it."""

    storage: int | None
    start: int
    stop: int
    is_dense: bool


class Argument(NamedTuple):
    """An argument of a call, with its position among the arguments, such as `[0]`."""

    call: int
    slot: str


class OneStep:
    """The rows of one step, with the calls and tensors of earlier steps to which they refer.

    Ops are numbered by their rows in `ops`, tensors by their rows in `tensors`. Both exist only if ops were recorded.
    """

    def __init__(self, run: IndexedTables, number: int) -> None:
        self.run = run
        self.number = number
        self._tables: dict[str, pa.Table] = {}

    @property
    def meta(self) -> RunMeta:
        """The metadata of the recording."""
        return self.run.data.meta

    def tensor(self, blob: str) -> RawTensor:
        """Returns the whole tensor that is stored under the name `blob`."""
        return self.run.data.tensor(blob)

    def table(self, name: str) -> pa.Table:
        """Returns the rows of a table that belong to the step."""
        if name not in self._tables:
            self._tables[name] = self._read(name)
        return self._tables[name]

    def _read(self, name: str) -> pa.Table:
        find, step = self.run.find, np.array([self.number])
        if name == "calls":
            return find("calls", step=np.union1d(step, self._find_steps_referred_to()))
        if name == "uses":
            returned = outermost_calls(self.table("calls"))
            return find("uses", consumer_op=column_of(self.table("ops"), "op_id"), consumer_call=returned)
        if name == "tensors":
            read = column_of(self.table("uses"), "tensor_id")
            return find("tensors", tensor_id=read, producer_op=column_of(self.table("ops"), "op_id"))
        return find(name, step=step) if name in ("steps", "ops", "values") else self.run.data.table(name)

    def _find_steps_referred_to(self) -> Column:
        """Returns the numbers of the steps to which backwards, recomputes, ops and values of this step refer."""
        calls = self.run.find("calls", ["forward_call_id", "recompute_of"], step=np.array([self.number]))
        referred = [column_of(calls, name) for name in calls.column_names]
        referred += [column_of(self.table(name), "call_id") for name in ("ops", "values")]
        found = self.run.find("calls", ["step"], call_id=np.unique(np.concatenate(referred)))
        return column_of(found, "step")

    def is_of(self, *roles: str) -> Bools:
        """Returns a mask of the rows of `values` that have one of these roles."""
        return np.isin(column_of(self.table("values"), "site_id"), self.run.sites_of(*roles))

    def find_site(self, row: int) -> Site | None:
        """Returns the site of a row of `values`."""
        return self.run.sites.get(self.table("values")["site_id"][row].as_py())

    @cached_property
    def ops(self) -> StepOps:
        """The ops of the step, each with its call and its place in the module tree."""
        return read_step_ops(self, step=self.number, inside=True)

    @property
    def calls(self) -> Calls:
        """The calls of the step, with the earlier calls to which they refer."""
        return self.ops.calls

    @cached_property
    def _outermost(self) -> Rows:
        calls = self.calls
        return np.flatnonzero((calls.parent < 0) & (calls.phase == PHASES.index(FORWARD)) & calls.in_step)

    @cached_property
    def flow(self) -> OpFlow:
        """The tensors that the ops read and return, and that the outermost forward calls are given and return."""
        outermost = self.calls.call_id[self._outermost]
        return read_op_flow(self, op_id=self.ops.op_id, call_id=outermost)

    @property
    def tensors(self) -> Tensors:
        """The tensors that ops read or return."""
        return self.flow.tensors

    @property
    def reads(self) -> Mapping[int, list[tuple[str, int]]]:
        """For each op, the slot and the tensor of each of its reads."""
        return self.flow.reads_by_op

    @property
    def returns(self) -> Mapping[int, list[tuple[str, int]]]:
        """For each op, the slot and the tensor of each of its outputs."""
        return self.flow.returns_by_op

    @cached_property
    def readers(self) -> Mapping[int, list[int]]:
        """For each tensor, the ops that read it."""
        readers: dict[int, list[int]] = defaultdict(list)
        for op, reads in self.reads.items():
            for _, tensor in reads:
                readers[tensor].append(op)
        return readers

    @cached_property
    def order(self) -> list[int]:
        """The rows of the ops in the order in which they began."""
        order: list[int] = np.lexsort((self.ops.op_id, self.ops.start_ns)).tolist()
        return order

    @cached_property
    def follows(self) -> Column:
        """For each op, the phase of the last op with one before it; -1 for none."""
        order = np.array(self.order, np.int64)
        phase = self.ops.phase[order]
        last = np.maximum.accumulate(np.where(phase >= 0, np.arange(len(order)), -1))
        follows = np.full(len(order), -1)
        follows[order[1:]] = np.append(phase, -1)[last[:-1]]
        return follows

    @cached_property
    def backwards_began(self) -> Column:
        """For each backward, the `order` of its first loss, which is measured as the backward begins."""
        values = self.table("values")
        order, rows = column_of(values, "order"), np.flatnonzero(self.is_of(LOSS))
        rows = rows[np.argsort(order[rows], kind="stable")]
        slots = [self.run.sites[site].slot for site in column_of(values, "site_id")[rows].tolist()]
        # The losses of one backward have ascending slots: [0], [1].
        is_first = [number == 0 or slot <= slots[number - 1] for number, slot in enumerate(slots)]
        first: Column = order[rows[is_first]]
        return first

    @cached_property
    def op_args(self) -> list[str]:
        """The template of each op's arguments."""
        return list(self.table("ops")["args"].to_pylist())

    @cached_property
    def forward_op(self) -> list[int | None]:
        """For each backward op, the id (not the row) of its forward op, which may be of an earlier step."""
        return list(self.table("ops")["forward_op_id"].to_pylist())

    @cached_property
    def is_view(self) -> list[bool]:
        """For each op, whether it returned a view of a tensor that it read."""
        return list(self.table("ops")["is_view"].to_pylist())

    @cached_property
    def bare_names(self) -> list[str]:
        """The name of each op without namespace and overload."""
        of_code = [bare_name(name) for name in self.ops.names]
        return [of_code[code] for code in self.ops.name.tolist()]

    @cached_property
    def regions(self) -> list[MemoryRegion]:
        """The memory region of each tensor."""
        columns = (self.tensors.table[name].to_pylist() for name in ("storage", "offset", "shape", "stride"))
        return [_to_region(*values) for values in zip(*columns, strict=True)]

    @cached_property
    def versions(self) -> list[int]:
        """The version of each tensor's memory; 0 where none is known."""
        return [version or 0 for version in self.tensors.table["version"].to_pylist()]

    @cached_property
    def sites(self) -> list[Site | None]:
        """The site of each tensor that no op made, or that is a parameter or buffer."""
        return [self.run.sites.get(number) for number in self.tensors.site_id.tolist()]

    @cached_property
    def is_internal(self) -> list[bool]:
        """For each tensor, whether only the backward of its own op reads it; see `OpFlow.find_internal`."""
        forward = np.array([-1 if op is None else op for op in self.forward_op], np.int64)
        internal: list[bool] = self.flow.find_internal(find_rows(self.ops.op_id, forward)).tolist()
        return internal

    @cached_property
    def returned(self) -> frozenset[int]:
        """The tensors that the outermost forward calls returned."""
        return frozenset(self.flow.returned.tensor.tolist())

    @cached_property
    def given(self) -> Mapping[int, Argument]:
        """The tensors that the outermost forward calls were given, each with the first argument that it was."""
        flow, given = self.flow, self.flow.given
        columns = self._outermost[given.call], given.tensor, given.slot
        arguments: dict[int, Argument] = {}
        for call, tensor, slot in zip(*(column.tolist() for column in columns), strict=True):
            arguments.setdefault(tensor, Argument(call, flow.slots[slot].removeprefix("input")))
        return arguments

    def find_shown(self, tensor: int) -> int | None:
        """Returns the tensor behind a view, if the op that made the view read it and wrote nothing; None otherwise."""
        return self._shown.get(tensor)

    @cached_property
    def _shown(self) -> Mapping[int, int]:
        """For each view, the first tensor in its memory that its op read, and that is not of an older version."""
        shown: dict[int, int] = {}
        for op, returned in self.returns.items():
            newer: dict[int | None, list[tuple[int, int]]] = defaultdict(
                list
            )  # by storage, newer than those before
            for _, read in self.reads.get(op, ()):
                storage, version = self.regions[read].storage, self.versions[read]
                if storage is not None and (not newer[storage] or version > newer[storage][-1][0]):
                    newer[storage].append((version, read))
            for _, tensor in returned:
                reads = newer.get(self.regions[tensor].storage, ())
                first = bisect_left(reads, (self.versions[tensor],))
                if first < len(reads):
                    shown[tensor] = reads[first][1]
        return shown

    def find_leaf(self, tensor: int) -> int | None:
        """Returns the leaf of which a tensor is a view or a copy, through any number of ops; None if an op made it."""
        while (producer := int(self.tensors.producer[tensor])) >= 0:
            reads = self.reads.get(producer, ())
            if not reads or not (self.is_view[producer] or self.bare_names[producer] in PLAIN):
                return None
            tensor = reads[0][1]
        return tensor

    def is_float(self, tensor: int) -> bool:
        """Returns whether a tensor holds real or complex numbers, as far as its dtype is known."""
        dtype = self.tensors.dtypes[tensor]
        return dtype is None or dtype.startswith(("float", "bfloat", "complex"))

    def holds_numbers(self, tensor: int) -> bool:
        """Returns whether a tensor has elements, and a dtype that can hold NaN."""
        return self.is_float(tensor) and 0 not in self.tensors.shapes[tensor]

    def name_op(self, op: int) -> str:
        """Returns the full name of an op: `aten._softmax.default`."""
        return self.ops.names[int(self.ops.name[op])]

    def describe_op(self, op: int) -> str:
        """Returns the name of an op and where it ran: `softmax in blocks.0`."""
        name, place = self.name_op(op).split(".")[1:2], self.calls.name(int(self.ops.where[op]))
        return " ".join([*name, "in", place.name] if place.path is not None else [*name, place.name])

    def locate_op(self, op: int) -> dict[str, Any]:
        """Returns the root, path and call of the module in which an op ran, as fields of an answer."""
        return locate_call(self.calls, int(self.ops.call[op]), int(self.ops.where[op]))


def locate_call(calls: Calls, call: int, where: int) -> dict[str, Any]:
    """Returns `root`, `path` and `call` of a call as fields of an answer; `where` is the index of its place."""
    place = calls.name(where)
    nth = int(calls.nth[calls.origin[call]]) if call >= 0 else -1
    return {"root": place.root, "path": place.path, "call": nth if nth >= 0 else None}


def _to_region(storage: int | None, offset: int, shape: list[int], stride: list[int]) -> MemoryRegion:
    if storage is None:  # a sparse tensor has no strides, and no storage is recorded for it
        return MemoryRegion(None, 0, 1, True)
    numel = math.prod(shape)
    if not numel:
        return MemoryRegion(storage, offset, offset, True)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return MemoryRegion(storage, offset, offset + extent, extent == numel)


class _Batches:
    """Finds and takes rows of a table batch by batch, without reading batches that have none of them."""

    def __init__(self, table: pa.Table) -> None:
        self._empty = table.slice(0, 0)
        self._batches = table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._range = cache(self._find_range)
        self._sorted = lru_cache(maxsize=_MOST_SORTED)(self._sort)

    def find(self, column: str, ids: Column) -> Rows:
        """Returns the rows that hold one of the ids in a column; the ids are sorted."""
        low, high = self._range(column)
        first, end = np.searchsorted(ids, low, "left"), np.searchsorted(ids, high, "right")
        found = [np.empty(0, np.int64)]
        for number in np.flatnonzero(first < end).tolist():
            order, known = self._sorted(column, number)
            wanted = ids[first[number] : end[number]]
            start = np.searchsorted(known, wanted, "left")
            among = ranges(start, np.searchsorted(known, wanted, "right") - start)
            found.append(order[among] + (self._ends[number] - len(known)))
        return np.concatenate(found)

    def take(self, rows: Rows, columns: Sequence[str] | None) -> pa.Table:
        """Returns the given rows, which are sorted, with all columns or some."""
        numbers, firsts = np.unique(np.searchsorted(self._ends, rows, side="right"), return_index=True)
        parts = []
        for number, part in zip(numbers.tolist(), np.split(rows, firsts)[1:], strict=True):
            batch = self._batches[number]
            kept = batch if columns is None else batch.select(columns)
            parts.append(kept.take(from_numpy(part - (self._ends[number] - len(batch)))))
        empty = self._empty if columns is None else self._empty.select(columns)
        return pa.Table.from_batches(parts, empty.schema)

    def _find_range(self, column: str) -> tuple[Column, Column]:
        """Returns the smallest and the largest id in each batch; without ids, the smallest is the larger one."""
        ends = [pc.min_max(batch.column(column)).as_py() for batch in self._batches]
        low = [0 if end["min"] is None else end["min"] for end in ends]
        high = [-1 if end["max"] is None else end["max"] for end in ends]
        return np.array(low, np.int64), np.array(high, np.int64)

    def _sort(self, column: str, number: int) -> tuple[Rows, Column]:
        """Returns the order that sorts the ids of one batch, and the sorted ids; -1 stands for null."""
        ids = to_numpy(self._batches[number].column(column), null=-1).astype(np.int64, copy=False)
        order = np.argsort(ids, kind="stable")
        return order, ids[order]
