"""Builds a table of the memory that modules save for backward in steps, and that their calls allocate."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...recording.module_path import order_of
from ...recording.phase import PHASES, ByPhase
from ...recording.protocols import RecordingData
from ..tables.chosen_step import ShownStep
from ..tables.columns import Bools, Column, Rows, find_rows
from ..tables.inside import find_unseen
from ..tables.ops import StepOps, read_ops
from ..tables.placement import NO_PLACE_NAMES
from ..tables.quartiles import Outlier, Quartiles, find_medians, find_outliers, find_quartiles
from ..tables.shown_steps import choose_steps
from .alike import find_alike
from .sums import (
    NOTHING_SAVED,
    SavedByOp,
    SavedMemory,
    add_saved_by_calls,
    find_medians_of_sums,
    find_saved_in_steps,
    sum_inside,
    sum_saved,
    sum_saved_by_op,
)


@dataclass(frozen=True, slots=True)
class CallMemory:
    """The memory of a module's calls in one phase, including inner calls.

    Of several steps, they are medians over the steps in which calls ran, each by itself.
    """

    calls: int = 0
    allocated_bytes: int | None = None  # the maximum over the calls; None if one of them is not known
    peak_bytes: int | None = None  # the highest peak of a call; None if one of them is not known
    allocated_over_steps: Quartiles | None = None  # None for a single step
    peak_over_steps: Quartiles | None = None


NO_CALL_MEMORY = CallMemory()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow(ByPhase[CallMemory]):
    """The memory of a module, or of ops outside of modules."""

    name: str  # the path, or a root's name; (outside of modules), (optimizer)
    root: str | None  # the name of the root; None for no module
    path: str | None
    type: str | None
    saved: SavedMemory  # saved for backward by the module's own ops
    saved_inside: SavedMemory  # saved for backward by its own ops and those of modules inside it
    share: float | None  # the share of its own ops in all saved memory; None if nothing is saved
    steps: int | None = (
        None  # in how many of several steps its ops ran; None for a single step, or without ops
    )
    ops: tuple[SavedByOp, ...] = ()  # its own ops by name, if they were requested
    forward: CallMemory = NO_CALL_MEMORY
    backward: CallMemory = NO_CALL_MEMORY
    recompute: CallMemory = NO_CALL_MEMORY
    optimizer: CallMemory = NO_CALL_MEMORY
    count: int = 1  # for how many modules it stands; calls are those of one of them


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """The memory of one step, or the medians of several, by module, by descending memory saved."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None if nothing was recorded
    recorded: bool  # whether any step of the recording has ops
    rows: tuple[MemoryRow, ...]
    saved: SavedMemory  # saved by all ops of the step
    peak_bytes: int | None  # the highest peak of a call; None if none is known
    peak_over_steps: Quartiles | None = None  # of the highest peaks of several steps; None for a single step
    peak_step: int | None = None  # the step with the highest of them
    outliers: tuple[Outlier, ...] = ()  # steps that save at least twice the median


def build_memory_table(
    data: RecordingData,
    *,
    step: int | None = None,
    steps: Any = None,
    ops: bool = False,
    fold: bool = False,
) -> MemoryTable:
    """Returns what the modules of steps save for backward, and what their calls allocate.

    Args:
        data: the recording.
        step: the number of a step that is shown alone.
        steps: the range of the steps whose medians are shown; without either they are chosen as by `build_module_tree`.
        ops: whether each row lists the ops that save memory.
        fold: whether modules that repeat, and save and allocate as much, are one row.

    Raises:
        TypeError, ValueError: the recording has no such step.
    """
    of_step = read_ops(data, choose_steps(data, step, steps, tables=("calls", "ops")))
    unseen = find_unseen(data, *of_step.steps.numbers.tolist()).calls
    memory, peaks = _find_call_memory(of_step, unseen)
    of_step = add_saved_by_calls(of_step)
    [total] = sum_saved(of_step, of_step.where * 0, 1)
    groups = of_step.where + _NO_PLACES
    saved_bytes, has_ops = find_saved_in_steps(of_step, groups, _NO_PLACES + len(of_step.calls.places))
    numbers, names = of_step.steps.numbers, [_name(of_step, group) for group in range(len(saved_bytes))]
    [peak] = _to_quartiles(peaks[None])
    rows = [*_build_rows(of_step, memory, saved_bytes, has_ops, by_op=ops)]
    return MemoryTable(
        command=data.meta.argv,
        marks=data.meta.marks,
        step=of_step.step,
        recorded=of_step.recorded,
        rows=tuple(sorted(_fold(rows) if fold else rows, key=_size)),
        saved=total,
        peak_bytes=peak.median if peak else None,
        peak_over_steps=peak if of_step.steps.several else None,
        peak_step=int(numbers[peaks.argmax()]) if peak and of_step.steps.several else None,
        outliers=find_outliers(numbers, saved_bytes.sum(axis=0), saved_bytes, names),
    )


def _size(row: MemoryRow) -> tuple[object, ...]:
    inside = -row.saved_inside.saved_bytes
    return -row.saved.saved_bytes, -row.saved.recompute_bytes, inside, row.root or "", order_of(row.name)


def _fold(rows: Sequence[MemoryRow]) -> Iterator[MemoryRow]:
    likes = [
        (row.type, row.saved, row.saved_inside, row.steps, row.ops, _sizes_of_calls(row)) for row in rows
    ]
    for path, alike in find_alike([(row.root, row.path) for row in rows], likes):
        row, count = rows[alike[0]], len(alike)
        if count == 1 or path is None:
            yield row
            continue
        yield replace(
            row,
            name=path,
            path=path,
            saved=row.saved.times(count),
            saved_inside=row.saved_inside.times(count),
            share=None if row.share is None else row.share * count,
            ops=tuple(replace(op, saved=op.saved.times(count)) for op in row.ops),
            count=count,
        )


def _sizes_of_calls(row: MemoryRow) -> tuple[Hashable, ...]:
    memory = [row.phase(phase) for phase in PHASES]
    return tuple((one.calls, one.allocated_bytes, one.peak_bytes) for one in memory)


def _find_call_memory(
    ops: StepOps, unseen: Collection[int]
) -> tuple[Mapping[tuple[int, str], CallMemory], Column]:
    """Returns the memory of calls by place and phase, and the highest peak in each step; -1 where it is not known.

    Calls in `unseen` allocate in compiled code.
    """
    calls = ops.calls
    is_compiled = calls.column("compiled")[calls.origin] == 1
    is_compiled[ops.call[ops.call >= 0]] = False  # code compiled before the recording runs ops one by one
    is_unknown = is_compiled | np.isin(calls.call_id, np.array([*unseen], np.int64))
    for level in reversed(calls.levels[1:]):
        np.logical_or.at(is_unknown, calls.parent[level], is_unknown[level])
    rows = np.flatnonzero(calls.in_step)
    keys, group = np.unique(calls.where[rows] * len(PHASES) + calls.phase[rows], return_inverse=True)
    step = find_rows(ops.steps.numbers, calls.column("step")[rows])
    shape = len(keys), len(ops.steps.numbers)
    counts = find_medians_of_sums(group, step, np.ones(len(rows)), shape).tolist()
    allocated, peak = (
        _find_largest(np.where(is_unknown, -1, calls.column(name))[rows], group, step, shape)
        for name in ("allocated_bytes", "peak_bytes")
    )
    keyed = zip(keys.tolist(), counts, _to_quartiles(allocated), _to_quartiles(peak), strict=True)
    memory = {
        (key // len(PHASES), PHASES[key % len(PHASES)]): CallMemory(
            calls=count,
            allocated_bytes=sizes.median if sizes else None,
            peak_bytes=peaks.median if peaks else None,
            allocated_over_steps=sizes if ops.steps.several else None,
            peak_over_steps=peaks if ops.steps.several else None,
        )
        for key, count, sizes, peaks in keyed
    }
    return memory, peak[(peak != _UNKNOWN).all(axis=1)].max(axis=0, initial=_NO_CALLS)


#: The memory of calls in a step in which it is not known, and in a step in which none of them ran.
_UNKNOWN, _NO_CALLS = -2, -1


def _find_largest(values: Column, group: Rows, step: Rows, shape: tuple[int, int]) -> Column:
    """Returns the largest value of each group in each step; -1 stands for a value that is not known."""
    largest, smallest = np.full(shape, -1, np.int64), np.full(shape, np.iinfo(np.int64).max)
    np.maximum.at(largest, (group, step), values)
    np.minimum.at(smallest, (group, step), values)
    return np.where(smallest < 0, _UNKNOWN, largest)


def _to_quartiles(sizes: Column) -> list[Quartiles | None]:
    """Returns the quartiles of each row over the steps with calls; None if a size is not known, or there is none."""
    is_known = (sizes >= 0).any(axis=1) & (sizes != _UNKNOWN).all(axis=1)
    quartiles = iter(find_quartiles(sizes[is_known], sizes[is_known] >= 0))
    return [next(quartiles) if known else None for known in is_known.tolist()]


#: Groups of ops are numbered from 0; groups outside of the module tree have negative numbers.
_NO_PLACES = len(NO_PLACE_NAMES)


def _name(ops: StepOps, group: int) -> tuple[str, None]:
    return ops.calls.name(group - _NO_PLACES).name, None


def _build_rows(
    ops: StepOps,
    memory: Mapping[tuple[int, str], CallMemory],
    saved_bytes: Column,
    has_ops: Bools,
    *,
    by_op: bool,
) -> Iterator[MemoryRow]:
    """Yields a row for each place that has ops, or calls of the steps.

    `saved_bytes` and `has_ops` have a row for each place and a column for each step.
    """
    calls, group = ops.calls, ops.where + _NO_PLACES
    above = [place.parent + _NO_PLACES if place.parent >= 0 else -1 for place in calls.places]
    parent = np.array([-1] * _NO_PLACES + above, np.int64)
    saved, inside = sum_saved(ops, group, len(parent)), sum_inside(ops, group, parent)
    by_name = sum_saved_by_op(ops, group) if by_op else {}
    all_bytes = saved_bytes.sum(axis=0)
    shares = find_medians(saved_bytes / np.maximum(all_bytes, 1), has_ops & (all_bytes > 0)).tolist()
    steps = has_ops.sum(axis=1).tolist()
    called = {where for where, _ in memory}
    for number, own in enumerate(saved):
        where = number - _NO_PLACES
        if own == NOTHING_SAVED and where not in called:
            continue
        place = calls.name(where)
        of_calls: dict[str, Any] = {phase: memory.get((where, phase), NO_CALL_MEMORY) for phase in PHASES}
        yield MemoryRow(
            name=place.name,
            root=place.root,
            path=place.path,
            type=place.type,
            saved=own,
            saved_inside=inside[number],
            share=shares[number] if all_bytes.any() else None,
            steps=steps[number] or None if ops.steps.several else None,
            ops=tuple(by_name.get(number, ())),
            **of_calls,
        )
