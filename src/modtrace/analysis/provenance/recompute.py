"""Checks whether recomputes agree with their forwards, and finds which op or module differs first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import NothingRecordedError
from ...recording.module_path import is_below
from ...recording.phase import FORWARD, PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ...recording.role import LEAF, OP_OUTPUT, OUTPUT
from ..tables.calls import Calls
from ..tables.columns import column_of, phase_codes
from ..tables.indexed_tables import IndexedTables
from ..tables.missing_rows import require_rows, say_missing
from ..tables.one_step import OneStep, locate_call
from ..tables.ops import read_step_ops
from ..tables.placement import OUTSIDE
from .causes_and_remedies import Cause
from .recompute_causes import UPDATED_TWICE, find_cause_of_module, find_cause_of_op
from .recompute_pairs import UNPAIRED, pair_ops

Row = Mapping[str, Any]

#: The columns that are compared if one of the two tensors has no hash.
_STATISTICS = (
    "count", "min", "max", "sum", "sumsq", "nan_count", "inf_count",
    "sumabs", "zero_count", "sum4", "argmax", "histogram", "channel_max", "sample", "sketch",
)  # fmt: skip
_RECOMPUTE = PHASES.index(RECOMPUTE)
_COLUMNS = ["step", "phase", "site_id", "call_id", "op_id", "order", "shape", "dtype", "hash", *_STATISTICS]


@dataclass(frozen=True, kw_only=True)
class RecomputeDifference:
    """An op (or a module, without ops) whose recompute returned another result than its forward from equal inputs."""

    step: int
    root: str | None  # the name of the root; None outside of modules
    path: str | None
    call: int | None  # the number of the call among those of its module in the step, from 0
    op: str | None  # None where only modules were measured
    op_nth: int | None  # the number of the op among those of its name in the recompute, from 0
    slot: str  # the slot of the output
    source_line: str | None
    by_hash: bool  # whether the hashes differ; else the statistics do
    forward: str  # the output of the forward: `float32[4, 8], -1 .. 1`
    recompute: str
    cause: str | None  # such as random numbers or autocast; None if the recording does not show it
    hint: str | None
    remedy: str | None


@dataclass(frozen=True, kw_only=True)
class RecomputeCheck:
    """The result of comparing recomputes with their forwards."""

    differences: tuple[RecomputeDifference, ...]  # as executed; buffers updated twice come last
    calls: int  # the number of recomputed calls
    steps: int  # the number of steps with recomputed calls
    by_hash: int  # the number of tensors compared by hash
    by_statistics: int  # the number of tensors compared by statistics, which cannot show every difference
    by_ops: bool  # whether outputs of ops were compared; else those of modules
    ended: int  # recomputed calls that ended before their forward's last op, whose inputs were not compared


@dataclass
class _Compared:
    """Compares measured tensors, and counts the comparisons."""

    by_hash: int = 0
    by_statistics: int = 0
    ended: int = 0

    @property
    def any(self) -> bool:
        """Whether any tensors have been compared."""
        return self.by_hash + self.by_statistics > 0

    def differ(self, forward: Row, recompute: Row) -> bool:
        """Returns whether two measured tensors differ, and counts the comparison."""
        if forward["hash"] is not None and recompute["hash"] is not None:
            self.by_hash += 1
            return bool(_of_tensor(forward) != _of_tensor(recompute) or forward["hash"] != recompute["hash"])
        self.by_statistics += 1
        pairs = ((forward[name], recompute[name]) for name in _STATISTICS)
        differ = any(a is not None and b is not None and not _are_equal(a, b) for a, b in pairs)
        return differ or _of_tensor(forward) != _of_tensor(recompute)


def check_recomputes(data: RecordingData) -> RecomputeCheck:
    """Returns the places where the recompute of a call differs from its forward.

    Raises:
        NothingRecordedError: no call was recomputed, or no recomputed tensor was measured.
    """
    numbers, calls = _find_recomputed(data)
    require_rows(data, "values")
    run = IndexedTables(data)
    compared = _Compared()
    # Only the step being compared is kept, to save memory.
    differences = [one for number in numbers for one in _compare_ops(OneStep(run, number), compared)]
    is_by_ops, ended = compared.any, compared.ended
    if not is_by_ops:
        compared = _Compared()
        differences = [one for number in numbers for one in _compare_modules(OneStep(run, number), compared)]
    if not compared.any:
        raise NothingRecordedError(
            f"{calls} calls were recomputed, and no tensor was measured in both their forward and their recompute."
            + say_missing(data.meta.marks)
        )
    return RecomputeCheck(
        differences=tuple(sorted(differences, key=lambda one: (one.step, one.cause == UPDATED_TWICE))),
        calls=calls,
        steps=len(numbers),
        by_hash=compared.by_hash,
        by_statistics=compared.by_statistics,
        by_ops=is_by_ops,
        ended=ended,
    )


def _find_recomputed(data: RecordingData) -> tuple[list[int], int]:
    """Returns the steps in which calls were recomputed, and the number of these calls."""
    require_rows(data, "calls")
    calls, ops = data.table("calls"), data.table("ops")
    is_call, is_op = (phase_codes(table["phase"]) == _RECOMPUTE for table in (calls, ops))
    if not is_call.any() and not is_op.any():
        raise NothingRecordedError(
            "there is nothing to compare: no activation checkpointing ran in a backward of this recording."
            + say_missing(data.meta.marks)
        )
    steps = [column_of(calls, "step")[is_call], column_of(ops, "step")[is_op]]
    return np.unique(np.concatenate(steps)).tolist(), int(is_call.sum())


def _compare_ops(step: OneStep, compared: _Compared) -> Iterator[RecomputeDifference]:
    """Yields the ops whose outputs differ from those of their forward although their inputs are equal."""
    rows = _read_rows(step, OP_OUTPUT, LEAF)
    if not any(row["phase"] == RECOMPUTE for row in rows):
        return
    row_of = {op: row for row, op in enumerate(step.ops.op_id.tolist())}
    measured = {(row_of.get(row["op_id"], -1), row["role"] == LEAF, row["slot"]): row for row in rows}
    pairs = pair_ops(step)
    compared.ended += _count_ended(step, pairs)
    carriers: set[int] = set()  # ops of recomputes whose outputs differ from those of the forward
    for op in step.order[step.ops.phase[step.order] == _RECOMPUTE].tolist():
        was_given = any(int(step.tensors.producer[tensor]) in carriers for _, tensor in step.reads[op])
        # Outputs and leaves are compared if they were measured in both phases.
        keys = [(True, ""), *((False, slot) for slot, _ in step.returns[op])]
        both = [(measured.get((pairs.get(op, -2), *key)), measured.get((op, *key))) for key in keys]
        known = [(forward, recompute) for forward, recompute in both if forward and recompute]
        differing = [
            (forward, recompute) for forward, recompute in known if compared.differ(forward, recompute)
        ]
        if differing or (was_given and not known):
            carriers.add(op)
        if differing and not was_given:
            forward, recompute = differing[0]
            source = step.table("ops")["source"][op].as_py()
            place = {"op": step.name_op(op), "op_nth": int(step.ops.nth[op]), "source_line": source}
            cause = find_cause_of_op(step, op, pairs, forward, recompute)
            yield _describe_difference(step.locate_op(op) | place, forward, recompute, cause)


def _count_ended(step: OneStep, pairs: Mapping[int, int]) -> int:
    """Returns how many recomputed calls ended before the last op of their forward."""
    call, origin = step.ops.call, step.calls.origin
    recomputed = {int(call[op]) for op in pairs if call[op] >= 0}
    origins = {int(origin[one]) for one in recomputed if origin[one] != one}
    last = {int(call[op]): op for op in step.order.tolist() if step.bare_names[op] not in UNPAIRED}
    return len([one for one in origins if one in last and last[one] not in pairs.values()])


def _compare_modules(step: OneStep, compared: _Compared) -> Iterator[RecomputeDifference]:
    """Yields, for each recomputed part of the model, the first module whose output differs."""
    rows = _read_rows(step, OUTPUT)
    recomputes = sorted((row for row in rows if row["phase"] == RECOMPUTE), key=lambda row: int(row["order"]))
    forwards = {(row["call_id"], row["site_id"]): row for row in rows if row["phase"] == FORWARD}
    calls = read_step_ops(step, step=step.number).calls
    call_ids = calls.call_id.tolist()
    row_of = {call: row for row, call in enumerate(call_ids)}
    inside, parts = _find_inside(calls), set[int]()
    for row in recomputes:
        call, of_forward = row_of.get(row["call_id"], -1), None
        if call >= 0:
            around, where, of_forward = call, int(calls.where[call]), call_ids[calls.origin[call]]
        else:  # a module inside of compiled code has no call
            around, where = inside.get(step.run.sites[row["site_id"]].path, (-1, OUTSIDE))
        forward = forwards.get((of_forward, row["site_id"]))
        if around < 0 or forward is None or not compared.differ(forward, row):
            continue
        part = _find_part(calls, around)
        if part not in parts:
            parts.add(part)
            place = locate_call(calls, call, where) | {"op": None, "op_nth": None, "source_line": None}
            cause = find_cause_of_module(calls.name(where).type, forward, row)
            yield _describe_difference(place, forward, row, cause)


def _find_inside(calls: Calls) -> Mapping[str, tuple[int, int]]:
    """Returns by path the recomputed call of compiled code in which a module ran, and the index of its place."""
    found: dict[str, tuple[int, int]] = {}
    is_region = (calls.phase == _RECOMPUTE) & (calls.column("compiled") == 1)
    for call in np.flatnonzero(is_region & (calls.where >= 0)).tolist():
        region = calls.places[calls.where[call]]
        for where, place in enumerate(calls.places):
            if place.root == region.root and is_below(place.path or "", region.path or ""):
                found.setdefault(place.path or "", (call, where))
    return found


def _find_part(calls: Calls, call: int) -> int:
    """Returns the call whose backward requested the recompute, or a key of the outermost recomputed call."""
    while calls.parent[call] >= 0:
        call = int(calls.parent[call])
    asked = int(calls.column("triggered_by")[call])
    return asked if asked >= 0 else -1 - call


def _describe_difference(
    place: Mapping[str, Any], forward: Row, recompute: Row, cause: Cause | None
) -> RecomputeDifference:
    return RecomputeDifference(
        **place,
        step=recompute["step"],
        slot=forward["slot"],
        by_hash=forward["hash"] is not None and recompute["hash"] is not None,
        forward=_describe(forward),
        recompute=_describe(recompute),
        cause=cause.name if cause else None,
        hint=cause.text if cause else None,
        remedy=cause.remedy if cause else None,
    )


def _read_rows(step: OneStep, *roles: str) -> list[dict[str, Any]]:
    """Returns the rows of a step's `values` that have these roles, with their roles and slots."""
    rows = step.table("values").select(_COLUMNS).take(np.flatnonzero(step.is_of(*roles))).to_pylist()
    sites = step.run.sites
    return [
        {**row, "role": sites[row["site_id"]].role, "slot": sites[row["site_id"]].slot}
        for row in rows
        if row["count"] is not None or row["hash"] is not None
    ]


def _of_tensor(row: Row) -> tuple[str, list[int]]:
    return row["dtype"], row["shape"]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other or (one != one and other != other))


def _describe(row: Row) -> str:
    text = f"{row['dtype']}[{', '.join(map(str, row['shape']))}]"
    if row["min"] is not None and row["max"] is not None:
        text += f", {row['min']:.6g} .. {row['max']:.6g}"
    if row["sum"] is not None and row["count"]:
        text += f", mean {row['sum'] / row['count']:.6g}"
    return text
