"""Sums the costs of ops, and the memory that they save for backward, over any groups."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...recording.phase import PHASES, RECOMPUTE, ByPhase
from ..tables.calls import iterate_levels
from ..tables.columns import Bools, Column, Rows, find_rows
from ..tables.ops import StepOps
from ..tables.quartiles import Quartiles, find_medians, find_quartiles


@dataclass(frozen=True, kw_only=True)
class OpsOverSteps:
    """How the costs of ops differ between several steps, without steps in which none of them ran."""

    steps: int  # in how many steps ops ran
    ops: Quartiles
    time_ns: Quartiles


@dataclass(frozen=True, kw_only=True)
class OpSums:
    """The summed costs of several ops; values that are not known are left out.

    Of several steps, they are medians over the steps in which such ops ran, each by itself.
    """

    ops: int = 0
    time_ns: int = 0
    flops: int = 0
    flops_unknown: int = 0  # the number of ops whose floating point operations are not known
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_unknown: int = 0  # the number of ops whose read or written bytes are not known
    unfinished: int = 0  # the number of ops without time, as their end was not seen; summed over steps
    raised: int = 0
    over_steps: OpsOverSteps | None = None  # None for a single step


NO_OPS = OpSums()

#: What is summed over all steps, as each case counts.
_COUNTED_IN_ALL = ("unfinished", "raised")


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
    codes, width = len(PHASES) + 1, len(ops.steps.numbers)  # one code more, as the phase of an op may be null
    key = (group * codes + ops.phase + 1) * width + ops.in_step
    sums = {}
    for name, column in summed.items():
        by_phase = sum_by(key, column, groups * codes * width).reshape(groups, codes, width)
        # The first code, of no phase, gives its place to the sum over all.
        sums[name] = np.concatenate([by_phase.sum(axis=1, keepdims=True), by_phase[:, 1:]], axis=1)
    flat = {name: column.reshape(groups * codes, width) for name, column in sums.items()}
    made = iter(_to_medians(flat) if ops.steps.several else _to_sums(flat))
    return [
        PhaseSums(**{name: own for name, own in zip(("together", *PHASES), made, strict=False) if own.ops})
        for _ in range(groups)
    ]


def sum_by(group: Rows, values: Column, groups: int) -> Column:
    """Returns the exact sum of each group, while `numpy.bincount` would add floating-point numbers."""
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, group, values.astype(np.int64, copy=False))  # 50 times as fast as with bools
    return sums


def sum_in_steps(group: Rows, step: Rows, values: Column, shape: tuple[int, int]) -> tuple[Column, Bools]:
    """Returns the sum of each group in each step, and whether it has values there.

    Args:
        group: the group of each value, counted from 0.
        step: the index of the step of each value.
        values: the values.
        shape: the number of groups and of steps.
    """
    key, size = group * shape[1] + step, shape[0] * shape[1]
    counts = np.bincount(key, minlength=size)
    return sum_by(key, values, size).reshape(shape), counts.reshape(shape) > 0


def find_medians_of_sums(group: Rows, step: Rows, values: Column, shape: tuple[int, int]) -> Column:
    """Returns the median of the sums of each group, over the steps in which it has values; see `sum_in_steps`."""
    return np.rint(find_medians(*sum_in_steps(group, step, values, shape))).astype(np.int64)


def _to_sums(columns: Mapping[str, Column]) -> list[OpSums]:
    """Returns the sums of a single step; there is a row for each group in each phase."""
    numbers = np.stack([column.sum(axis=1) for column in columns.values()], axis=1)
    return [OpSums(**dict(zip(columns, row, strict=True))) for row in numbers.tolist()]


def _to_medians(columns: Mapping[str, Column]) -> list[OpSums]:
    """Returns the medians over the steps; there is a row for each group in each phase, and a column for each step."""
    known = columns["ops"] > 0
    quartiles = (find_quartiles(columns[name], known) for name in ("ops", "time_ns"))
    over_steps = [
        OpsOverSteps(steps=steps, ops=ops, time_ns=time_ns)
        for steps, ops, time_ns in zip(known.sum(axis=1).tolist(), *quartiles, strict=True)
    ]
    medians = {
        name: np.rint(find_medians(column, known)).astype(np.int64)[:, None]
        for name, column in columns.items()
        if name not in _COUNTED_IN_ALL
    }
    sums = _to_sums(dict(columns) | medians)
    return [replace(own, over_steps=over) for own, over in zip(sums, over_steps, strict=True)]


@dataclass(frozen=True)
class SavedMemory:
    """The summed memory that ops save for backward; values that are not known are left out.

    Of several steps, they are medians over the steps in which the ops ran, each by itself.
    """

    ops: int = 0
    saved_bytes: int = 0  # saved in all phases except recompute
    recompute_bytes: int = 0  # saved in recompute, where it is kept only until the block's backward has run
    unknown: int = 0  # the number of ops whose saved memory is not known, except in recompute
    over_steps: Quartiles | None = field(
        default=None, compare=False
    )  # of `saved_bytes`; None for a single step

    def times(self, count: int) -> "SavedMemory":
        """Returns what several groups save that save as much each; its quartiles stay those of one."""
        return replace(
            self,
            ops=count * self.ops,
            saved_bytes=count * self.saved_bytes,
            recompute_bytes=count * self.recompute_bytes,
            unknown=count * self.unknown,
        )


NOTHING_SAVED = SavedMemory()


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
        "in_step": find_rows(ops.steps.numbers, calls.column("step")[rows]),
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
    return _to_saved(ops, _sum_columns(ops, group, groups))


def sum_inside(ops: StepOps, group: Rows, parent: Rows) -> list[SavedMemory]:
    """Returns the memory that each group and the groups below it save; `parent` is -1 for groups without one."""
    sums = _sum_columns(ops, group, len(parent))
    for level in reversed(list(iterate_levels(parent))[1:]):
        np.add.at(sums, parent[level], sums[level])
    return _to_saved(ops, sums)


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


def find_saved_in_steps(ops: StepOps, group: Rows, groups: int) -> tuple[Column, Bools]:
    """Returns the bytes that each group saves in each step, except in recompute, and whether it has ops there."""
    sums = _sum_columns(ops, group, groups)
    return sums[..., 1], np.asarray(sums.any(axis=2))


def _sum_columns(ops: StepOps, group: Rows, groups: int) -> Column:
    """Returns the sums of each group in each step: the number of ops, and what it saves as in SavedMemory."""
    is_recompute = ops.phase == PHASES.index(RECOMPUTE)
    known = np.maximum(ops.saved_bytes, 0)
    summed = (
        ops.op_id >= 0,  # the rows added for calls are no ops
        np.where(is_recompute, 0, known),
        np.where(is_recompute, known, 0),
        (ops.saved_bytes < 0) & ~is_recompute,
    )
    width = len(ops.steps.numbers)
    sums = [sum_by(group * width + ops.in_step, column, groups * width) for column in summed]
    return np.stack(sums, axis=-1).reshape(groups, width, len(summed))


def _to_saved(ops: StepOps, sums: Column) -> list[SavedMemory]:
    if not ops.steps.several:
        return [SavedMemory(*row) if any(row) else NOTHING_SAVED for row in sums.sum(axis=1).tolist()]
    known = np.asarray(sums.any(axis=2))
    medians = np.stack([find_medians(sums[..., column], known) for column in range(sums.shape[2])], axis=1)
    numbers = zip(
        np.rint(medians).astype(np.int64).tolist(), find_quartiles(sums[..., 1], known), strict=True
    )
    return [
        replace(SavedMemory(*row), over_steps=known_bytes) if any(row) else NOTHING_SAVED
        for row, known_bytes in numbers
    ]
