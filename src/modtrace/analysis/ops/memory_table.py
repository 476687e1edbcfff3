"""Builds a table of the memory that modules save for backward in one step, and that their calls allocate."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...recording.phase import PHASES, ByPhase
from ...recording.protocols import RecordingData
from ..tables.chosen_step import ShownStep
from ..tables.columns import Column, Rows
from ..tables.inside import find_unseen
from ..tables.ops import StepOps, read_step_ops
from ..tables.placement import NO_PLACE_NAMES
from .sums import SavedByOp, SavedMemory, add_saved_by_calls, sum_inside, sum_saved, sum_saved_by_op


@dataclass(frozen=True)
class CallMemory:
    """The memory of a module's calls in one phase, including inner calls."""

    calls: int = 0
    allocated_bytes: int | None = None  # the maximum over the calls; None if one of them is not known
    peak_bytes: int | None = None  # the highest peak of a call; None if one of them is not known


NO_CALL_MEMORY = CallMemory()


@dataclass(frozen=True, kw_only=True)
class MemoryRow(ByPhase[CallMemory]):
    """The memory of a module, or of ops outside of modules."""

    name: str  # the path, or a root's name; (outside of modules), (optimizer)
    root: str | None  # the name of the root; None for no module
    path: str | None
    type: str | None
    saved: SavedMemory  # saved for backward by the module's own ops
    saved_inside: SavedMemory  # saved for backward by its own ops and those of modules inside it
    share: float | None  # the share of its own ops in all saved memory; None if nothing is saved
    ops: tuple[SavedByOp, ...] = ()  # its own ops by name, if they were requested
    forward: CallMemory = NO_CALL_MEMORY
    backward: CallMemory = NO_CALL_MEMORY
    recompute: CallMemory = NO_CALL_MEMORY
    optimizer: CallMemory = NO_CALL_MEMORY


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """The memory of one step by module, by descending memory saved."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None if nothing was recorded
    recorded: bool  # whether any step of the recording has ops
    rows: tuple[MemoryRow, ...]
    saved: SavedMemory  # saved by all ops of the step
    peak_bytes: int | None  # the highest peak of a call; None if none is known


def build_memory_table(data: RecordingData, *, step: int | None = None, ops: bool = False) -> MemoryTable:
    """Returns what the modules of a step save for backward, and what their calls allocate.

    Args:
        data: the recording.
        step: the number of the step; None chooses as `build_module_tree` does.
        ops: whether each row lists the ops that save memory.

    Raises:
        ValueError: the recording has no such step.
    """
    of_step = read_step_ops(data, step=step)
    unseen = find_unseen(data, of_step.step.step).calls if of_step.step else frozenset()
    memory = _find_call_memory(of_step, unseen)
    of_step = add_saved_by_calls(of_step)
    [total] = sum_saved(of_step, of_step.where * 0, 1)
    rows = _build_rows(of_step, memory, total.saved_bytes, by_op=ops)
    peaks = [of_calls.peak_bytes for of_calls in memory.values() if of_calls.peak_bytes is not None]
    return MemoryTable(
        command=data.meta.argv,
        marks=data.meta.marks,
        step=of_step.step,
        recorded=of_step.recorded,
        rows=tuple(sorted(rows, key=_size)),
        saved=total,
        peak_bytes=max(peaks, default=None),
    )


def _size(row: MemoryRow) -> tuple[int, int, int, str, str]:
    inside = -row.saved_inside.saved_bytes
    return -row.saved.saved_bytes, -row.saved.recompute_bytes, inside, row.root or "", row.name


def _find_call_memory(ops: StepOps, unseen: Collection[int]) -> Mapping[tuple[int, str], CallMemory]:
    """Returns the memory of the step's calls by place and phase; `unseen` calls allocate in compiled code."""
    calls = ops.calls
    is_compiled = calls.column("compiled")[calls.origin] == 1
    is_compiled[ops.call[ops.call >= 0]] = False  # code compiled before the recording runs ops one by one
    is_unknown = is_compiled | np.isin(calls.call_id, np.array([*unseen], np.int64))
    for level in reversed(calls.levels[1:]):
        np.logical_or.at(is_unknown, calls.parent[level], is_unknown[level])
    rows = np.flatnonzero(calls.in_step)
    key = calls.where[rows] * len(PHASES) + calls.phase[rows]
    keys, group, counts = np.unique(key, return_inverse=True, return_counts=True)
    allocated, peak = (
        _find_largest(np.where(is_unknown, -1, calls.column(name))[rows], group, len(counts))
        for name in ("allocated_bytes", "peak_bytes")
    )
    places = (divmod(key, len(PHASES)) for key in keys.tolist())
    memory = map(CallMemory, counts.tolist(), allocated, peak)
    return {(where, PHASES[phase]): of_calls for (where, phase), of_calls in zip(places, memory, strict=True)}


def _find_largest(values: Column, group: Rows, groups: int) -> list[int | None]:
    """Returns the largest value of each group; None if one of its values is -1, which means not known."""
    largest, smallest = np.full(groups, -1, np.int64), np.full(groups, np.iinfo(np.int64).max)
    np.maximum.at(largest, group, values)
    np.minimum.at(smallest, group, values)
    return [None if low < 0 else high for low, high in zip(smallest.tolist(), largest.tolist(), strict=True)]


#: Groups of ops are numbered from 0; groups outside of the module tree have negative numbers.
_NO_PLACES = len(NO_PLACE_NAMES)


def _build_rows(
    ops: StepOps, memory: Mapping[tuple[int, str], CallMemory], saved_bytes: int, *, by_op: bool
) -> Iterator[MemoryRow]:
    """Yields a row for each place that has ops, or calls of the step."""
    calls, group = ops.calls, ops.where + _NO_PLACES
    above = [place.parent + _NO_PLACES if place.parent >= 0 else -1 for place in calls.places]
    parent = np.array([-1] * _NO_PLACES + above, np.int64)
    saved, inside = sum_saved(ops, group, len(parent)), sum_inside(ops, group, parent)
    by_name = sum_saved_by_op(ops, group) if by_op else {}
    called = {where for where, _ in memory}
    for number, own in enumerate(saved):
        where = number - _NO_PLACES
        if own == SavedMemory() and where not in called:
            continue
        place = calls.name(where)
        yield MemoryRow(
            name=place.name,
            root=place.root,
            path=place.path,
            type=place.type,
            saved=own,
            saved_inside=inside[number],
            share=own.saved_bytes / saved_bytes if saved_bytes else None,
            ops=tuple(by_name.get(number, ())),
            **{phase: memory.get((where, phase), NO_CALL_MEMORY) for phase in PHASES},
        )
