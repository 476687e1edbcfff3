"""Reads the calls of one step as columns, and the tree that they form."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData
from .columns import Column, RowFinder, Rows, column_of, phase_codes, ranges

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


def has_threads(data: RecordingData) -> bool:
    """Returns whether several threads called models."""
    calls = data.table("calls")
    threads = column_of(calls, "thread")[to_numpy(calls["parent_call_id"].is_null())]
    return len(np.unique(threads)) > 1


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


def phases_of(data: RecordingData) -> set[str]:
    """Returns the phases of the calls, ops and values of a recording, or of a step of it."""
    codes = (np.unique(phase_codes(data.table(name)["phase"])) for name in ("calls", "ops", "values"))
    return {PHASES[code] for code in np.concatenate([*codes]).tolist() if code >= 0}


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
