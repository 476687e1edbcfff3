"""Reads calls as columns: their tree, and where each call stands in the module tree."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from .columns import Column, RowFinder, Rows, column_of, find_rows, keep_rows, phase_codes, ranges
from .placement import NO_PLACE_NAMES, NOWHERE, OPTIMIZERS, PlaceName, Placer

#: A recompute or backward takes the place of the call that it repeats, so it is placed after that.
_PLACING_ORDER = (FORWARD, RECOMPUTE, BACKWARD)


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """Calls as columns; `parent` and `repeats` are row numbers."""

    table: pa.Table  # the table of all calls
    placer: Placer
    call_id: Column
    module: Column  # NO_MODULE where null
    phase: Column  # codes of PHASES
    parent: Rows  # row of the surrounding call of the same phase
    repeats: Rows  # row of the forward of a backward, or of the call that a recompute repeats
    levels: list[Rows]  # the rows of the calls without parent, then of their children, and so on
    place: Rows  # the index of each call's place in the module tree; NOWHERE for an optimizer's step
    start_ns: Column
    duration_ns: Column  # excludes the time that modtrace spent measuring; 0 where the end was not seen
    overhead_ns: Column  # the time that modtrace spent measuring, which `duration_ns` excludes
    device_start_ns: Column  # -1 where the device times are not known
    device_end_ns: Column
    ended: Column
    raised: Column
    in_step: Column  # False for a call of an earlier step to which one of the steps refers

    def __len__(self) -> int:
        return len(self.module)

    @cached_property
    def origin(self) -> Rows:
        """The forward call to which each call belongs, which is the call itself for a forward."""
        rows = np.arange(len(self))
        for _ in range(2 if len(self) else 0):  # a backward may refer to a recompute
            rows = np.where(self.repeats[rows] >= 0, self.repeats[rows], rows)
        return rows

    @cached_property
    def nth(self) -> Column:
        """The number of each call among those of its module in its step, from 0."""
        return self.column("nth")

    @cached_property
    def where(self) -> Rows:
        """The index of each call's place in the module tree; OPTIMIZERS for an optimizer's step."""
        return np.where(self.phase == PHASES.index(OPTIMIZER), OPTIMIZERS, self.place)

    @cached_property
    def places(self) -> tuple[PlaceName, ...]:
        """The names of the places in the module tree, by the indices in `where`."""
        return self.placer.name_places()

    def name(self, where: int) -> PlaceName:
        """Returns the name of the place with this index."""
        return self.places[where] if where >= 0 else PlaceName(NO_PLACE_NAMES[where])

    @cached_property
    def full_names(self) -> tuple[Column, tuple[str, ...]]:
        """Codes of the names of calls, and the names: `path`, or `path@1` for a second call in a step."""
        width = int(self.nth.max(initial=-1)) + 2
        keys, code = np.unique(self.place * width + (self.nth + 1), return_inverse=True)
        names = [
            (self.places[place] if place != NOWHERE else PlaceName("optimizer")).name_call(number - 1)
            for place, number in zip((keys // width).tolist(), (keys % width).tolist(), strict=True)
        ]
        return code, tuple(names)

    def column(self, name: str) -> Column:
        """Returns a column of the table `calls` by its name, with -1 for null."""
        return column_of(self.table, name)


def outermost_calls(table: pa.Table) -> Column:
    """Returns the ids of the forward calls of a table that are inside no other call."""
    is_one = (column_of(table, "parent_call_id") < 0) & (phase_codes(table["phase"]) == PHASES.index(FORWARD))
    found: Column = column_of(table, "call_id")[is_one]
    return found


def has_threads(data: RecordingData) -> bool:
    """Returns whether several threads called models."""
    calls = data.table("calls")
    threads = column_of(calls, "thread")[to_numpy(calls["parent_call_id"].is_null())]
    return len(np.unique(threads)) > 1


def read_calls(table: pa.Table, placer: Placer, steps: Column | int, *, also: Column | None = None) -> Calls:
    """Returns the calls of steps, with the calls of earlier steps to which their backwards and recomputes refer.

    Args:
        table: the table `calls`.
        placer: finds the places of modules in the module tree.
        steps: the numbers of the steps, or a single one.
        also: ids of further calls to read, such as those to which ops refer; -1 for none.
    """
    step, call_ids = column_of(table, "step"), column_of(table, "call_id")
    is_kept = np.isin(step, steps)
    referred = _read_repeated(table)[is_kept]
    if also is not None:
        referred = np.concatenate([referred, also])
    missing = referred[(referred >= 0) & (find_rows(call_ids[is_kept], referred) < 0)]
    if len(missing):
        is_kept = is_kept | np.isin(step, step[np.isin(call_ids, missing)])
    return _read_table(keep_rows(table, is_kept), placer, steps)


def read_all_calls(table: pa.Table, placer: Placer) -> Calls:
    """Returns the calls of all steps."""
    return _read_table(table, placer, np.empty(0, np.int64))


def _read_table(table: pa.Table, placer: Placer, steps: Column | int) -> Calls:
    read = partial(column_of, table)
    start_ns, ended = read("start_ns"), to_numpy(table["end_ns"].is_valid())
    took_ns = np.where(ended, read("end_ns") - start_ns, 0)
    overhead_ns = np.clip(read("overhead_ns"), 0, took_ns)
    phase, module, call_id = phase_codes(table["phase"]), read("module_id"), read("call_id")
    find_call = RowFinder(call_id)
    parent, repeats = find_call(read("parent_call_id")), find_call(_read_repeated(table))
    if len(phase):
        parent = np.where((parent >= 0) & (phase[parent] == phase), parent, -1)
    levels = list(iterate_levels(parent))
    return Calls(
        table=table,
        placer=placer,
        call_id=call_id,
        module=module,
        phase=phase,
        parent=parent,
        repeats=repeats,
        levels=levels,
        place=_find_places(phase, module, parent, repeats, levels, placer),
        start_ns=start_ns,
        duration_ns=took_ns - overhead_ns,
        overhead_ns=overhead_ns,
        device_start_ns=read("device_start_ns"),
        device_end_ns=read("device_end_ns"),
        ended=ended,
        raised=read("raised"),
        in_step=np.isin(read("step"), steps),
    )


def _find_places(
    phase: Column, module: Column, parent: Rows, repeats: Rows, levels: list[Rows], placer: Placer
) -> Rows:
    """Returns the index of each call's place; a backward or a recompute has that of the call that it repeats."""
    place = np.full(len(phase), NOWHERE, np.int64)
    for code in map(PHASES.index, _PLACING_ORDER):
        for level in levels:
            rows = level[phase[level] == code]
            place[rows] = np.where(repeats[rows] >= 0, place[repeats[rows]], NOWHERE)
            rows = rows[place[rows] == NOWHERE]
            callers = np.where(parent[rows] >= 0, place[parent[rows]], NOWHERE)
            place[rows] = placer.place_all(module[rows], callers)
    return place


def _read_repeated(table: pa.Table) -> Column:
    forward = column_of(table, "forward_call_id")
    return np.where(forward >= 0, forward, column_of(table, "recompute_of"))


def phases_of(data: RecordingData) -> set[str]:
    """Returns the phases that occur in the calls, ops and values of a recording, or of one step of it."""
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
    """Numbers of calls in pre-order. Those inside a call have the numbers after its own, up to its `last`."""

    number: Rows
    last: Rows

    def outermost(self, rows: Rows) -> Rows:
        """Returns those of the rows `rows` that are inside no other of them."""
        if len(rows) < 2:
            return rows
        return self.outermost_of_groups(rows, np.zeros(len(rows), np.int64))

    def outermost_of_groups(self, rows: Rows, group: Rows) -> Rows:
        """Returns those of the rows `rows` that are inside no other of their group; groups have numbers from 0."""
        order = np.lexsort((self.number[rows], group))
        rows = rows[order]
        # The numbers of a group's calls are above those of all groups before it.
        before = group[order] * len(self.number)
        reached = np.maximum.accumulate(self.last[rows] + before)
        is_outer = np.ones(len(rows), bool)
        is_outer[1:] = (self.number[rows] + before)[1:] > reached[:-1]
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
