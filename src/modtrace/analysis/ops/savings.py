"""What ops save for backward, summed for any grouping of them."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...recording.phase import PHASES, RECOMPUTE
from ..step.calls import Column, Rows, iterate_levels
from ..step.ops import StepOps
from .sums import sum_by


@dataclass(frozen=True, kw_only=True)
class Savings:
    """What several ops save for backward; sums leave out what is not known."""

    ops: int = 0
    saved_bytes: int = 0  # in every phase but recompute
    recompute_bytes: int = 0  # in recompute: kept only until the backward of that block has run
    unknown: int = 0  # ops of which this is not known, without those of recompute, which keep it only briefly


@dataclass(frozen=True)
class OpSaving:
    """What the ops of one name save."""

    op: str
    saved: Savings


def sum_savings(ops: StepOps, group: Rows, groups: int) -> list[Savings]:
    """The savings of each group, which are numbered from 0."""
    return _to_savings(_sum_columns(ops, group, groups))


def sum_inside(ops: StepOps, group: Rows, parent: Rows) -> list[Savings]:
    """The savings of each group with those below it; `parent` is the group above each, -1 for none."""
    columns = _sum_columns(ops, group, len(parent))
    for level in reversed(list(iterate_levels(parent))[1:]):
        for each in columns.values():
            np.add.at(each, parent[level], each[level])
    return _to_savings(columns)


def sum_savings_by_op(ops: StepOps, group: Rows) -> Mapping[int, list[OpSaving]]:
    """The savings of each group by the names of its ops, the largest first."""
    keys = group * len(ops.names) + ops.name
    distinct, which = np.unique(keys, return_inverse=True)
    by_group: dict[int, list[OpSaving]] = defaultdict(list)
    for key, saved in zip(distinct.tolist(), sum_savings(ops, which, len(distinct)), strict=True):
        at, name = divmod(key, len(ops.names))
        by_group[at].append(OpSaving(ops.names[name], saved))
    for each in by_group.values():
        each.sort(key=lambda saving: (-saving.saved.saved_bytes, -saving.saved.recompute_bytes, saving.op))
    return by_group


def _sum_columns(ops: StepOps, group: Rows, groups: int) -> Mapping[str, Column]:
    """What is added up, by the fields of Savings."""
    is_recompute = ops.phase == PHASES.index(RECOMPUTE)
    known = np.maximum(ops.saved_bytes, 0)
    columns = {
        "ops": np.ones(len(ops), np.int64),
        "saved_bytes": np.where(is_recompute, 0, known),
        "recompute_bytes": np.where(is_recompute, known, 0),
        "unknown": (ops.saved_bytes < 0) & ~is_recompute,
    }
    return {name: sum_by(group, each, groups) for name, each in columns.items()}


def _to_savings(columns: Mapping[str, Column]) -> list[Savings]:
    rows = zip(*(each.tolist() for each in columns.values()), strict=True)
    return [Savings(**dict(zip(columns, row, strict=True))) for row in rows]
