"""Reads the tables of a recording one step at a time: of a batch that has no row of the step, nothing is read."""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.meta import RunMeta
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ..tables.calls import outermost_calls
from ..tables.columns import Column, Rows, column_of, ranges
from ..tables.sites import Site, read_sites

#: So many batches stay sorted by a column: those of one step, and of the next.
_MOST_SORTED = 64


class IndexedTables:
    """Finds rows of a recording by ids."""

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
        """True if lines of the program were recorded for ops."""
        lines = self.data.table("ops")["source"]
        return bool(lines.null_count < len(lines))

    def find_writer(self, tensor_id: int) -> Mapping[str, Any] | None:
        """Returns the row of the op that wrote a tensor; None if none did that is in the recording."""
        written_by = self.find("tensors", ["producer_op"], tensor_id=np.array([tensor_id]))
        rows: list[Mapping[str, Any]] = self.find(
            "ops", op_id=column_of(written_by, "producer_op")
        ).to_pylist()
        return next(iter(rows), None)

    def sites_of(self, *roles: str) -> Column:
        """Returns the ids of the sites at which tensors of some roles are seen."""
        return self._sites_of(roles)

    def _find_sites(self, roles: tuple[str, ...]) -> Column:
        return np.array([number for number, site in self.sites.items() if site.role in roles], np.int64)

    def of_step(self, step: int) -> RecordingData:
        """Returns the rows of one step, with the calls and tensors of earlier steps to which they refer."""
        return _StepData(self, step)

    def find(self, name: str, columns: Sequence[str] | None = None, **wanted: Column) -> pa.Table:
        """Returns the rows of a table in their order which have one of some ids in one of some columns.

        Args:
            name: the name of the table.
            columns: what is read of them; None for all.
            **wanted: by columns, the ids; -1 is none.
        """
        table = self._batches_of(name)
        rows = [table.find(column, np.unique(ids[ids >= 0])) for column, ids in wanted.items()]
        return table.take(np.unique(np.concatenate(rows)), columns)


class _StepData:
    """The `RecordingData` of one step."""

    def __init__(self, tables: IndexedTables, step: int) -> None:
        self._all = tables
        self._step = np.array([step])
        self._tables: dict[str, pa.Table] = {}

    @property
    def meta(self) -> RunMeta:
        return self._all.data.meta

    def tensor(self, blob: str) -> RawTensor:
        return self._all.data.tensor(blob)

    def table(self, name: str) -> pa.Table:
        if name not in self._tables:
            self._tables[name] = self._read(name)
        return self._tables[name]

    def _read(self, name: str) -> pa.Table:
        find = self._all.find
        if name == "calls":
            return find("calls", step=np.union1d(self._step, self._steps_referred_to()))
        if name == "uses":
            returned = outermost_calls(self.table("calls"))
            return find("uses", consumer_op=column_of(self.table("ops"), "op_id"), consumer_call=returned)
        if name == "tensors":
            read = column_of(self.table("uses"), "tensor_id")
            return find("tensors", tensor_id=read, producer_op=column_of(self.table("ops"), "op_id"))
        return (
            find(name, step=self._step) if name in ("steps", "ops", "values") else self._all.data.table(name)
        )

    def _steps_referred_to(self) -> Column:
        """Returns the steps of the calls that a backward, a recompute, an op or a value of this step belongs to."""
        calls = self._all.find("calls", ["forward_call_id", "recompute_of"], step=self._step)
        referred = [column_of(calls, each) for each in calls.column_names]
        referred += [column_of(self.table(each), "call_id") for each in ("ops", "values")]
        found = self._all.find("calls", ["step"], call_id=np.unique(np.concatenate(referred)))
        return column_of(found, "step")


class _Batches:
    """A table whose rows are found and taken batch by batch: batches that have none of them are not touched."""

    def __init__(self, table: pa.Table) -> None:
        self._empty = table.slice(0, 0)
        self._batches = table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._range = cache(self._find_range)
        self._sorted = lru_cache(maxsize=_MOST_SORTED)(self._sort)

    def find(self, column: str, ids: Column) -> Rows:
        """Returns the rows with one of the ids, which are sorted, in a column."""
        low, high = self._range(column)
        first, end = np.searchsorted(ids, low, "left"), np.searchsorted(ids, high, "right")
        found = [np.empty(0, np.int64)]
        for number in np.flatnonzero(first < end).tolist():
            order, known = self._sorted(column, number)
            at = _find_all(known, ids[first[number] : end[number]])
            found.append(order[at] + (self._ends[number] - len(known)))
        return np.concatenate(found)

    def take(self, rows: Rows, columns: Sequence[str] | None) -> pa.Table:
        """Returns sorted rows, with some columns or all."""
        numbers, firsts = np.unique(np.searchsorted(self._ends, rows, side="right"), return_index=True)
        parts = []
        for number, part in zip(numbers.tolist(), np.split(rows, firsts)[1:], strict=True):
            batch = self._batches[number]
            kept = batch if columns is None else batch.select(columns)
            parts.append(kept.take(from_numpy(part - (self._ends[number] - len(batch)))))
        empty = self._empty if columns is None else self._empty.select(columns)
        return pa.Table.from_batches(parts, empty.schema)

    def _find_range(self, column: str) -> tuple[Column, Column]:
        """Returns the smallest and the largest id of each batch; of one without ids, the smallest is larger."""
        found = [pc.min_max(batch.column(column)).as_py() for batch in self._batches]
        low = [0 if each["min"] is None else each["min"] for each in found]
        high = [-1 if each["max"] is None else each["max"] for each in found]
        return np.array(low, np.int64), np.array(high, np.int64)

    def _sort(self, column: str, number: int) -> tuple[Rows, Column]:
        """Returns the order in which the ids of a batch are sorted, and the sorted ids; -1 stands for null."""
        ids = to_numpy(self._batches[number].column(column)).astype(np.int64, copy=False)
        order = np.argsort(ids, kind="stable")
        return order, ids[order]


def _find_all(known: Column, wanted: Column) -> Rows:
    """Returns the places of all ids that are wanted among those that are sorted."""
    first = np.searchsorted(known, wanted, "left")
    return ranges(first, np.searchsorted(known, wanted, "right") - first)
