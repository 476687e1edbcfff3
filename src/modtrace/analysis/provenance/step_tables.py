"""Reads the tables of a recording one step at a time: what finds the rows of a step is sorted once for all steps."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import to_numpy
from ...recording.meta import RunMeta
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ..step.calls import Column, Rows, column_of
from ..step.sites import Site, read_sites

_INT32_END = 2**31


class StepTables:
    """Finds rows of a recording by ids. A column that was searched stays in memory, with 4 to 8 bytes a row."""

    def __init__(self, data: RecordingData) -> None:
        self.data = data
        self._tables: dict[str, _Batches] = {}
        self._columns: dict[tuple[str, str], _SortedColumn] = {}

    @cached_property
    def sites(self) -> dict[int, Site]:
        """The sites of the recording by their ids."""
        return read_sites(self.data)

    def of_step(self, step: int) -> RecordingData:
        """Returns the rows of one step, with the calls and tensors of earlier steps to which they refer."""
        return _StepData(self, step)

    def find(self, name: str, columns: Sequence[str] | None = None, **wanted: Column) -> pa.Table:
        """Returns the rows of a table which have one of the wanted ids in one of their columns, in their order."""
        rows = np.concatenate([self.rows(name, column, ids) for column, ids in wanted.items()])
        return self._table(name).take(np.unique(rows), columns)

    def rows(self, name: str, column: str, ids: Column) -> Rows:
        """Returns the numbers of the rows of a table that have one of the ids in a column; -1 is none."""
        if (name, column) not in self._columns:
            self._columns[name, column] = _SortedColumn(self._table(name).read(column))
        return self._columns[name, column].find(ids)

    def _table(self, name: str) -> "_Batches":
        if name not in self._tables:
            self._tables[name] = _Batches(self.data.table(name))
        return self._tables[name]


class _StepData:
    """The `RecordingData` of one step."""

    def __init__(self, tables: StepTables, step: int) -> None:
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
            return find("uses", consumer_op=column_of(self.table("ops"), "op_id"))
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
    """A table of which rows are taken batch by batch, so that the batches that have none of them are not touched."""

    def __init__(self, table: pa.Table) -> None:
        self._empty = table.slice(0, 0)
        self._batches = table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)

    def take(self, rows: Rows, columns: Sequence[str] | None) -> pa.Table:
        """Returns sorted rows, with some columns or all."""
        numbers, firsts = np.unique(np.searchsorted(self._ends, rows, side="right"), return_index=True)
        parts = []
        for number, part in zip(numbers.tolist(), np.split(rows, firsts)[1:], strict=True):
            batch = self._batches[number]
            kept = batch if columns is None else batch.select(columns)
            parts.append(kept.take(pa.array(part - (self._ends[number] - len(batch)))))
        empty = self._empty if columns is None else self._empty.select(columns)
        return pa.Table.from_batches(parts, empty.schema)

    def read(self, column: str) -> Column:
        """Returns a column of ids, -1 in place of nulls, in four bytes each where they fit."""
        chunks = [to_numpy(batch.column(column)) for batch in self._batches]
        if all(chunk.max(initial=0) < _INT32_END for chunk in chunks):
            chunks = [chunk.astype(np.int32, copy=False) for chunk in chunks]
        return np.concatenate(chunks) if chunks else np.empty(0, np.int32)


class _SortedColumn:
    """The rows of ids in one column, in which an id may be in several rows."""

    def __init__(self, ids: Column) -> None:
        self._order: Rows | None = None  # of the sorted ids; None: they are sorted as they are
        if len(ids) and not (ids[1:] >= ids[:-1]).all():
            self._order = np.argsort(ids, kind="stable").astype(
                np.int32 if len(ids) < _INT32_END else np.int64
            )
            ids = ids[self._order]
        self._sorted = ids

    def find(self, wanted: Column) -> Rows:
        """Returns the rows with one of the ids; those of nulls are not found."""
        is_possible = (wanted >= 0) & (wanted <= np.iinfo(self._sorted.dtype).max)
        wanted = wanted[is_possible].astype(
            self._sorted.dtype, copy=False
        )  # of another type, all ids were converted
        first = np.searchsorted(self._sorted, wanted, "left")
        counts = np.searchsorted(self._sorted, wanted, "right") - first
        before = np.cumsum(counts) - counts
        found = np.repeat(first - before, counts) + np.arange(counts.sum())
        return found if self._order is None else self._order[found]
