"""Sums the costs of ops, and the memory that they save for backward, over any groups."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...recording.phase import PHASES, RECOMPUTE, ByPhase
from ..tables.calls import iterate_levels
from ..tables.columns import Column, Rows, find_rows
from ..tables.ops import StepOps


@dataclass(frozen=True, kw_only=True)
class OpSums:
    """The summed costs of several ops; values that are not known are left out."""

    ops: int = 0
    time_ns: int = 0
    flops: int = 0
    flops_unknown: int = 0  # the number of ops whose floating point operations are not known
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_unknown: int = 0  # the number of ops whose read or written bytes are not known
    unfinished: int = 0  # the number of ops without time, as their end was not seen
    raised: int = 0


NO_OPS = OpSums()


@dataclass(frozen=True, kw_only=True)
class PhaseSums(ByPhase[OpSums]):
    """The sums of a group, together and by phase; only `together` includes ops without a phase."""

    together: OpSums = NO_OPS
    forward: OpSums = NO_OPS
    backward: OpSums = NO_OPS
    recompute: OpSums = NO_OPS
    optimizer: OpSums = NO_OPS


def sum_ops(ops: StepOps, group: Rows, groups: int) -> list[PhaseSums]:
    """Returns the sums of each group; `group` is the group of each op, counted from 0."""
    summed: Mapping[str, Column] = {
        "ops": np.ones(len(ops), np.int64),
        "time_ns": ops.duration_ns,
        "flops": np.maximum(ops.flops, 0),
        "flops_unknown": ops.flops < 0,
        "bytes_read": np.maximum(ops.bytes_read, 0),
        "bytes_written": np.maximum(ops.bytes_written, 0),
        "bytes_unknown": (ops.bytes_read < 0) | (ops.bytes_written < 0),
        "unfinished": ~ops.ended,
        "raised": ops.raised,
    }
    codes = len(PHASES) + 1  # one more, as the phase of an op may be null
    key = group * codes + ops.phase + 1
    by_phase = np.stack([sum_by(key, column, groups * codes) for column in summed.values()], axis=-1)
    return [_to_phase_sums(list(summed), part) for part in by_phase.reshape(groups, codes, len(summed))]


def sum_by(group: Rows, values: Column, groups: int) -> Column:
    """Returns the exact sum of each group, while `numpy.bincount` would add floating-point numbers."""
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, group, values)
    return sums


def _to_phase_sums(names: Sequence[str], by_phase: Column) -> PhaseSums:
    """Returns the sums of one group from a matrix with a row for each phase, whose first column counts ops."""

    def to_sums(row: Column) -> OpSums:
        return OpSums(**dict(zip(names, row.tolist(), strict=True)))

    phases = zip(PHASES, by_phase[1:], strict=True)
    return PhaseSums(
        together=to_sums(by_phase.sum(axis=0)), **{phase: to_sums(row) for phase, row in phases if row[0]}
    )


@dataclass(frozen=True)
class SavedMemory:
    """The summed memory that ops save for backward; values that are not known are left out."""

    ops: int = 0
    saved_bytes: int = 0  # saved in all phases except recompute
    recompute_bytes: int = 0  # saved in recompute, where it is kept only until the block's backward has run
    unknown: int = 0  # the number of ops whose saved memory is not known, except in recompute


@dataclass(frozen=True)
class SavedByOp:
    """The memory that the ops of one name save."""

    op: str
    saved: SavedMemory


#: The name under which a call's saved memory is listed if it is not saved by recorded ops.
BY_NO_OP = "(by no recorded op)"


def add_saved_by_calls(ops: StepOps) -> StepOps:
    """Returns the ops, with a further row for each call of the step that saves more than its ops do.

    Such calls are of compiled code, and of autograd Functions whose forward runs no op. If it is not known how much
    compiled code saves, the row has no known value either.
    """
    calls = ops.calls
    saved = calls.column("saved_bytes")
    parent = find_rows(calls.call_id, calls.column("parent_call_id"))
    own = saved.astype(np.int64)
    np.subtract.at(own, parent[parent >= 0], np.maximum(saved, 0)[parent >= 0])
    np.subtract.at(own, ops.call[ops.call >= 0], np.maximum(ops.saved_bytes, 0)[ops.call >= 0])
    own = np.where(saved < 0, np.where(calls.column("compiled") == 1, -1, 0), np.maximum(own, 0))
    rows = np.flatnonzero(calls.in_step & (own != 0))
    columns = {name: column for name, column in vars(ops).items() if isinstance(column, np.ndarray)}
    added = {name: np.full(len(rows), -1, column.dtype) for name, column in columns.items()} | {
        "call": rows,
        "where": calls.where[rows],
        "phase": calls.phase[rows],
        "name": np.full(len(rows), len(ops.names)),
        "saved_bytes": own[rows],
    }
    joined: dict[str, Any] = {name: np.append(column, added[name]) for name, column in columns.items()}
    return replace(ops, **joined, names=(*ops.names, BY_NO_OP))


def sum_saved(ops: StepOps, group: Rows, groups: int) -> list[SavedMemory]:
    """Returns the memory that each group saves; groups are numbered from 0."""
    return _to_saved(_sum_columns(ops, group, groups))


def sum_inside(ops: StepOps, group: Rows, parent: Rows) -> list[SavedMemory]:
    """Returns the memory that each group and the groups below it save; `parent` is -1 for groups without one."""
    sums = _sum_columns(ops, group, len(parent))
    for level in reversed(list(iterate_levels(parent))[1:]):
        np.add.at(sums, parent[level], sums[level])
    return _to_saved(sums)


def sum_saved_by_op(ops: StepOps, group: Rows) -> Mapping[int, list[SavedByOp]]:
    """Returns the memory that each group saves, by the names of its ops, in descending order."""
    keys, which = np.unique(group * len(ops.names) + ops.name, return_inverse=True)
    by_group: dict[int, list[SavedByOp]] = defaultdict(list)
    for key, saved in zip(keys.tolist(), sum_saved(ops, which, len(keys)), strict=True):
        number, name = divmod(key, len(ops.names))
        by_group[number].append(SavedByOp(ops.names[name], saved))
    for of_group in by_group.values():
        of_group.sort(key=lambda op: (-op.saved.saved_bytes, -op.saved.recompute_bytes, op.op))
    return by_group


def _sum_columns(ops: StepOps, group: Rows, groups: int) -> Column:
    """Returns a row of sums for each group, whose columns are the fields of SavedMemory."""
    is_recompute = ops.phase == PHASES.index(RECOMPUTE)
    known = np.maximum(ops.saved_bytes, 0)
    summed = (
        ops.op_id >= 0,  # the rows added for calls are no ops
        np.where(is_recompute, 0, known),
        np.where(is_recompute, known, 0),
        (ops.saved_bytes < 0) & ~is_recompute,
    )
    return np.stack([sum_by(group, column, groups) for column in summed], axis=-1)


def _to_saved(sums: Column) -> list[SavedMemory]:
    return [SavedMemory(ops, saved, recompute, unknown) for ops, saved, recompute, unknown in sums.tolist()]
