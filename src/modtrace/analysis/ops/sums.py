"""Sums of ops, for any grouping of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE
from ..step.calls import Column, Rows
from ..step.ops import StepOps

#: The phase of an op may be null as well.
_CODES = len(PHASES) + 1


@dataclass(frozen=True, kw_only=True)
class OpSums:
    """Several ops in one; sums leave out what is not known."""

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
class PhaseSums:
    """The ops of a group together, and by phase; `together` also has those that ran in no phase."""

    together: OpSums = NO_OPS
    forward: OpSums = NO_OPS
    backward: OpSums = NO_OPS
    recompute: OpSums = NO_OPS
    optimizer: OpSums = NO_OPS

    def phase(self, name: str) -> OpSums:
        """The ops of one of PHASES."""
        sums: OpSums = getattr(self, name)
        return sums


def sum_ops(ops: StepOps, group: Rows, groups: int) -> list[PhaseSums]:
    """The sums of each group.

    Args:
        group: the group of each op, from 0.
        groups: how many there are.
    """
    key = group * _CODES + ops.phase + 1
    sums = {name: sum_by(key, each, groups * _CODES) for name, each in _summed(ops).items()}
    by_phase = {name: each.reshape(groups, _CODES) for name, each in sums.items()}
    return [_to_phase_sums(by_phase, at) for at in range(groups)]


def sum_by(group: Rows, values: Column, groups: int) -> Column:
    """The sum of each group, exact: `numpy.bincount` would add floating point numbers."""
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, group, values)
    return sums


def _summed(ops: StepOps) -> Mapping[str, Column]:
    """What is added up, by the fields of OpSums."""
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
