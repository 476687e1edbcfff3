"""Builds a table of the memory that modules keep for the backward of one step, and that their calls allocate."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE, ByPhase
from ...recording.protocols import RecordingData
from ..tables.chosen_step import ShownStep
from ..tables.columns import Column, Rows
from ..tables.inside import find_unseen
from ..tables.ops import NO_PLACE_NAMES, PlacedCalls, StepOps, read_step_ops
from .sums import SavedByOp, SavedMemory, add_saved_by_calls, sum_inside, sum_saved, sum_saved_by_op


@dataclass(frozen=True, kw_only=True)
class CallMemory:
    """The memory of a module's calls in one phase, with what runs inside them."""

    calls: int = 0
    allocated_bytes: int | None = None  # by the call that allocates most; None: not known of one of them
    peak_bytes: int | None = None  # of the call with the highest peak; None: not known of one of them


NO_CALL_MEMORY = CallMemory()


def _find_call_memory(ops: StepOps, unseen: Collection[int]) -> Mapping[tuple[int, str], CallMemory]:
    """Returns the memory of the step's calls, by place and phase; `unseen`: those in which compiled code allocates."""
    placed, calls = ops.placed, ops.placed.calls
    is_compiled = placed.column("compiled")[placed.origin] == 1
    is_compiled[ops.call[ops.call >= 0]] = False  # code from before the recording, whose ops run one by one
    is_unknown = is_compiled | np.isin(calls.call_id, np.array([*unseen], np.int64))
    for level in reversed(placed.levels[1:]):
        np.logical_or.at(is_unknown, calls.parent[level], is_unknown[level])
    rows = np.flatnonzero(calls.in_step)
    keys = np.stack([placed.where[rows], placed.calls.phase[rows]])
    distinct, group, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    allocated, peak = (
        _find_largest(np.where(is_unknown, -1, placed.column(name))[rows], group, len(counts))
        for name in ("allocated_bytes", "peak_bytes")
    )
    return {
        (where, PHASES[phase]): CallMemory(
            calls=int(counts[at]), allocated_bytes=allocated[at], peak_bytes=peak[at]
        )
        for at, (where, phase) in enumerate(distinct.T.tolist())
    }


def _find_largest(values: Column, group: Rows, groups: int) -> list[int | None]:
    """Returns the largest value of each group; None if one of its values is -1, which means not known."""
    largest, smallest = np.full(groups, -1, np.int64), np.full(groups, np.iinfo(np.int64).max)
    np.maximum.at(largest, group, values)
    np.minimum.at(smallest, group, values)
    return [None if low < 0 else high for low, high in zip(smallest.tolist(), largest.tolist(), strict=True)]


#: Groups of ops are numbered from 0, and where they ran in no module, their index is negative.
_NO_PLACES = len(NO_PLACE_NAMES)

_NOTHING = SavedMemory()


@dataclass(frozen=True, kw_only=True)
class MemoryRow(ByPhase[CallMemory]):
    """The memory of a module, or of what ran outside of modules."""

    name: str  # the path, of a root its name; (outside of modules), (optimizer)
    root: str | None  # the name of the root; None where it is no module
    path: str | None
    type: str | None
    saved: SavedMemory  # for backward, by its own ops
    saved_inside: SavedMemory  # the same with the ops of the modules inside it
    share: float | None  # the part of all that is saved that its own ops save; None: nothing is saved
    ops: tuple[SavedByOp, ...] = ()  # its own ops by name, where they were asked for
    forward: CallMemory = NO_CALL_MEMORY
    backward: CallMemory = NO_CALL_MEMORY
    recompute: CallMemory = NO_CALL_MEMORY
    optimizer: CallMemory = NO_CALL_MEMORY


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """The memory of one step by module, by descending memory saved."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None: nothing was recorded
    recorded: bool  # some step of the recording has ops
    rows: tuple[MemoryRow, ...]
    saved: SavedMemory  # by all ops of the step
    peak_bytes: int | None  # of the call with the highest peak; None: not known of any


def build_memory_table(data: RecordingData, *, step: int | None = None, ops: bool = False) -> MemoryTable:
    """Returns what the modules of a step save for backward, and what their calls allocate.

    Args:
        data: the recording.
        step: the number of the step; None chooses as `build_module_tree` does.
        ops: lists in each row the ops that save memory.

    Raises:
        ValueError: the recording has no such step.
    """
    found = read_step_ops(data, step=step)
    unseen = find_unseen(data, found.step.step).calls if found.step else frozenset()
    memory = _find_call_memory(found, unseen)
    found = add_saved_by_calls(found)
    [total] = sum_saved(found, found.where * 0, 1)
    rows = _build_rows(found, memory, total.saved_bytes, by_op=ops)
    peaks = [each.peak_bytes for each in memory.values() if each.peak_bytes is not None]
    return MemoryTable(
        command=data.meta.argv,
        marks=data.meta.marks,
        step=found.step,
        recorded=found.recorded,
        rows=tuple(sorted(rows, key=_size)),
        saved=total,
        peak_bytes=max(peaks, default=None),
    )


def _size(row: MemoryRow) -> tuple[int, int, int, str, str]:
    inside = -row.saved_inside.saved_bytes
    return -row.saved.saved_bytes, -row.saved.recompute_bytes, inside, row.root or "", row.name


def _build_rows(
    ops: StepOps, memory: Mapping[tuple[int, str], CallMemory], saved_bytes: int, *, by_op: bool
) -> list[MemoryRow]:
    """Returns a row for each place that has ops, or calls of the step."""
    placed, group = ops.placed, ops.where + _NO_PLACES
    parent = _find_parents(placed)
    own, inside = sum_saved(ops, group, len(parent)), sum_inside(ops, group, parent)
    by_name = sum_saved_by_op(ops, group) if by_op else {}
    called = {where for where, _ in memory}
    return [
        _make_row(placed, where, own[at], inside[at], tuple(by_name.get(at, ())), memory, saved_bytes)
        for at, where in enumerate(range(-_NO_PLACES, len(placed.places)))
        if own[at] != _NOTHING or where in called
    ]


def _find_parents(placed: PlacedCalls) -> Rows:
    """Returns the parent group of each place's group; groups outside of the tree have none."""
    above = [place.parent for place in placed.places]
    return np.array([-1] * _NO_PLACES + [each + _NO_PLACES if each >= 0 else -1 for each in above], np.int64)


def _make_row(
    placed: PlacedCalls,
    where: int,
    own: SavedMemory,
    inside: SavedMemory,
    ops: tuple[SavedByOp, ...],
    memory: Mapping[tuple[int, str], CallMemory],
    saved_bytes: int,
) -> MemoryRow:
    place = placed.name(where)
    return MemoryRow(
        name=place.name,
        root=place.root,
        path=place.path,
        type=place.type,
        saved=own,
        saved_inside=inside,
        share=own.saved_bytes / saved_bytes if saved_bytes else None,
        ops=ops,
        forward=memory.get((where, FORWARD), NO_CALL_MEMORY),
        backward=memory.get((where, BACKWARD), NO_CALL_MEMORY),
        recompute=memory.get((where, RECOMPUTE), NO_CALL_MEMORY),
        optimizer=memory.get((where, OPTIMIZER), NO_CALL_MEMORY),
    )
