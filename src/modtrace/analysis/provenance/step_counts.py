"""Reads the measurements of one step's tensors: their counts of NaN and infinite elements, and their extremes."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ...recording.arrow.arrays import last_of_each
from ...recording.role import OP_OUTPUT
from ..tables.columns import (
    ArrowTable,
    Column,
    OnDemand,
    Rows,
    column_of,
    count_before,
    find_rows,
    number_keys,
    take,
)
from ..tables.indexed_tables import IndexedTables
from ..tables.one_step import OneStep
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

#: The number of rows of `values` that are read together: one alone takes 300 us, one of these 5 us.
_BLOCK = 64

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
        self._run, self._step = step.run, step
        self._earlier_steps = earlier
        self._values = step.table("values").select(_COLUMNS)
        self._op = find_rows(step.ops.op_id, column_of(self._values, "op_id"))
        self._site_id = column_of(self._values, "site_id")
        self._order = column_of(self._values, "order")
        self._blocks = OnDemand(partial(_read_block, self._values))
        is_output = np.isin(self._site_id, step.run.sites_of(OP_OUTPUT))
        is_measured = column_of(self._values, "count") >= 0
        self._outputs, keys = self._find_outputs(np.flatnonzero(is_measured & is_output))
        tensors = step.tensors
        of_tensors = np.where(tensors.producer >= 0, tensors.producer * self._width + tensors.slot, -1)
        self._row_of = take(self._outputs, find_rows(keys, of_tensors))
        is_bad = (column_of(self._values, "nan_count") > 0) | (column_of(self._values, "inf_count") > 0)
        #: Which tensors were measured as an op of the step returned them, and which of these are not finite.
        self.is_measured = self._row_of >= 0
        self.is_bad = self.is_measured & np.append(is_bad, False)[self._row_of]
        #: True if a non-finite output lacks the row of its op or tensor, as in a recording with a cut table.
        self.has_lost_rows = bool((is_bad[self._outputs] & ~np.isin(keys, of_tensors)).any())
        leaves = np.flatnonzero(is_measured & ~is_output)
        leaves = leaves[np.argsort(self._site_id[leaves], kind="stable")]
        self._leaves_of = OnDemand(partial(_find_leaves, leaves, self._site_id[leaves], self._op[leaves]))

    def _find_outputs(self, rows: Rows) -> tuple[Rows, Rows]:
        """Returns the last row of `values` for each op and slot, and a key of both, unique for an op without row."""
        code_of = {slot: code for code, slot in enumerate(self._step.tensors.slots)}
        slot, slots = self._run.sites.find_slots(self._site_id[rows])
        codes = np.array([code_of.setdefault(name, len(code_of)) for name in (*slots, "")], np.int64)[slot]
        self._width = len(code_of) + 1  # a tensor without slot has the code -1
        op = self._op[rows]
        keys = np.where(op >= 0, op * self._width + codes, -2 - np.arange(len(rows)))
        last = last_of_each(keys)
        return rows[last], keys[last]

    @cached_property
    def output_orders(self) -> Column:
        """The `order` of the measurement of each output."""
        return np.asarray(self._order[self._outputs])

    @cached_property
    def first_order(self) -> Column:
        """For each op, the `order` of the first of its measured outputs; -1 if none was measured."""
        first = np.full(len(self._step.ops), -1, np.int64)
        rows = self._outputs[np.argsort(-self.output_orders, kind="stable")]
        rows = rows[self._op[rows] >= 0]
        first[self._op[rows]] = self._order[rows]  # of several rows of an op, the last one stays
        return first

    def of_output(self, tensor: int) -> Counts | None:
        """Returns the measurement of a tensor as an op of the step returned it; None if there is none."""
        row = int(self._row_of[tensor])
        return None if row < 0 else self._read(row)

    def _read(self, row: int) -> Counts:
        return self._blocks[row // _BLOCK][row % _BLOCK]

    def of_leaf(self, tensor: int) -> Counts | None:
        """Returns the measurement of a tensor that no op of the step made; None if there is none.

        If an op of an earlier step made it, as a mask that is kept, the measurement is from then.
        """
        return self._of_site(tensor) or self._earlier.get(int(self._step.tensors.tensor_id[tensor]))

    def _of_site(self, tensor: int) -> Counts | None:
        site = int(self._step.tensors.site_id[tensor])
        if site < 0:
            return None
        op, nth = (int(column[tensor]) for column in self._first_reads)
        leaves = self._leaves_of[site]
        read = leaves.get(op) or leaves.get(-1)
        return self._read(read[min(nth, len(read) - 1)]) if read else None

    @cached_property
    def _first_reads(self) -> tuple[Rows, Rows]:
        """For each tensor, the op that first read it, and how many tensors of its site that op first read before."""
        step, flow = self._step, self._step.flow
        reads = np.argsort(step.position[flow.reader], kind="stable")
        tensors, first = np.unique(flow.read[reads], return_index=True)
        op, nth = np.full(len(step.tensors), -1, np.int64), np.zeros(len(step.tensors), np.int64)
        op[tensors] = flow.reader[reads[first]]
        keys, _ = number_keys((op[tensors], op[:0]), (step.tensors.site_id[tensors], op[:0]))
        nth[tensors] = count_before(keys, first)
        return op, nth

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


def _find_leaves(rows: Rows, sites: Rows, op: Rows, site: int) -> Mapping[int, list[int]]:
    """Returns the rows of a site by the op that first read each leaf; -1 for the leaf of a site that has one.

    Args:
        rows: the rows of `values` with leaves, in the order of their sites.
        sites: their sites.
        op: their ops.
        site: the site.
    """
    own = slice(np.searchsorted(sites, site), np.searchsorted(sites, site, "right"))
    leaves: dict[int, list[int]] = defaultdict(list)
    for reader, row in zip(op[own].tolist(), rows[own].tolist(), strict=True):
        leaves[reader].append(row)
    return leaves


def _read_block(values: ArrowTable, number: int) -> list[Counts]:
    return list(map(_to_counts, values.slice(number * _BLOCK, _BLOCK).to_pylist()))


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
