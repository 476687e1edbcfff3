"""The ops of one step with the tensors that they read and return, whatever was measured of these."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData
from ..graph.parts import forms_of_op
from ..tables.columns import RowFinder, Rows
from ..tables.op_flow import OpFlow, read_op_flow
from ..tables.op_rules import PLAIN
from ..tables.ops import PlacedCalls, StepOps, bare_name, read_step_ops
from ..tables.tensors import Tensors


class MemoryRegion(NamedTuple):
    """The memory of a tensor, in elements: those from `start` up to `stop`, all of them if it is dense."""

    storage: int | None
    start: int
    stop: int
    is_dense: bool


class Argument(NamedTuple):
    """An argument of a call: its place among the arguments, as `[0]`."""

    call: int
    slot: str


@dataclass(frozen=True, kw_only=True)
class StepFlow:
    """Numbers of ops are rows of `ops`, numbers of tensors rows of `tensors`."""

    ops: StepOps
    op_flow: OpFlow
    regions: list[MemoryRegion]
    versions: list[int]  # 0 where none is known
    sites: list[int | None]  # of tensors that no op has made, or that are parameters or buffers
    args: list[str]  # the template of each op's arguments
    #: Ids, not numbers: of a backward op the forward op, which may be of an earlier step.
    forward_op: list[int | None]
    is_view: list[bool]  # of each op: it returned views of what it read
    order: list[int]  # the ops in the order in which they began
    returned: frozenset[int]  # tensors that the outermost forward calls have returned
    given: Mapping[int, Argument]  # tensors that these calls were given, and to which first

    @property
    def tensors(self) -> Tensors:
        """What the ops read and return."""
        return self.op_flow.tensors

    @property
    def reads(self) -> Mapping[int, list[tuple[str, int]]]:
        """The slot and the tensor of each read, by op."""
        return self.op_flow.reads_by_op

    @property
    def returns(self) -> Mapping[int, list[tuple[str, int]]]:
        """The slot and the tensor of each output, by op."""
        return self.op_flow.returns_by_op

    @cached_property
    def is_internal(self) -> list[bool]:
        """Of each tensor: whether only the backward of its own op reads it; see `OpFlow.find_internal`."""
        forward = np.array([-1 if op is None else op for op in self.forward_op], np.int64)
        internal: list[bool] = self.op_flow.find_internal(RowFinder(self.ops.op_id)(forward)).tolist()
        return internal

    @cached_property
    def bare_names(self) -> list[str]:
        """The name of each op without namespace and overload."""
        of_code = [bare_name(name) for name in self.ops.names]
        return [of_code[code] for code in self.ops.name.tolist()]

    @cached_property
    def readers(self) -> Mapping[int, list[int]]:
        """The ops that read each tensor."""
        found: dict[int, list[int]] = defaultdict(list)
        for op, reads in self.reads.items():
            for _, tensor in reads:
                found[tensor].append(op)
        return found

    def shown_by(self, tensor: int) -> int | None:
        """Returns what a view shows, a tensor that its op read; None if the op wrote to it, or made it anew."""
        storage = self.regions[tensor].storage
        for _, other in self.reads.get(int(self.tensors.producer[tensor]), ()):
            is_shared = storage is not None and self.regions[other].storage == storage
            if is_shared and self.versions[tensor] <= self.versions[other]:
                return other
        return None

    def find_leaf(self, tensor: int) -> int | None:
        """Returns the tensor that no op has made of which a tensor is a view or a copy; None if an op made it."""
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
        """Returns whether a tensor has elements that can be NaN."""
        return self.is_float(tensor) and 0 not in self.tensors.shapes[tensor]

    def name_op(self, op: int) -> str:
        """Returns the full name of an op: `aten._softmax.default`."""
        return self.ops.names[int(self.ops.name[op])]

    def describe_op(self, op: int) -> str:
        """Returns what ran where: `softmax in blocks.0`."""
        name, place = forms_of_op(self.name_op(op))[-1], self.ops.placed.name(int(self.ops.where[op]))
        return f"{name} in {place.name}" if place.path is not None else f"{name} {place.name}"


def read_step_flow(data: RecordingData, step: int) -> StepFlow:
    """Returns the ops of a step, which has some, and what they read and return.

    Args:
        data: the rows of the step, see `IndexedTables.of_step`.
        step: its number.
    """
    ops = read_step_ops(data, step=step, inside=True)
    calls = ops.placed.calls
    is_outermost = (calls.parent < 0) & (calls.phase == PHASES.index(FORWARD)) & calls.in_step
    outermost = np.flatnonzero(is_outermost)
    flow = read_op_flow(data, op_id=ops.op_id, call_id=calls.call_id[outermost])
    return StepFlow(
        ops=ops,
        op_flow=flow,
        regions=_find_regions(flow.tensors),
        versions=[version or 0 for version in flow.tensors.table["version"].to_pylist()],
        sites=flow.tensors.table["site_id"].to_pylist(),
        args=data.table("ops")["args"].to_pylist(),
        forward_op=data.table("ops")["forward_op_id"].to_pylist(),
        is_view=data.table("ops")["is_view"].to_pylist(),
        order=np.lexsort((ops.op_id, ops.start_ns)).tolist(),
        returned=frozenset(flow.returned.tensor.tolist()),
        given=_read_given(flow, outermost),
    )


def _read_given(flow: OpFlow, calls: Rows) -> dict[int, Argument]:
    slots = [slot.removeprefix("input") for slot in flow.slots]
    columns = calls[flow.given.call], flow.given.tensor, flow.given.slot
    found: dict[int, Argument] = {}
    for call, tensor, slot in zip(*(column.tolist() for column in columns), strict=True):
        found.setdefault(tensor, Argument(call, slots[slot]))
    return found


def tell_place(placed: PlacedCalls, call: int, where: int) -> dict[str, Any]:
    """Returns the fields `root`, `path` and `call` of what ran in a call, by the index of its place."""
    place = placed.name(where)
    nth = int(placed.column("nth")[placed.origin[call]]) if call >= 0 else -1
    return {"root": place.root, "path": place.path, "call": nth if nth >= 0 else None}


def _find_regions(tensors: Tensors) -> list[MemoryRegion]:
    columns = (tensors.table[name].to_pylist() for name in ("storage", "offset", "shape", "stride"))
    return [_to_region(*each) for each in zip(*columns, strict=True)]


def _to_region(storage: int | None, offset: int, shape: list[int], stride: list[int]) -> MemoryRegion:
    if storage is None:  # a sparse tensor has no strides
        return MemoryRegion(None, 0, 1, True)
    numel = math.prod(shape)
    if not numel:
        return MemoryRegion(storage, offset, offset, True)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return MemoryRegion(storage, offset, offset + extent, extent == numel)
