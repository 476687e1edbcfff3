"""Reads the calls of one step as columns, and the tree that they form."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData

Rows = npt.NDArray[np.int64]  # positions in the columns of `Calls`; -1 for none
Column = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

NO_MODULE = -1
_COLUMNS = (
    "call_id",
    "step",
    "module_id",
    "parent_call_id",
    "phase",
    "forward_call_id",
    "recompute_of",
    "start_ns",
    "end_ns",
    "overhead_ns",
    "device_start_ns",
    "device_end_ns",
    "raised",
)


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Calls as columns; `parent` and `repeats` are row numbers."""

    call_id: Column
    module: Column  # NO_MODULE where null
    phase: Column  # codes of PHASES
    parent: Rows  # the call of the same phase around it
    repeats: Rows  # the forward of a backward, the call that a recompute repeats
    start_ns: Column
    duration_ns: Column  # without what modtrace spent measuring inside; 0 where the end was not seen
    overhead_ns: Column  # what it spent: the call ended after both together
    device_start_ns: Column  # -1 where it is not known, as the end
    device_end_ns: Column
    ended: Column
    raised: Column
    in_step: Column  # False: a call of an earlier step that one of this step refers to

    def __len__(self) -> int:
        return len(self.module)


def outermost_calls(table: pa.Table) -> Column:
    """Returns the ids of the forward calls of a table that no other call is around."""
    is_one = (column_of(table, "parent_call_id") < 0) & (phase_codes(table["phase"]) == PHASES.index(FORWARD))
    found: Column = column_of(table, "call_id")[is_one]
    return found


def read_calls(table: pa.Table, step: int | None, *, also: Column | None = None) -> Calls:
    """Returns the calls of a step, with the calls of earlier steps to which its backwards and recomputes refer.

    Args:
        table: the table `calls`.
        step: the number of the step.
        also: ids of further calls that are referred to; -1 for none.
    """
    table = table.select(_COLUMNS)
    steps = column_of(table, "step")
    kept = steps == step if step is not None else np.zeros(len(steps), bool)
    referred = _repeated(table)[kept]
    if also is not None:
        referred = np.concatenate([referred, also])
    earlier = _steps_of(referred, table, kept, steps)
    if len(earlier):
        kept = kept | np.isin(steps, earlier)
    return _to_calls(table.filter(from_numpy(kept)), step)


def read_all_calls(table: pa.Table) -> Calls:
    """Returns the calls of all steps."""
    return _to_calls(table.select(_COLUMNS), None)


def _to_calls(table: pa.Table, step: int | None) -> Calls:
    start_ns, end_ns = column_of(table, "start_ns"), column_of(table, "end_ns")
    ended = to_numpy(table["end_ns"].is_valid())
    took_ns = np.where(ended, end_ns - start_ns, 0)
    overhead_ns = np.clip(column_of(table, "overhead_ns"), 0, took_ns)
    phase = phase_codes(table["phase"])
    call_id = column_of(table, "call_id")
    row_of = RowFinder(call_id)
    parent = row_of(column_of(table, "parent_call_id"))
    return Calls(
        call_id=call_id,
        module=column_of(table, "module_id"),
        phase=phase,
        parent=np.where((parent >= 0) & (phase[parent] == phase), parent, -1) if len(phase) else parent,
        repeats=row_of(_repeated(table)),
        start_ns=start_ns,
        duration_ns=took_ns - overhead_ns,
        overhead_ns=overhead_ns,
        device_start_ns=column_of(table, "device_start_ns"),
        device_end_ns=column_of(table, "device_end_ns"),
        ended=ended,
        raised=column_of(table, "raised"),
        in_step=column_of(table, "step") == step,
    )


def _steps_of(wanted: Column, table: pa.Table, kept: Column, steps: Column) -> Column:
    """Returns the steps of the calls that are wanted and not yet kept."""
    call_ids = column_of(table, "call_id")
    missing = np.setdiff1d(wanted[wanted >= 0], call_ids[kept])
    return np.unique(steps[np.isin(call_ids, missing)])


def _repeated(table: pa.Table) -> Column:
    forward = column_of(table, "forward_call_id")
    return np.where(forward >= 0, forward, column_of(table, "recompute_of"))


def column_of(table: pa.Table, name: str) -> Column:
    """Returns a column with -1 in place of nulls."""
    return to_numpy(table[name], null=-1)


def columns_at(table: object, rows: Column) -> dict[str, Any]:
    """Returns the columns of a dataclass at some rows, by their names."""
    return {name: each[rows] for name, each in vars(table).items() if isinstance(each, np.ndarray)}


def join_columns(tables: Sequence[object]) -> dict[str, Any]:
    """Returns the columns of dataclasses of one type by their names, one table after the other."""
    names = [name for name, each in vars(tables[0]).items() if isinstance(each, np.ndarray)]
    return {name: np.concatenate([getattr(each, name) for each in tables]) for name in names}


def phase_codes(column: pa.ChunkedArray) -> Column:
    """Returns the phases as codes of `PHASES`, for any codes in the chunks; -1 for null."""
    chunks = []
    for chunk in column.chunks:
        codes = np.array([PHASES.index(each) for each in chunk.dictionary.to_pylist()] + [-1], np.int8)
        chunks.append(codes[to_numpy(chunk.indices, null=-1)])
    return np.concatenate(chunks) if chunks else np.empty(0, np.int8)


class RowFinder:
    """Finds the rows of ids."""

    def __init__(self, ids: Column) -> None:
        self._first = ids[0] if len(ids) and (np.diff(ids) == 1).all() else None  # of ids without gaps
        self._count = len(ids)
        if self._first is None:
            self._order = np.argsort(ids, kind="stable")
            self._sorted = ids[self._order]

    def __call__(self, wanted: Column) -> Rows:
        """Returns the row of each id; -1 if there is none."""
        if not self._count:
            return np.full(len(wanted), -1, np.int64)
        if self._first is not None:
            at = np.subtract(wanted, self._first, dtype=np.int64)
            return np.where((at >= 0) & (at < self._count), at, -1)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.where(self._sorted[at] == wanted, self._order[at], -1)


def phases_of(data: RecordingData) -> set[str]:
    """Returns the phases of the calls, ops and values of a recording, or of a step of it."""
    codes = (np.unique(phase_codes(data.table(name)["phase"])) for name in ("calls", "ops", "values"))
    return {PHASES[code] for code in np.concatenate([*codes]).tolist() if code >= 0}


def take(column: Column, rows: Rows) -> Rows:
    """Returns what the column has at each row; -1 for row -1."""
    return np.where(rows >= 0, column[rows], -1) if len(column) else np.full(len(rows), -1, np.int64)


def count_before(keys: Rows, order: Rows | None = None) -> Rows:
    """Returns of each row how many rows with its key come before it.

    Args:
        keys: the keys.
        order: what the rows are ordered by; None: they are in order.
    """
    rows = np.argsort(keys, kind="stable") if order is None else np.lexsort((order, keys))
    is_first = np.ones(len(rows), bool)
    is_first[1:] = keys[rows][1:] != keys[rows][:-1]
    at = np.arange(len(rows))
    counts = np.empty(len(rows), np.int64)
    counts[rows] = at - np.maximum.accumulate(np.where(is_first, at, 0)) if len(rows) else at
    return counts


def split_rows(rows: Rows, keys: Column) -> Iterable[tuple[int, Rows]]:
    """Yields each key in ascending order, with its rows in their order."""
    order = np.argsort(keys, kind="stable")
    distinct, first = np.unique(keys[order], return_index=True)
    groups = np.split(rows[order], first[1:]) if len(rows) else []
    return zip(distinct.tolist(), groups, strict=True)


class Groups:
    """Rows by a key from 0 on."""

    def __init__(self, keys: Rows, rows: Rows, size: int) -> None:
        order = np.argsort(keys, kind="stable")
        self._rows, self._starts = rows[order], np.searchsorted(keys[order], np.arange(size + 1))

    def __getitem__(self, key: int) -> Rows:
        return self._rows[self._starts[key] : self._starts[key + 1]]


def ranges(first: Rows, counts: Rows) -> Rows:
    """Returns the rows of some ranges, one range after the other, each from its first row on."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def iterate_levels(parent: Rows) -> Iterator[Rows]:
    """Yields the rows without parent, then their children, and so on. Children of one parent are adjacent."""
    order = np.argsort(parent, kind="stable")
    counts = np.bincount(parent + 1, minlength=len(parent) + 1)
    ends = np.cumsum(counts)
    level = order[: counts[0]]
    while len(level):
        yield level
        widths = counts[level + 1]
        level = order[ranges(ends[level + 1] - widths, widths)]


@dataclass(frozen=True)
class CallOrder:
    """Calls numbered in pre-order. The calls inside a call have the numbers from its own up to `last`."""

    number: Rows
    last: Rows

    def outermost(self, rows: Rows) -> Rows:
        """Returns those of `rows` that are not inside another one of them."""
        rows = rows[np.argsort(self.number[rows])]
        reached = np.maximum.accumulate(self.last[rows])
        is_outer = np.ones(len(rows), bool)
        is_outer[1:] = self.number[rows][1:] > reached[:-1]
        return rows[is_outer]


def number_calls(levels: list[Rows], parent: Rows) -> CallOrder:
    """Numbers the calls in pre-order, one level at a time."""
    size = np.ones(len(parent), np.int64)
    for level in reversed(levels[1:]):
        np.add.at(size, parent[level], size[level])
    number = np.zeros(len(parent), np.int64)
    for depth, level in enumerate(levels):
        before = np.cumsum(size[level]) - size[level]
        if depth:
            above = parent[level]
            is_first = np.ones(len(level), bool)
            is_first[1:] = above[1:] != above[:-1]
            before = before - before[is_first][np.cumsum(is_first) - 1] + number[above] + 1
        number[level] = before
    return CallOrder(number, number + size - 1)
