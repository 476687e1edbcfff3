"""Sums up the costs of the ops in each module call and in the calls inside it, as columns of the table `calls`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..log.nesting import Ints, depths_of
from .mode import ALLOCATED, LIVE_AFTER, LIVE_BEFORE
from .rows import Columns, OpRows
from .saved_memory import UNKNOWN

#: Rows of calls and of their enclosing calls, for each depth; inner calls come before outer ones.
_InnerFirst = Sequence[tuple[Ints, Ints]]


class CallTable:
    """Maps call ids to rows of the batches that are written together, and calls to their enclosing calls."""

    def __init__(self, batches: Sequence[Columns]) -> None:
        self._batches = batches
        call_id = np.concatenate([np.asarray(batch["call_id"], np.int64) for batch in batches])
        self.size = len(call_id)
        self._order = np.argsort(call_id, kind="stable")
        self._sorted = call_id[self._order]
        self.module_id = self._column("module_id")
        self.nth = self._column("nth")
        self._parents = self.rows_of(self._column("parent_call_id"))

    def rows_of(self, call_id: Ints) -> Ints:
        """Returns the row of each call; -1 if the call is not in these batches."""
        at = np.minimum(np.searchsorted(self._sorted, call_id), self.size - 1)
        rows: Ints = np.where(self._sorted[at] == call_id, self._order[at], -1)
        return rows

    def innermost_first(self) -> _InnerFirst:
        """Returns every call that has an enclosing call in these batches."""
        depths = depths_of(self._parents)
        order = np.argsort(-depths, kind="stable")
        ends = [0, *(np.flatnonzero(np.diff(depths[order])) + 1).tolist(), len(order)]
        levels = [order[begin:end] for begin, end in pairwise(ends)]
        parted = [level[self._parents[level] >= 0] for level in levels]
        return [(rows, self._parents[rows]) for rows in parted if len(rows)]

    def add(self, columns: Columns) -> None:
        """Divides columns of all calls among the batches that the calls came from."""
        first = 0
        for batch in self._batches:
            last = first + len(batch["call_id"])
            for name, values in columns.items():
                batch[name] = values[first:last]
            first = last

    def _column(self, name: str) -> Ints:
        found = [batch.get(name, np.full(len(batch["call_id"]), -1)) for batch in self._batches]
        return np.concatenate([np.ma.filled(np.ma.asarray(column, np.int64), -1) for column in found])


def add_costs(calls: CallTable, ops: OpRows) -> None:
    """Adds the columns `flops`, `allocated_bytes`, `peak_bytes` and `saved_bytes` to the calls."""
    runs = _Runs(calls, ops.calls.call_id)
    sums = _Sums(calls.size)
    sums.add("flops", runs.rows, runs.sum(np.maximum(ops.flops, 0)), runs.any(ops.flops == UNKNOWN))
    sums.add("allocated_bytes", runs.rows, runs.sum(ops.events[:, ALLOCATED]))
    charges = ops.charges
    charged = calls.rows_of(charges.call_id)
    kept = charges.size_bytes[charged >= 0]
    sums.add("saved_bytes", charged[charged >= 0], np.maximum(kept, 0), kept == UNKNOWN)
    sums.mark_unknown("saved_bytes", runs.rows[runs.any(charges.is_unseen)])
    before, after = (ops.events[:, column] for column in (LIVE_BEFORE, LIVE_AFTER))
    peak = _Peaks(calls.size, runs.rows, runs.first(before), runs.max(after))
    inner_first = calls.innermost_first()
    calls.add({**sums.columns(inner_first), "peak_bytes": peak.column(inner_first)})


class _Runs:
    """The runs of consecutive ops of one call, which are reduced before their calls are looked at one by one."""

    def __init__(self, calls: CallTable, call_id: Ints) -> None:
        """Finds the runs; of ops whose call has no row, there are none."""
        self._firsts = np.flatnonzero(np.diff(call_id, prepend=-2))
        rows = calls.rows_of(call_id[self._firsts])
        self._kept = rows >= 0
        self.rows: Ints = rows[self._kept]  # of the call of each run

    def first(self, values: Ints) -> Ints:
        """Returns the value of the first op of each run."""
        return values[self._firsts[self._kept]]

    def sum(self, values: Ints) -> Ints:
        """Returns the sum of each run."""
        return self._reduce(np.add, values)

    def max(self, values: Ints) -> Ints:
        """Returns the maximum of each run."""
        return self._reduce(np.maximum, values)

    def any(self, values: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Returns whether a value is true in each run."""
        return self._reduce(np.logical_or, values)

    def _reduce(self, function: np.ufunc, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return function.reduceat(values, self._firsts)[self._kept] if len(values) else values


class _Sums:
    """Sums by call, some of which are incomplete."""

    def __init__(self, size: int) -> None:
        names = ("flops", "allocated_bytes", "saved_bytes")
        self._sums = {name: np.zeros(size, np.int64) for name in names}
        self._unknown = {name: np.zeros(size, bool) for name in names}

    def add(self, name: str, rows: Ints, values: Ints, unknown: npt.NDArray[np.bool_] | None = None) -> None:
        np.add.at(self._sums[name], rows, values)
        if unknown is not None:
            self.mark_unknown(name, rows[unknown])

    def mark_unknown(self, name: str, rows: Ints) -> None:
        """Marks sums to which an unknown number is to be added."""
        self._unknown[name][rows] = True

    def columns(self, inner_first: _InnerFirst) -> dict[str, Any]:
        """Returns the sums, each with those of the calls inside."""
        return {name: self._column(name, inner_first) for name in self._sums}

    def _column(self, name: str, inner_first: _InnerFirst) -> Any:
        sums, unknown = self._sums[name], self._unknown[name]
        for rows, above in inner_first:
            np.add.at(sums, above, sums[rows])
            unknown[above[unknown[rows]]] = True
        return np.ma.masked_array(sums, unknown)


class _Peaks:
    """The peak memory of the outputs of ops in each call, in bytes, above what lived before the call's first op."""

    def __init__(self, size: int, rows: Ints, before: Ints, after: Ints) -> None:
        self._most = np.full(size, -1, np.int64)
        np.maximum.at(self._most, rows, after)
        self._first = np.full(size, len(rows), np.int64)  # run in each call
        self._first[rows[::-1]] = np.arange(len(rows))[::-1]
        self._before = np.append(before, 0)

    def column(self, inner_first: _InnerFirst) -> Any:
        """Returns the peaks, each with the calls inside."""
        for rows, above in inner_first:
            np.maximum.at(self._most, above, self._most[rows])
            np.minimum.at(self._first, above, self._first[rows])
        peak = self._most - self._before[self._first]
        return np.ma.masked_array(np.maximum(peak, 0), self._most < 0)
