"""Finds rows of a recording's tables by the numbers in their columns, without reading whole tables."""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.protocols import RecordingData
from ...recording.statistics.moments import sites_of_roles
from .columns import (
    Column,
    Rows,
    column_of,
    ranges,
    sort_distinct,
)
from .sites import SitesOnDemand

#: The largest number of batches that stay sorted by a column, enough for those of one step and the next.
_MOST_SORTED = 64


class IndexedTables:
    """Finds rows of a recording by their ids, and the rows of a step, with an index over batches."""

    def __init__(self, data: RecordingData) -> None:
        self.data = data
        self._batches_of = cache(lambda name: _Batches(data.table(name)))
        self._sites_of = cache(partial(_find_sites, data))

    @cached_property
    def sites(self) -> SitesOnDemand:
        """The sites of the recording by their ids."""
        return SitesOnDemand(self.data)

    @cached_property
    def has_lines(self) -> bool:
        """True if source lines of the program were recorded for ops."""
        lines = self.data.table("ops")["source"]
        return bool(lines.null_count < len(lines))

    def sites_of(self, *roles: str) -> Column:
        """Returns the ids of the sites at which tensors of some roles are seen."""
        return self._sites_of(roles)

    def find(self, name: str, columns: Sequence[str] | None = None, **wanted: Column) -> pa.Table:
        """Returns the rows of a table in which one of the given columns holds one of the given ids, in table order.

        Args:
            name: the name of the table.
            columns: the columns to read; None for all.
            **wanted: for each column to search, the ids to look for; -1 finds nothing.
        """
        table = self._batches_of(name)
        rows = [table.find(column, sort_distinct(ids[ids >= 0])) for column, ids in wanted.items()]
        return table.take(sort_distinct(np.concatenate(rows)), columns)

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


def _find_sites(data: RecordingData, roles: tuple[str, ...]) -> Column:
    return sites_of_roles(data.table("sites"), roles).astype(np.int64)


class _Batches:
    """Finds and takes rows of a table batch by batch, without reading batches that have none of them."""

    def __init__(self, table: pa.Table) -> None:
        self._empty = table.slice(0, 0)
        self._batches = table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self._range = cache(partial(_find_range, self._batches))
        self._sorted = lru_cache(maxsize=_MOST_SORTED)(partial(_sort, self._batches))

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
            inside = part - (self._ends[number] - len(batch))
            is_slice = inside[-1] - inside[0] + 1 == len(
                inside
            )  # as the rows of a step, which then need no copy
            rows = kept.slice(int(inside[0]), len(inside)) if is_slice else kept.take(from_numpy(inside))
            parts.append(rows)
        empty = self._empty if columns is None else self._empty.select(columns)
        return pa.Table.from_batches(parts, empty.schema)


# These are functions, as a cache of a method would keep its object alive until the cyclic garbage collector runs.
def _find_range(batches: Sequence[pa.RecordBatch], column: str) -> tuple[Column, Column]:
    """Returns the smallest and the largest id in each batch; without ids, the smallest is the larger one."""
    ends = [pc.min_max(batch.column(column)).as_py() for batch in batches]
    low = [0 if end["min"] is None else end["min"] for end in ends]
    high = [-1 if end["max"] is None else end["max"] for end in ends]
    return np.array(low, np.int64), np.array(high, np.int64)


def _sort(batches: Sequence[pa.RecordBatch], column: str, number: int) -> tuple[Rows, Column]:
    """Returns the order that sorts the ids of one batch, and the sorted ids; -1 stands for null."""
    ids = to_numpy(batches[number].column(column), null=-1).astype(np.int64, copy=False)
    order = np.argsort(ids, kind="stable")
    return order, ids[order]
