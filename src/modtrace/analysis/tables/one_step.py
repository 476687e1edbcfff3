"""Reads the rows of one step of a recording; batches without rows of the step are skipped."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...recording.meta import RunMeta
from ...recording.phase import FORWARD, PHASES
from ...recording.raw_tensor import RawTensor
from ...recording.role import LOSS
from .calls import Calls, outermost_calls
from .columns import (
    Bools,
    Column,
    OnDemand,
    Rows,
    column_of,
    find_rows,
    take,
)
from .indexed_tables import IndexedTables
from .op_flow import OpFlow, read_op_flow
from .op_rules import PLAIN
from .ops import StepOps, bare_name, read_step_ops
from .sites import Site
from .tensors import Tensors


class MemoryRegion(NamedTuple):
    """The memory that a tensor spans, in elements from `start` up to `stop`; a dense tensor uses all of it."""

    storage: int | None
    start: int
    stop: int
    is_dense: bool


#: For each op, slots and the tensors at them.
_Slots = Mapping[int, list[tuple[str, int]]]


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
        found = self.run.find("calls", ["step"], call_id=np.concatenate(referred))
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

    @cached_property
    def reads(self) -> Mapping[int, list[tuple[str, int]]]:
        """For each op, the slot and the tensor of each of its reads."""
        return OnDemand(self.flow.reads_of)

    @cached_property
    def returns(self) -> Mapping[int, list[tuple[str, int]]]:
        """For each op, the slot and the tensor of each of its outputs."""
        return OnDemand(self.flow.returns_of)

    @cached_property
    def order(self) -> Rows:
        """The rows of the ops in the order in which they began."""
        return np.lexsort((self.ops.op_id, self.ops.start_ns))

    @cached_property
    def position(self) -> Rows:
        """The position of each op in `order`."""
        position = np.empty(len(self.order), np.int64)
        position[self.order] = np.arange(len(position))
        return position

    def sort_ops(self, ops: Rows) -> list[int]:
        """Returns the given ops in the order in which they began."""
        ordered: list[int] = ops[np.argsort(self.position[ops], kind="stable")].tolist()
        return ordered

    @cached_property
    def follows(self) -> Column:
        """For each op, the phase of the last op with one before it; -1 for none."""
        order = self.order
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
    def op_args(self) -> Mapping[int, str]:
        """The template of each op's arguments."""
        args = self.table("ops")["args"]
        return OnDemand(lambda op: str(args[op].as_py()))

    @cached_property
    def forward_op(self) -> Column:
        """For each backward op, the id (not the row) of its forward op, maybe of an earlier step; -1 for none."""
        return column_of(self.table("ops"), "forward_op_id")

    @cached_property
    def is_view(self) -> Column:
        """For each op, whether it returned a view of a tensor that it read."""
        return column_of(self.table("ops"), "is_view")

    @cached_property
    def bare_names(self) -> list[str]:
        """The name of each op without namespace and overload."""
        of_code = [bare_name(name) for name in self.ops.names]
        return [of_code[code] for code in self.ops.name.tolist()]

    def are_named(self, names: Collection[str]) -> Bools:
        """Returns a mask of the ops with one of these names, without namespace and overload."""
        return np.array([*(bare_name(name) in names for name in self.ops.names), False])[self.ops.name]

    @cached_property
    def regions(self) -> Mapping[int, MemoryRegion]:
        """The memory region of each tensor."""
        return OnDemand(partial(_find_region, self.tensors))

    @cached_property
    def versions(self) -> Column:
        """The version of each tensor's memory; 0 where none is known."""
        return self.tensors.known_version

    @cached_property
    def sites(self) -> Mapping[int, Site | None]:
        """The site of each tensor that no op made, or that is a parameter or buffer."""
        sites, site_id = self.run.sites, self.tensors.site_id
        return OnDemand(lambda tensor: sites.get(int(site_id[tensor])))

    def find_tensors_of(self, *roles: str) -> list[int]:
        """Returns the tensors whose sites have one of these roles."""
        rows: list[int] = np.flatnonzero(np.isin(self.tensors.site_id, self.run.sites_of(*roles))).tolist()
        return rows

    @cached_property
    def is_internal(self) -> Bools:
        """For each tensor, whether only the backward of its own op reads it; see `OpFlow.find_internal`."""
        return self.flow.find_internal(find_rows(self.ops.op_id, self.forward_op))

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
        """Returns the tensor behind a view, if the op that made the view read it and wrote nothing; None otherwise.

        It is the first tensor in the view's memory that the op read, and that is not of an older version.
        """
        op = int(self.tensors.producer[tensor])
        return None if op < 0 else self._shown[op].get(tensor)

    @cached_property
    def _shown(self) -> Mapping[int, Mapping[int, int]]:
        """For each op, the tensors that its outputs show."""
        return OnDemand(partial(_find_shown, self.tensors, self.reads, self.returns))

    @cached_property
    def shows_first_read(self) -> Bools:
        """A mask of the tensors that show the first tensor which their op read, as nearly all views do."""
        flow, tensors = self.flow, self.tensors
        first = np.append(flow.read, -1)[flow.first_read]
        first[:-1][np.diff(flow.first_read) == 0] = -1
        read = take(first[:-1], tensors.producer)
        is_same = (tensors.storage >= 0) & (tensors.storage == take(tensors.storage, read))
        return np.asarray((read >= 0) & is_same & (take(self.versions, read) >= self.versions))

    def find_leaf(self, tensor: int) -> int | None:
        """Returns the leaf of which a tensor is a view or a copy, through any number of ops; None if an op made it."""
        while (producer := int(self.tensors.producer[tensor])) >= 0:
            reads = self.reads[producer]
            if not reads or not (self.is_view[producer] or self.bare_names[producer] in PLAIN):
                return None
            tensor = reads[0][1]
        return tensor

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


def _find_region(tensors: Tensors, tensor: int) -> MemoryRegion:
    storage, start, stop = (int(column[tensor]) for column in (tensors.storage, *tensors.bounds))
    is_dense = storage < 0 or stop - start == tensors.numel[tensor]
    return MemoryRegion(None if storage < 0 else storage, start, stop, is_dense)


def _find_shown(tensors: Tensors, reads: _Slots, returns: _Slots, op: int) -> Mapping[int, int]:
    storages, versions = tensors.storage, tensors.known_version
    newer: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by storage, newer than those before
    for _, read in reads[op]:
        storage, version = int(storages[read]), int(versions[read])
        if storage >= 0 and (not newer[storage] or version > newer[storage][-1][0]):
            newer[storage].append((version, read))
    shown: dict[int, int] = {}
    for _, tensor in returns[op]:
        read_there = newer.get(int(storages[tensor]), ())
        first = bisect_left(read_there, (int(versions[tensor]),))
        if first < len(read_there):
            shown[tensor] = read_there[first][1]
    return shown


def locate_call(calls: Calls, call: int, where: int) -> dict[str, Any]:
    """Returns `root`, `path` and `call` of a call as fields of an answer; `where` is the index of its place."""
    place = calls.name(where)
    nth = int(calls.nth[calls.origin[call]]) if call >= 0 else -1
    return {"root": place.root, "path": place.path, "call": nth if nth >= 0 else None}
