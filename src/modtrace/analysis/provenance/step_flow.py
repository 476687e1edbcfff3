"""The ops of one step with the tensors that they read and return, and what was measured of these."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...recording.protocols import RecordingData
from ...recording.role import OP_OUTPUT
from ..graph.columns import Tensors
from ..graph.reads import read_uses
from ..step.calls import RowFinder, column_of
from ..step.ops import StepOps, read_step_ops
from ..values.nonfinite import read_first_index

#: The columns of `values` that `Counts` are made of.
_COUNTED = ("nan_count", "inf_count", "numel", "min", "max", "dtype", "count", "first_index", "shape")


class Counts(NamedTuple):
    """What was measured of one tensor."""

    nan: int
    inf: int
    numel: int
    min: float | None
    max: float | None
    dtype: str
    first_index: tuple[int, ...] | None = None  # of the first NaN or infinite element


class MemoryRegion(NamedTuple):
    """The memory of a tensor, in elements: those from `start` up to `stop`, all of them if it is dense."""

    storage: int | None
    start: int
    stop: int
    is_dense: bool


@dataclass(frozen=True, kw_only=True)
class StepFlow:
    """Numbers of ops are rows of `ops`, numbers of tensors rows of `tensors`."""

    ops: StepOps
    tensors: Tensors
    regions: list[MemoryRegion]
    versions: list[int]  # 0 where none is known
    args: list[str]  # the template of each op's arguments
    forward_op: list[
        int | None
    ]  # ids, not numbers: of a backward op the forward op, which may be of an earlier step
    order: list[int]  # the ops in the order in which they began
    reads: Mapping[int, list[tuple[str, int]]]  # of each op: slot and tensor
    returns: Mapping[int, list[tuple[str, int]]]
    measured: Mapping[tuple[int, str], Counts]  # by op and slot of its output
    #: Of what no op of the step had made, by its site and the op that read it first; None for a site of one tensor.
    leaves: Mapping[tuple[int, int | None], Counts]
    #: Of tensors that an op of an earlier step made, as a mask that is kept: what was measured of them then.
    earlier: Mapping[int, Counts]
    #: Of those, tensors of steps that are not in the recording, of which `keep_last` has held the last: nothing was
    #: measured of them that is still there.
    dropped: frozenset[int]
    reads_dropped: frozenset[int]  # ops that read such a tensor whose row is not in the recording either
    first_readers: Mapping[int, int]  # of each tensor that was read: the op that read it first
    roles: Mapping[int, str]  # of each site

    def counts_of_leaf(self, tensor: int) -> Counts | None:
        """Returns what was measured of a tensor that no op of the step made; None if nothing was."""
        site: int | None = self.tensors.table["site_id"][tensor].as_py()
        if site is not None:
            for reader in (self.first_readers.get(tensor), None):
                if (site, reader) in self.leaves:
                    return self.leaves[site, reader]
        return self.earlier.get(tensor)

    def shown_by(self, tensor: int) -> int | None:
        """Returns what a view shows, a tensor that its op read; None if the op wrote to it, or made it anew."""
        storage = self.regions[tensor].storage
        for _, other in self.reads.get(int(self.tensors.producer[tensor]), ()):
            is_shared = storage is not None and self.regions[other].storage == storage
            if is_shared and self.versions[tensor] <= self.versions[other]:
                return other
        return None


def read_step_flow(data: RecordingData, step: int) -> StepFlow:
    """Returns the ops of a step, which has some, and all that is known of what they read and return."""
    ops = read_step_ops(data, step=step)
    reads, tensors = read_uses(data, ops.op_id, np.empty(0, np.int64))
    rows = data.table("ops")
    rows = rows.take(np.flatnonzero(column_of(rows, "step") == step))
    read_by: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for op, tensor, slot in zip(reads.op.tolist(), reads.tensor.tolist(), reads.slot.tolist(), strict=True):
        read_by[op].append((reads.slots[slot], tensor))
    returned_by: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for tensor, (op, slot) in enumerate(zip(tensors.producer.tolist(), tensors.slot.tolist(), strict=True)):
        if op >= 0:
            returned_by[op].append((tensors.slots[slot], tensor))
    measured, leaves = _read_values(data, step, ops)
    order = np.lexsort((ops.op_id, ops.start_ns)).tolist()
    return StepFlow(
        ops=ops,
        tensors=tensors,
        regions=_find_regions(tensors),
        versions=[version or 0 for version in tensors.table["version"].to_pylist()],
        args=rows["args"].to_pylist(),
        forward_op=rows["forward_op_id"].to_pylist(),
        order=order,
        reads=read_by,
        returns=returned_by,
        measured=measured,
        leaves=leaves,
        first_readers={tensor: op for op in reversed(order) for _, tensor in read_by.get(op, ())},
        dropped=_find_dropped(data, tensors),
        reads_dropped=_find_readers_of_dropped(data, ops),
        earlier=_read_earlier(data, tensors, before=min(ops.op_id.tolist(), default=0)),
        roles={
            row["site_id"]: row["role"] for row in data.table("sites").select(["site_id", "role"]).to_pylist()
        },
    )


def _read_values(
    data: RecordingData, step: int, ops: StepOps
) -> tuple[dict[tuple[int, str], Counts], dict[tuple[int, int | None], Counts]]:
    values = data.table("values")
    values = values.take(np.flatnonzero(column_of(values, "step") == step))
    sites = {row["site_id"]: row for row in data.table("sites").to_pylist()}
    row_of = {op: row for row, op in enumerate(ops.op_id.tolist())}
    measured: dict[tuple[int, str], Counts] = {}
    leaves: dict[tuple[int, int | None], Counts] = {}
    for row in values.select(["site_id", "op_id", *_COUNTED]).to_pylist():
        site: Mapping[str, Any] = sites.get(row["site_id"], {})
        if row["count"] is None:
            continue
        if site.get("role") == OP_OUTPUT:
            measured[row_of.get(row["op_id"], -1), site["slot"]] = _to_counts(row)
        else:
            leaves.setdefault((row["site_id"], row_of.get(row["op_id"])), _to_counts(row))
    return measured, leaves


def _read_earlier(data: RecordingData, tensors: Tensors, *, before: int) -> dict[int, Counts]:
    """Returns what was last measured of the memory of tensors that no op of the step made, by ops before `before`."""
    of_tensor = {
        tensor: storage
        for tensor, storage in enumerate(tensors.table["storage"].to_pylist())
        if storage is not None and tensors.producer[tensor] < 0
    }
    every = data.table("tensors").select(["producer_op", "slot", "storage"])
    every = every.take(np.flatnonzero(np.isin(column_of(every, "storage"), [*set(of_tensor.values())])))
    rows = (
        row for row in every.to_pylist() if row["producer_op"] is not None and row["producer_op"] < before
    )
    made = {(row["producer_op"], row["slot"]): row["storage"] for row in rows}
    of_storage = {
        made[key]: counts for key, counts in _read_outputs(data, [op for op, _ in made]) if key in made
    }
    return {tensor: of_storage[storage] for tensor, storage in of_tensor.items() if storage in of_storage}


def _find_dropped(data: RecordingData, tensors: Tensors) -> frozenset[int]:
    every = data.table("tensors")
    made_by = column_of(every, "producer_op")
    is_dropped = (made_by >= 0) & ~np.isin(made_by, column_of(data.table("ops"), "op_id"))
    dropped = column_of(every, "tensor_id")[is_dropped]
    return frozenset(np.flatnonzero(np.isin(tensors.tensor_id, dropped)).tolist())


def _find_readers_of_dropped(data: RecordingData, ops: StepOps) -> frozenset[int]:
    uses = data.table("uses")
    op = RowFinder(ops.op_id)(column_of(uses, "consumer_op"))
    is_there = np.isin(column_of(uses, "tensor_id"), column_of(data.table("tensors"), "tensor_id"))
    return frozenset(op[(op >= 0) & ~is_there].tolist())


def _read_outputs(data: RecordingData, op_ids: list[int]) -> Iterator[tuple[tuple[int, str], Counts]]:
    """Yields the ids of ops and the slots of their outputs with what was measured of these, in the order of ops."""
    values = data.table("values")
    values = values.take(np.flatnonzero(np.isin(column_of(values, "op_id"), op_ids)))
    sites = data.table("sites").select(["site_id", "role", "slot"]).to_pylist()
    slots = {row["site_id"]: row["slot"] for row in sites if row["role"] == OP_OUTPUT}
    rows = values.select(["site_id", "op_id", *_COUNTED]).to_pylist()
    for row in sorted(rows, key=lambda each: int(each["op_id"])):
        if row["site_id"] in slots and row["count"] is not None:
            yield (row["op_id"], slots[row["site_id"]]), _to_counts(row)


def _to_counts(row: Mapping[str, Any]) -> Counts:
    return Counts(
        row["nan_count"],
        row["inf_count"],
        row["numel"],
        row["min"],
        row["max"],
        row["dtype"],
        read_first_index(row),
    )


def _find_regions(tensors: Tensors) -> list[MemoryRegion]:
    table = tensors.table.select(["storage", "offset", "shape", "stride"]).to_pylist()
    return [_to_region(row["storage"], row["offset"], row["shape"], row["stride"]) for row in table]


def _to_region(storage: int | None, offset: int, shape: list[int], stride: list[int]) -> MemoryRegion:
    if storage is None:  # a sparse tensor has no strides
        return MemoryRegion(None, 0, 0, True)
    numel = int(np.prod(shape, dtype=np.int64))
    if not numel:
        return MemoryRegion(storage, offset, offset, True)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return MemoryRegion(storage, offset, offset + extent, extent == numel)
