"""Reads the measurements of one step's tensors: their counts of NaN and infinite elements, and their extremes."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...recording.role import OP_OUTPUT
from ..tables.columns import Column, column_of, find_rows
from ..tables.one_step import IndexedTables, OneStep
from ..values.nonfinite import read_first_index
from .earlier_steps import EarlierSteps

#: The columns of `values` that are read here.
_COLUMNS = (
    "site_id", "op_id", "order", "nan_count", "inf_count", "numel", "min", "max", "dtype", "count", "first_index",
    "shape",
)  # fmt: skip
_TENSOR_COLUMNS = ("tensor_id", "site_id", "producer_op", "slot", "shape", "storage", "version")

#: The largest number of views of views through which a base is searched.
_MOST_VIEWS = 8

_Row = Mapping[str, Any]


class Counts(NamedTuple):
    """The measurement of one tensor: its non-finite elements, size and range."""

    nan: int
    inf: int
    numel: int
    min: float | None
    max: float | None
    dtype: str
    first_index: tuple[int, ...] | None = None  # index of the first NaN or infinite element
    order: int = 0  # the order of the measurement within its step
    #: Whether `min` and `max` are only bounds, because an op has written to a part of the tensor since.
    is_bound: bool = False

    @property
    def are_negative(self) -> bool:
        """Whether all infinite elements are -inf; False if NaN elements hide the signs."""
        return not self.nan and self.max != math.inf


class StepCounts:
    """The measurements of the tensors of one step."""

    def __init__(self, step: OneStep, earlier: EarlierSteps) -> None:
        """Reads the step's rows of `values`; `earlier` holds what is known of the tensors of dropped steps."""
        self._run = step.run
        self._step = step
        self._earlier_steps = earlier
        self._sites: list[int] = step.tensors.site_id.tolist()
        self.outputs: dict[tuple[int, str], Counts] = {}  # by op and slot of the output
        #: Leaves, by site and first reading op; the op is None for a site with one tensor.
        self._leaves: dict[tuple[int, int | None], list[Counts]] = defaultdict(list)
        row_of = {op: row for row, op in enumerate(step.ops.op_id.tolist())}
        measured = (
            row for row in step.table("values").select(_COLUMNS).to_pylist() if row["count"] is not None
        )
        for number, row in enumerate(measured):
            site = step.run.sites.get(row["site_id"])
            if site is not None and site.role == OP_OUTPUT:
                op = row_of.get(row["op_id"], -2 - number)  # a unique number stands for an op without row
                self.outputs[op, site.slot] = _to_counts(row)
            else:
                self._leaves[row["site_id"], row_of.get(row["op_id"])].append(_to_counts(row))

    @cached_property
    def has_lost_rows(self) -> bool:
        """True if a non-finite output lacks the row of its op or tensor, as in a recording with a cut table."""
        returned = {(op, slot) for op, outputs in self._step.returns.items() for slot, _ in outputs}
        return any((one.nan or one.inf) and key not in returned for key, one in self.outputs.items())

    @cached_property
    def first_order(self) -> Mapping[int, int]:
        """For each op with measured outputs, the `order` of the first of them."""
        first: dict[int, int] = {}
        for (op, _), counts in self.outputs.items():
            first[op] = min(counts.order, first.get(op, counts.order))
        return first

    def of_output(self, tensor: int) -> Counts | None:
        """Returns the measurement of a tensor as an op of the step returned it; None if there is none."""
        tensors = self._step.tensors
        return self.outputs.get((int(tensors.producer[tensor]), tensors.slots[tensors.slot[tensor]]))

    def of_leaf(self, tensor: int) -> Counts | None:
        """Returns the measurement of a tensor that no op of the step made; None if there is none.

        If an op of an earlier step made it, as a mask that is kept, the measurement is from then.
        """
        return self._of_site(tensor) or self._earlier.get(int(self._step.tensors.tensor_id[tensor]))

    def _of_site(self, tensor: int) -> Counts | None:
        site = self._sites[tensor]
        op, nth = self._first_reads.get(tensor, (None, 0))
        read = self._leaves.get((site, op)) or self._leaves.get((site, None))
        return read[min(nth, len(read) - 1)] if read and site >= 0 else None

    @cached_property
    def _first_reads(self) -> Mapping[int, tuple[int, int]]:
        """For each leaf, the op that first read it, and how many leaves of the same site that op read before."""
        first: dict[int, tuple[int, int]] = {}
        for op in self._step.order:
            before: dict[int, int] = defaultdict(int)
            for _, tensor in self._step.reads.get(op, ()):
                if tensor not in first:
                    site = self._sites[tensor]
                    first[tensor] = op, before[site]
                    before[site] += 1
        return first

    @cached_property
    def _earlier(self) -> Mapping[int, Counts]:
        """The measurements in earlier steps of tensors that ops made or read there, by id.

        A view has the measurement of the tensor that it shows.
        """
        tensors = self._step.tensors
        leaves = [row for row in np.flatnonzero(tensors.producer < 0).tolist() if self._of_site(row) is None]
        measured: dict[int, Counts] = {}
        shown = {tensor: tensor for tensor in tensors.tensor_id[leaves].tolist()}
        for _ in range(_MOST_VIEWS):
            if not shown:
                break
            rows = self._find_rows("tensors", _TENSOR_COLUMNS, tensor_id=shown.values())
            made = {row["tensor_id"]: row for row in rows}
            counts = self._find_leaves([row for row in rows if row["producer_op"] is None])
            outputs = dict(read_outputs(self._run, {row["producer_op"] for row in rows}))
            for tensor, row in made.items():
                output = outputs.get((row["producer_op"], row["slot"]))
                if output is not None and _is_of_all(output, row["shape"]):
                    counts[tensor] = output
            measured |= {tensor: counts[one] for tensor, one in shown.items() if one in counts}
            shown = {tensor: one for tensor, one in shown.items() if tensor not in measured}
            views = self._find_shown([made[one] for one in shown.values()])
            shown = {tensor: views[one] for tensor, one in shown.items() if one in views}
        return measured

    def _find_leaves(self, leaves: list[_Row]) -> dict[int, Counts]:
        """Returns the measurements of leaves at their first read, if the op read no other tensor of the site."""
        uses = self._find_rows(
            "uses", ("tensor_id", "consumer_op"), tensor_id=[row["tensor_id"] for row in leaves]
        )
        first = {
            use["tensor_id"]: use["consumer_op"] for use in reversed(uses) if use["consumer_op"] is not None
        }
        measured: dict[tuple[int, int], list[Counts]] = defaultdict(list)
        for row in self._find_rows("values", _COLUMNS, op_id=first.values()):
            if row["count"] is not None:
                measured[row["site_id"], row["op_id"]].append(_to_counts(row))
        read = {row["tensor_id"]: measured[row["site_id"], first.get(row["tensor_id"], -1)] for row in leaves}
        return {tensor: counts[0] for tensor, counts in read.items() if len(counts) == 1}

    def _find_shown(self, views: list[_Row]) -> dict[int, int]:
        """Returns for each view the tensor that it shows: one that its op read and did not write to."""
        ops = [row["producer_op"] for row in views if row["producer_op"] is not None]
        uses = self._find_rows("uses", ("consumer_op", "tensor_id"), consumer_op=ops)
        rows = self._find_rows("tensors", _TENSOR_COLUMNS, tensor_id={use["tensor_id"] for use in uses})
        read = {row["tensor_id"]: row for row in rows}
        by_op = defaultdict(list)
        for use in uses:
            if use["tensor_id"] in read:  # a cut table may lack the row
                by_op[use["consumer_op"]].append(read[use["tensor_id"]])
        return {
            view["tensor_id"]: other["tensor_id"]
            for view in views
            for other in by_op[view["producer_op"]]
            if view["storage"] is not None
            and view["tensor_id"] != other["tensor_id"]
            and (view["storage"], view["version"]) == (other["storage"], other["version"])
        }

    def _find_rows(self, name: str, columns: Sequence[str], **wanted: Collection[int]) -> list[_Row]:
        ids = {column: np.array([*numbers], np.int64) for column, numbers in wanted.items()}
        return list(self._run.find(name, columns, **ids).to_pylist())

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Tensors made by an op of a dropped step; the recording has no measurements of them.

        With `keep_last` only the last steps are kept.
        """
        tensor_id = self._step.tensors.tensor_id
        rows = self._run.find("tensors", ["tensor_id", "producer_op"], tensor_id=tensor_id)
        made_by = column_of(rows, "producer_op")
        is_dropped = (made_by >= 0) & ~self._are_known("ops", "op_id", made_by)
        return frozenset(
            np.flatnonzero(np.isin(tensor_id, column_of(rows, "tensor_id")[is_dropped])).tolist()
        )

    @cached_property
    def reads_dropped(self) -> Mapping[int, list[int]]:
        """For each op, the ids of the tensors that it read whose rows are missing, as their step was dropped.

        Tensors that are known to be finite are left out.
        """
        ops = self._step.ops.op_id
        uses = self._run.find("uses", ["consumer_op", "tensor_id"], consumer_op=ops)
        read, op = column_of(uses, "tensor_id"), find_rows(ops, column_of(uses, "consumer_op"))
        dropped: dict[int, list[int]] = {}
        for row in np.flatnonzero((op >= 0) & ~self._are_known("tensors", "tensor_id", read)).tolist():
            if not self._earlier_steps.is_finite(int(read[row])):
                dropped.setdefault(int(op[row]), []).append(int(read[row]))
        return dropped

    def _are_known(self, name: str, column: str, ids: Column) -> Column:
        return np.isin(ids, column_of(self._run.find(name, [column], **{column: ids}), column))

    def describe_dropped(self, op: int) -> str | None:
        """Returns what made the values of a dropped step's tensor that an op reads; None if that is not known."""
        read = self.reads_dropped.get(op, ())
        return next(filter(None, map(self._earlier_steps.describe, read)), None)


def read_outputs(
    run: IndexedTables, op_ids: Collection[int | None]
) -> Iterator[tuple[tuple[int, str], Counts]]:
    """Yields the measurements of the outputs of ops, each with the op's id and the slot."""
    ops = np.array([op for op in op_ids if op is not None], np.int64)
    for row in run.find("values", _COLUMNS, op_id=ops).to_pylist():
        site = run.sites.get(row["site_id"])
        if row["count"] is not None and site is not None and site.role == OP_OUTPUT:
            yield (row["op_id"], site.slot), _to_counts(row)


def _is_of_all(counts: Counts, shape: Sequence[int]) -> bool:
    """Returns whether a measurement covers a whole tensor of this shape, and not only a part that an op wrote."""
    return counts.numel >= math.prod(shape) or counts.nan + counts.inf > 0


def _to_counts(row: _Row) -> Counts:
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
