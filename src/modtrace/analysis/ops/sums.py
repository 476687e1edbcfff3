"""Sums the costs of ops, and what they save for backward, for any grouping of them."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE, ByPhase
from ..tables.calls import iterate_levels
from ..tables.columns import Column, Rows, find_rows, join_columns
from ..tables.ops import StepOps

#: The phase of an op may be null as well.
_CODES = len(PHASES) + 1


@dataclass(frozen=True, kw_only=True)
class OpSums:
    """The sums of several ops, without values that are not known."""

    ops: int = 0
    time_ns: int = 0
    flops: int = 0
    flops_unknown: int = 0  # ops whose floating point operations are not known
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_unknown: int = 0  # ops of which one of the two is not known
    unfinished: int = 0  # ops without time: their end was not seen
    raised: int = 0


NO_OPS = OpSums()


@dataclass(frozen=True, kw_only=True)
class PhaseSums(ByPhase[OpSums]):
    """The sums of a group, over all phases and by phase; `together` includes ops without a phase."""

    together: OpSums = NO_OPS
    forward: OpSums = NO_OPS
    backward: OpSums = NO_OPS
    recompute: OpSums = NO_OPS
    optimizer: OpSums = NO_OPS


def sum_ops(ops: StepOps, group: Rows, groups: int) -> list[PhaseSums]:
    """Returns the sums of each group.

    Args:
        ops: the ops.
        group: the group of each op, from 0.
        groups: the number of groups.
    """
    key = group * _CODES + ops.phase + 1
    sums = {name: sum_by(key, each, groups * _CODES) for name, each in _summed(ops).items()}
    by_phase = {name: each.reshape(groups, _CODES) for name, each in sums.items()}
    return [_to_phase_sums(by_phase, at) for at in range(groups)]


def sum_by(group: Rows, values: Column, groups: int) -> Column:
    """Returns the exact sum of each group; `numpy.bincount` would add floating-point numbers."""
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, group, values)
    return sums


def _summed(ops: StepOps) -> Mapping[str, Column]:
    """Returns the columns that are summed, by the fields of OpSums."""
    return {
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


def _to_phase_sums(by_phase: Mapping[str, Column], group: int) -> PhaseSums:
    rows = {name: each[group].tolist() for name, each in by_phase.items()}

    def sums_of(phase: str) -> OpSums:
        at = PHASES.index(phase) + 1
        return OpSums(**{name: row[at] for name, row in rows.items()}) if rows["ops"][at] else NO_OPS

    return PhaseSums(
        together=OpSums(**{name: sum(row) for name, row in rows.items()}),
        forward=sums_of(FORWARD),
        backward=sums_of(BACKWARD),
        recompute=sums_of(RECOMPUTE),
        optimizer=sums_of(OPTIMIZER),
    )


@dataclass(frozen=True, kw_only=True)
class SavedMemory:
    """The memory that several ops save for backward, without values that are not known."""

    ops: int = 0
    saved_bytes: int = 0  # in every phase but recompute
    recompute_bytes: int = 0  # in recompute: kept only until the backward of that block has run
    unknown: int = 0  # ops of which this is not known, without those of recompute, which keep it only briefly


@dataclass(frozen=True)
class SavedByOp:
    """The memory that the ops of one name save."""

    op: str
    saved: SavedMemory


#: What saves memory in a call beside its recorded ops.
BY_NO_OP = "(by no recorded op)"


def add_saved_by_calls(ops: StepOps) -> StepOps:
    """Returns the ops, and a row without id for each call of the step that saves more than the ops inside it do.

    Compiled code does, and so does an autograd Function whose forward runs no op. Where it is not known what compiled
    code saves, neither is it in that row.
    """
    placed, calls = ops.placed, ops.placed.calls
    saved = placed.column("saved_bytes")
    parent = find_rows(calls.call_id, placed.column("parent_call_id"))
    own = saved.astype(np.int64)
    np.subtract.at(own, parent[parent >= 0], np.maximum(saved, 0)[parent >= 0])
    np.subtract.at(own, ops.call[ops.call >= 0], np.maximum(ops.saved_bytes, 0)[ops.call >= 0])
    own = np.where(saved < 0, np.where(placed.column("compiled") == 1, -1, 0), np.maximum(own, 0))
    rows = np.flatnonzero(calls.in_step & (own != 0))
    blank = {
        name: np.full(len(rows), -1, each.dtype)
        for name, each in vars(ops).items()
        if isinstance(each, np.ndarray)
    }
    added = replace(
        ops,
        **blank
        | {
            "call": rows,
            "where": placed.where[rows],
            "phase": calls.phase[rows],
            "name": np.full(len(rows), len(ops.names)),
            "saved_bytes": own[rows],
        },
    )
    return replace(ops, **join_columns([ops, added]), names=(*ops.names, BY_NO_OP))


def sum_saved(ops: StepOps, group: Rows, groups: int) -> list[SavedMemory]:
    """Returns the memory that each group saves; groups are numbered from 0."""
    return _to_saved(_sum_columns(ops, group, groups))


def sum_inside(ops: StepOps, group: Rows, parent: Rows) -> list[SavedMemory]:
    """Returns the memory that each group and the groups below it save; `parent` is -1 for groups without one."""
    columns = _sum_columns(ops, group, len(parent))
    for level in reversed(list(iterate_levels(parent))[1:]):
        for each in columns.values():
            np.add.at(each, parent[level], each[level])
    return _to_saved(columns)


def sum_saved_by_op(ops: StepOps, group: Rows) -> Mapping[int, list[SavedByOp]]:
    """Returns the memory that each group saves by the names of its ops, in descending order."""
    keys = group * len(ops.names) + ops.name
    distinct, which = np.unique(keys, return_inverse=True)
    by_group: dict[int, list[SavedByOp]] = defaultdict(list)
    for key, saved in zip(distinct.tolist(), sum_saved(ops, which, len(distinct)), strict=True):
        at, name = divmod(key, len(ops.names))
        by_group[at].append(SavedByOp(ops.names[name], saved))
    for each in by_group.values():
        each.sort(key=lambda op: (-op.saved.saved_bytes, -op.saved.recompute_bytes, op.op))
    return by_group


def _sum_columns(ops: StepOps, group: Rows, groups: int) -> Mapping[str, Column]:
    """Returns the columns that are summed, by the fields of SavedMemory."""
    is_recompute = ops.phase == PHASES.index(RECOMPUTE)
    known = np.maximum(ops.saved_bytes, 0)
    columns = {
        "ops": ops.op_id >= 0,  # without what calls save
        "saved_bytes": np.where(is_recompute, 0, known),
        "recompute_bytes": np.where(is_recompute, known, 0),
        "unknown": (ops.saved_bytes < 0) & ~is_recompute,
    }
    return {name: sum_by(group, each, groups) for name, each in columns.items()}


def _to_saved(columns: Mapping[str, Column]) -> list[SavedMemory]:
    rows = zip(*(each.tolist() for each in columns.values()), strict=True)
    return [SavedMemory(**dict(zip(columns, row, strict=True))) for row in rows]
