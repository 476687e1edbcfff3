"""What was measured of the tensors of one step: how many of their elements are NaN or infinite, and their extremes."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...recording.protocols import RecordingData
from ...recording.role import OP_OUTPUT
from ..step.calls import Column, column_of
from ..values.nonfinite import read_first_index
from .step_flow import StepFlow
from .step_tables import StepTables

#: The columns of `values` that are read.
_COLUMNS = (
    "site_id", "op_id", "order", "nan_count", "inf_count", "numel", "min", "max", "dtype", "count", "first_index",
    "shape",
)  # fmt: skip


class Counts(NamedTuple):
    """What was measured of one tensor."""

    nan: int
    inf: int
    numel: int
    min: float | None
    max: float | None
    dtype: str
    first_index: tuple[int, ...] | None = None  # of the first NaN or infinite element
    order: int = 0  # of the measurement within its step


class StepCounts:
    """What was measured of the tensors of a step; numbers of ops and tensors are those of its `StepFlow`."""

    def __init__(self, tables: StepTables, data: RecordingData, flow: StepFlow) -> None:
        """Reads the step's rows of `values`.

        Args:
            tables: all of the recording.
            data: the rows of the step.
            flow: its ops.
        """
        self._tables = tables
        self._flow = flow
        self.outputs: dict[tuple[int, str], Counts] = {}  # by op and slot of its output
        #: Of what no op of the step had made, by its site and the op that read it first; None for a site of one tensor.
        self._leaves: dict[tuple[int, int | None], Counts] = {}
        row_of = {op: row for row, op in enumerate(flow.ops.op_id.tolist())}
        for row in _measured_rows(data.table("values").select(_COLUMNS)):
            site = tables.sites.get(row["site_id"])
            if site is not None and site.role == OP_OUTPUT:
                self.outputs[row_of.get(row["op_id"], -1), site.slot] = _to_counts(row)
            else:
                self._leaves.setdefault((row["site_id"], row_of.get(row["op_id"])), _to_counts(row))

    def of_output(self, tensor: int) -> Counts | None:
        """Returns what was measured of a tensor when an op of the step returned it; None if nothing was."""
        tensors = self._flow.tensors
        return self.outputs.get((int(tensors.producer[tensor]), tensors.slots[tensors.slot[tensor]]))

    def of_leaf(self, tensor: int) -> Counts | None:
        """Returns what was measured of a tensor that no op of the step made; None if nothing was.

        Of what an op of an earlier step made, as a mask that is kept, that is what was measured then.
        """
        return self._of_site(tensor) or self._earlier.get(self._flow.regions[tensor].storage)

    def _of_site(self, tensor: int) -> Counts | None:
        site = self._flow.sites[tensor]
        if site is None:
            return None
        first_read = self._leaves.get((site, self._first_readers.get(tensor)))
        return first_read or self._leaves.get((site, None))

    @cached_property
    def _first_readers(self) -> Mapping[int, int]:
        """The op that read each tensor first."""
        flow = self._flow
        return {tensor: op for op in reversed(flow.order) for _, tensor in flow.reads.get(op, ())}

    @cached_property
    def _earlier(self) -> Mapping[int | None, Counts]:
        """What was last measured, by an op before this step, of the memory of tensors that no op of the step made."""
        flow = self._flow
        leaves = np.flatnonzero(flow.tensors.producer < 0).tolist()
        unknown = [flow.regions[tensor].storage for tensor in leaves if self._of_site(tensor) is None]
        storages = np.array([storage for storage in set(unknown) if storage is not None], np.int64)
        made = self._tables.find("tensors", ["producer_op", "slot", "storage"], storage=storages)
        made = self._keep_measured(made, before=min(flow.ops.op_id.tolist(), default=0))
        storage_of = {(row["producer_op"], row["slot"]): row["storage"] for row in made.to_pylist()}
        found = self._read_outputs(column_of(made, "producer_op"))
        return {storage_of[key]: counts for key, counts in found if key in storage_of}

    def _keep_measured(self, made: pa.Table, *, before: int) -> pa.Table:
        """Keeps of each storage the tensors of the last op that was measured."""
        op, storage = column_of(made, "producer_op"), column_of(made, "storage")
        known = np.isin(op, column_of(self._tables.find("values", ["op_id"], op_id=op[op < before]), "op_id"))
        last: dict[int, int] = {}
        for each, writer in zip(storage[known].tolist(), op[known].tolist(), strict=True):
            last[each] = max(last.get(each, -1), writer)
        return made.take(np.flatnonzero(op == np.array([last.get(each, -2) for each in storage.tolist()])))

    def _read_outputs(self, op_ids: Column) -> Iterator[tuple[tuple[int, str], Counts]]:
        """Yields the ids of ops and the slots of their outputs with what was measured of these."""
        for row in _measured_rows(self._tables.find("values", _COLUMNS, op_id=op_ids)):
            site = self._tables.sites.get(row["site_id"])
            if site is not None and site.role == OP_OUTPUT:
                yield (row["op_id"], site.slot), _to_counts(row)


def _measured_rows(values: pa.Table) -> Iterator[Mapping[str, Any]]:
    return (row for row in values.to_pylist() if row["count"] is not None)


def _to_counts(row: Mapping[str, Any]) -> Counts:
    return Counts(
        nan=row["nan_count"],
        inf=row["inf_count"],
        numel=row["numel"],
        min=row["min"],
        max=row["max"],
        dtype=row["dtype"],
        first_index=read_first_index(row),
        order=row["order"],
    )
