"""What was measured of the tensors of one step: how many of their elements are NaN or infinite, and their extremes."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...recording.protocols import RecordingData
from ...recording.role import OP_OUTPUT
from ..tables.columns import RowFinder, column_of
from ..values.nonfinite import read_first_index
from .earlier_steps import EarlierSteps
from .indexed_tables import IndexedTables
from .step_flow import StepFlow

#: The columns of `values` that are read.
_COLUMNS = (
    "site_id", "op_id", "order", "nan_count", "inf_count", "numel", "min", "max", "dtype", "count", "first_index",
    "shape",
)  # fmt: skip

#: At most so many views of views are followed back to their base.
_MOST_VIEWS = 8

#: What a view has in common with what it shows, unless somebody wrote to it between.
_MEMORY = itemgetter("storage", "version")


class Counts(NamedTuple):
    """The non-finite elements, size and range of one measured tensor."""

    nan: int
    inf: int
    numel: int
    min: float | None
    max: float | None
    dtype: str
    first_index: tuple[int, ...] | None = None  # of the first NaN or infinite element
    order: int = 0  # of the measurement within its step
    is_bound: bool = (
        False  # `min` and `max` are of all that it may hold: an op has written to a part of it since
    )

    @property
    def are_negative(self) -> bool:
        """Whether the infinite elements are all -inf; False too where NaN beside them hides their signs."""
        return not self.nan and self.max != math.inf


class StepCounts:
    """The measurements of the tensors of a step; numbers of ops and tensors are those of its `StepFlow`."""

    def __init__(
        self,
        tables: IndexedTables,
        data: RecordingData,
        flow: StepFlow,
        earlier: EarlierSteps,
    ) -> None:
        """Reads the step's rows of `values`.

        Args:
            tables: all of the recording.
            data: the rows of the step.
            flow: its ops.
            earlier: what is known of the tensors of dropped steps.
        """
        self._tables = tables
        self._earlier_steps = earlier
        self._flow = flow
        self.outputs: dict[tuple[int, str], Counts] = {}  # by op and slot of its output
        #: Of what no op of the step had made, by its site and the op that read it first; None for a site of one tensor.
        self._leaves: dict[tuple[int, int | None], list[Counts]] = defaultdict(list)
        row_of = {op: row for row, op in enumerate(flow.ops.op_id.tolist())}
        for at, row in enumerate(_measured_rows(data.table("values").select(_COLUMNS))):
            site = tables.sites.get(row["site_id"])
            if site is not None and site.role == OP_OUTPUT:
                op = row_of.get(row["op_id"], -2 - at)  # no other's if the op has no row
                self.outputs[op, site.slot] = _to_counts(row)
            else:
                self._leaves[row["site_id"], row_of.get(row["op_id"])].append(_to_counts(row))

    @cached_property
    def has_lost_rows(self) -> bool:
        """True if an output is not finite whose op or tensor has no row, as in a recording of which a table is cut."""
        returned = {(op, slot) for op, outputs in self._flow.returns.items() for slot, _ in outputs}
        return any(key not in returned and (each.nan or each.inf) for key, each in self.outputs.items())

    def of_output(self, tensor: int) -> Counts | None:
        """Returns what was measured of a tensor when an op of the step returned it; None if nothing was."""
        tensors = self._flow.tensors
        return self.outputs.get((int(tensors.producer[tensor]), tensors.slots[tensors.slot[tensor]]))

    def of_leaf(self, tensor: int) -> Counts | None:
        """Returns what was measured of a tensor that no op of the step made; None if nothing was.

        Of what an op of an earlier step made, as a mask that is kept, that is what was measured then.
        """
        return self._of_site(tensor) or self._earlier.get(int(self._flow.tensors.tensor_id[tensor]))

    def _of_site(self, tensor: int) -> Counts | None:
        site = self._flow.sites[tensor]
        if site is None:
            return None
        op, nth = self._first_reads.get(tensor, (None, 0))
        read = self._leaves.get((site, op)) or self._leaves.get((site, None))
        return read[min(nth, len(read) - 1)] if read else None

    @cached_property
    def _first_reads(self) -> Mapping[int, tuple[int, int]]:
        """The op that read each tensor first, and how many others of the same site it read first before that."""
        flow, found = self._flow, dict[int, tuple[int, int]]()
        for op in flow.order:
            before: dict[int | None, int] = defaultdict(int)
            for _, tensor in flow.reads.get(op, ()):
                if tensor not in found:
                    found[tensor] = op, before[flow.sites[tensor]]
                    before[flow.sites[tensor]] += 1
        return found

    @cached_property
    def _earlier(self) -> Mapping[int, Counts]:
        """What was measured in earlier steps of tensors that ops have made or read there, by id.

        Of a view that is what was measured of what it shows.
        """
        leaves = np.flatnonzero(self._flow.tensors.producer < 0)
        unknown = leaves[[self._of_site(tensor) is None for tensor in leaves.tolist()]]
        found: dict[int, Counts] = {}
        shown = {tensor: tensor for tensor in self._flow.tensors.tensor_id[unknown].tolist()}
        for _ in range(_MOST_VIEWS):
            if not shown:
                break
            made = {row["tensor_id"]: row for row in self._read_tensors(set(shown.values()))}
            outputs = dict(read_outputs(self._tables, {row["producer_op"] for row in made.values()}))
            keys = {tensor: (made[each]["producer_op"], made[each]["slot"]) for tensor, each in shown.items()}
            found |= {
                tensor: outputs[key]
                for tensor, key in keys.items()
                if key in outputs and _is_of_all(outputs[key], made[shown[tensor]]["shape"])
            }
            leaves_read = self._find_leaves([row for row in made.values() if row["producer_op"] is None])
            found |= {tensor: leaves_read[each] for tensor, each in shown.items() if each in leaves_read}
            views = self._find_shown([made[each] for tensor, each in shown.items() if tensor not in found])
            shown = {
                tensor: views[each] for tensor, each in shown.items() if each in views and tensor not in found
            }
        return found

    def _find_leaves(self, leaves: list[Mapping[str, Any]]) -> dict[int, Counts]:
        """Returns what was measured of tensors when an op first read them, if that op read no others of their site."""
        ids = np.array([row["tensor_id"] for row in leaves], np.int64)
        uses = self._tables.find("uses", ["tensor_id", "consumer_op"], tensor_id=ids).to_pylist()
        first = {
            each["tensor_id"]: each["consumer_op"]
            for each in reversed(uses)
            if each["consumer_op"] is not None
        }
        measured: dict[tuple[int, int], list[Counts]] = defaultdict(list)
        op_ids = np.array(sorted(set(first.values())), np.int64)
        for row in _measured_rows(self._tables.find("values", _COLUMNS, op_id=op_ids)):
            measured[row["site_id"], row["op_id"]].append(_to_counts(row))
        read = {row["tensor_id"]: measured[row["site_id"], first.get(row["tensor_id"], -1)] for row in leaves}
        return {tensor: counts[0] for tensor, counts in read.items() if len(counts) == 1}

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Tensors that an op of a dropped step made: nothing that was measured of them is still in the recording.

        With `keep_last` only the last steps are there.
        """
        of_step = self._flow.tensors
        rows = self._tables.find("tensors", ["tensor_id", "producer_op"], tensor_id=of_step.tensor_id)
        made_by = column_of(rows, "producer_op")
        known = column_of(self._tables.find("ops", ["op_id"], op_id=made_by), "op_id")
        dropped = column_of(rows, "tensor_id")[(made_by >= 0) & ~np.isin(made_by, known)]
        return frozenset(np.flatnonzero(np.isin(of_step.tensor_id, dropped)).tolist())

    @cached_property
    def reads_dropped(self) -> Mapping[int, list[int]]:
        """By op the ids of what it read whose row is not in the recording, because its step was dropped.

        What is known to be finite is left out.
        """
        ops = self._flow.ops.op_id
        uses = self._tables.find("uses", ["consumer_op", "tensor_id"], consumer_op=ops)
        read = column_of(uses, "tensor_id")
        known = column_of(self._tables.find("tensors", ["tensor_id"], tensor_id=read), "tensor_id")
        op = RowFinder(ops)(column_of(uses, "consumer_op"))
        found: dict[int, list[int]] = {}
        for at in np.flatnonzero((op >= 0) & ~np.isin(read, known)).tolist():
            if not self._earlier_steps.is_finite(int(read[at])):
                found.setdefault(int(op[at]), []).append(int(read[at]))
        return found

    def describe_dropped(self, op: int) -> str | None:
        """Returns what made the values of a tensor of a dropped step that an op reads; None if that is not known."""
        read = self.reads_dropped.get(op, ())
        return next(filter(None, map(self._earlier_steps.describe, read)), None)

    def _find_shown(self, views: list[Mapping[str, Any]]) -> dict[int, int]:
        """Returns of tensors that are views what they show: tensors that their ops read, and did not write to."""
        ops = np.array([row["producer_op"] for row in views if row["producer_op"] is not None], np.int64)
        uses = self._tables.find("uses", ["consumer_op", "tensor_id"], consumer_op=ops).to_pylist()
        read = {row["tensor_id"]: row for row in self._read_tensors({each["tensor_id"] for each in uses})}
        by_op = defaultdict(list)
        for each in uses:
            if each["tensor_id"] in read:  # a table that was cut may lack it
                by_op[each["consumer_op"]].append(read[each["tensor_id"]])
        return {
            view["tensor_id"]: other["tensor_id"]
            for view in views
            for other in by_op[view["producer_op"]]
            if view["storage"] is not None and _MEMORY(view) == _MEMORY(other) and view is not other
        }

    def _read_tensors(self, tensor_ids: Collection[int]) -> list[Mapping[str, Any]]:
        columns = ("tensor_id", "site_id", "producer_op", "slot", "shape", "storage", "version")
        rows: list[Mapping[str, Any]] = self._tables.find(
            "tensors", columns, tensor_id=np.array(list(tensor_ids), np.int64)
        ).to_pylist()
        return rows


def read_outputs(
    tables: IndexedTables, op_ids: Collection[int | None]
) -> Iterator[tuple[tuple[int, str], Counts]]:
    """Yields the measurements of the outputs of ops, each with the id of the op and the slot."""
    ops = np.array([each for each in op_ids if each is not None], np.int64)
    for row in _measured_rows(tables.find("values", _COLUMNS, op_id=ops)):
        site = tables.sites.get(row["site_id"])
        if site is not None and site.role == OP_OUTPUT:
            yield (row["op_id"], site.slot), _to_counts(row)


def _measured_rows(values: pa.Table) -> Iterator[Mapping[str, Any]]:
    return (row for row in values.to_pylist() if row["count"] is not None)


def _is_of_all(counts: Counts, shape: Sequence[int]) -> bool:
    """Returns whether a measurement tells of a tensor: an op that wrote to a part of it may have left it finite."""
    return counts.numel >= math.prod(shape) or counts.nan + counts.inf > 0


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
