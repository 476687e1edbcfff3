"""Tells whether forwards and their recomputes agree, and which op, or else which module, differs first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import NothingRecordedError
from ...recording.module_path import is_below
from ...recording.phase import FORWARD, PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ...recording.role import LEAF, OP_OUTPUT, OUTPUT
from ..tables.columns import column_of, phase_codes
from ..tables.missing_rows import require_rows, say_missing
from ..tables.ops import OUTSIDE, PlacedCalls, read_step_ops
from ..tables.sites import Site
from .causes_and_remedies import Cause
from .indexed_tables import IndexedTables
from .recompute_causes import UPDATED_TWICE, find_cause_of_module, find_cause_of_op
from .recompute_pairs import UNPAIRED, pair_ops
from .step_flow import StepFlow, read_step_flow, tell_place

Row = Mapping[str, Any]

#: Told from hashes where both have one, else from what was measured of both.
_STATISTICS = (
    "count", "min", "max", "sum", "sumsq", "nan_count", "inf_count",
    "sumabs", "zero_count", "sum4", "argmax", "histogram", "channel_max", "sample", "sketch",
)  # fmt: skip
_COLUMNS = ["step", "phase", "site_id", "call_id", "op_id", "order", "shape", "dtype", "hash", *_STATISTICS]


@dataclass(frozen=True, kw_only=True)
class RecomputeDifference:
    """An op, or else a module, whose recompute and forward returned different results for equal inputs."""

    step: int
    root: str | None  # the name of the root; None outside of modules
    path: str | None
    call: int | None  # n-th of its module in the step, from 0
    op: str | None  # None where only modules were measured
    op_nth: int | None  # of its name within the recompute, from 0
    slot: str  # of its output
    source_line: str | None
    by_hash: bool  # the hashes differ; else the statistics do
    forward: str  # what was measured of it: `float32[4, 8], -1 .. 1`
    recompute: str
    cause: str | None  # random numbers, autocast, ...; None where the recording does not show one
    hint: str | None
    remedy: str | None


@dataclass(frozen=True, kw_only=True)
class RecomputeCheck:
    """How far forwards and recomputes agree."""

    differences: tuple[RecomputeDifference, ...]  # step by step as they ran; buffers updated twice last
    calls: int  # recomputed calls
    steps: int  # that have some
    by_hash: int  # tensors that were compared by their hashes
    by_statistics: int  # that were compared by statistics, which cannot tell every difference
    by_ops: bool  # outputs of ops were compared; else those of modules
    ended: int  # recomputed calls that ended before the last op of their forward: that op's inputs were not compared


@dataclass
class _Compared:
    """The results that have been compared so far."""

    by_hash: int = 0
    by_statistics: int = 0
    ended: int = 0

    def differ(self, forward: Row, recompute: Row) -> bool:
        """Returns whether two measured tensors differ, and counts them."""
        if forward["hash"] is not None and recompute["hash"] is not None:
            self.by_hash += 1
            return bool(_of_tensor(forward) != _of_tensor(recompute) or forward["hash"] != recompute["hash"])
        self.by_statistics += 1
        pairs = ((forward[name], recompute[name]) for name in _STATISTICS)
        differ = any(a is not None and b is not None and not _are_equal(a, b) for a, b in pairs)
        return differ or _of_tensor(forward) != _of_tensor(recompute)


def check_recomputes(data: RecordingData) -> RecomputeCheck:
    """Returns where the recompute of a call differs from its forward.

    Raises:
        NothingRecordedError: no call was recomputed, or nothing was measured of one.
    """
    steps, calls = _find_recomputed(data)
    require_rows(data, "values")
    by_ops, compared = _Compared(), _Compared()
    tables = IndexedTables(data)
    differences = [each for step in steps for each in _compare_ops(tables, step, by_ops)]
    is_by_ops = by_ops.by_hash + by_ops.by_statistics > 0
    if not is_by_ops:
        differences = [each for step in steps for each in _compare_modules(tables, step, compared)]
    found = by_ops if is_by_ops else compared
    if not found.by_hash + found.by_statistics:
        raise NothingRecordedError(
            f"{calls} calls were recomputed, and no tensor was measured in both their forward and their recompute."
            + say_missing(data.meta.marks)
        )
    return RecomputeCheck(
        differences=tuple(sorted(differences, key=lambda each: (each.step, each.cause == UPDATED_TWICE))),
        calls=calls,
        steps=len(steps),
        by_hash=found.by_hash,
        by_statistics=found.by_statistics,
        by_ops=is_by_ops,
        ended=by_ops.ended,
    )


def _find_recomputed(data: RecordingData) -> tuple[list[int], int]:
    """Returns the steps in which something was recomputed, and how many calls were."""
    require_rows(data, "calls")
    calls, ops = data.table("calls"), data.table("ops")
    is_call, is_op = (phase_codes(each["phase"]) == PHASES.index(RECOMPUTE) for each in (calls, ops))
    if not is_call.any() and not is_op.any():
        raise NothingRecordedError(
            "there is nothing to compare: no activation checkpointing ran in a backward of this recording."
            + say_missing(data.meta.marks)
        )
    steps = [column_of(calls, "step")[is_call], column_of(ops, "step")[is_op]]
    return np.unique(np.concatenate(steps)).tolist(), int(is_call.sum())


def _compare_ops(tables: IndexedTables, step: int, compared: _Compared) -> Iterator[RecomputeDifference]:
    """Yields the ops whose recompute differs, and whose inputs do not."""
    data = tables.of_step(step)
    rows = _read_rows(data, tables.sites, OP_OUTPUT, LEAF)
    if not any(row["phase"] == RECOMPUTE for row in rows):
        return
    flow = read_step_flow(data, step)
    row_of = {op: row for row, op in enumerate(flow.ops.op_id.tolist())}
    measured = {
        (row_of.get(row["op_id"], -1), tables.sites[row["site_id"]].role == LEAF, row["slot"]): row
        for row in rows
    }
    pairs = pair_ops(flow)
    compared.ended += _count_ended(flow, pairs)
    carriers: set[int] = set()  # ops of recomputes that returned something else than in forward
    for op in flow.order:
        if flow.ops.phase[op] != PHASES.index(RECOMPUTE):
            continue
        was_given = any(
            int(flow.tensors.producer[tensor]) in carriers for _, tensor in flow.reads.get(op, ())
        )
        both = _find_both(op, pairs.get(op), measured, flow)
        differing = [each for each in both if compared.differ(*each)]
        if differing or (was_given and not both):
            carriers.add(op)
        if differing and not was_given:
            yield _describe_op(tables, flow, op, pairs, *differing[0])


def _count_ended(flow: StepFlow, pairs: Mapping[int, int]) -> int:
    """Returns how many recomputed calls ended before the last op of their forward."""
    call, origin = flow.ops.call, flow.ops.placed.origin
    recomputed = {int(call[op]) for op in pairs if call[op] >= 0}
    origins = {int(origin[each]) for each in recomputed if origin[each] != each}
    last = {int(call[op]): op for op in flow.order if flow.bare_names[op] not in UNPAIRED}
    return len([each for each in origins if each in last and last[each] not in pairs.values()])


def _find_both(
    op: int, forward: int | None, measured: Mapping[tuple[int, bool, str], Row], flow: StepFlow
) -> list[tuple[Row, Row]]:
    """Returns what was measured in both phases, forward and recompute: outputs, and what no op has made."""
    if forward is None:
        return []
    keys = [(True, ""), *((False, slot) for slot, _ in flow.returns.get(op, ()))]
    found = ((measured.get((forward, *key)), measured.get((op, *key))) for key in keys)
    return [(a, b) for a, b in found if a is not None and b is not None]


def _describe_op(
    tables: IndexedTables,
    flow: StepFlow,
    op: int,
    pairs: Mapping[int, int],
    forward: Row,
    recompute: Row,
) -> RecomputeDifference:
    ops = flow.ops
    [source] = tables.find("ops", ["source"], op_id=ops.op_id[[op]])["source"].to_pylist()
    cause = find_cause_of_op(flow, tables.sites, op, pairs, forward, recompute)
    place = tell_place(ops.placed, int(ops.call[op]), int(ops.where[op]))
    place |= {"op": flow.name_op(op), "op_nth": int(ops.nth[op]), "source_line": source}
    return _tell(place, forward, recompute, cause)


def _compare_modules(tables: IndexedTables, step: int, compared: _Compared) -> Iterator[RecomputeDifference]:
    """Yields, of each part of the model that was recomputed, the first module whose output differs."""
    data = tables.of_step(step)
    rows = _read_rows(data, tables.sites, OUTPUT)
    forwards = {(row["call_id"], row["site_id"]): row for row in rows if row["phase"] == FORWARD}
    placed = read_step_ops(data, step=step).placed
    call_ids = placed.calls.call_id.tolist()
    row_of = {call: row for row, call in enumerate(call_ids)}
    inside, told = _find_inside(placed), set[int]()
    for row in sorted((row for row in rows if row["phase"] == RECOMPUTE), key=lambda row: row["order"]):
        call, where, of_forward = row_of.get(row["call_id"], -1), OUTSIDE, None
        if call >= 0:
            around, where, of_forward = call, int(placed.where[call]), call_ids[placed.origin[call]]
        else:  # inside of compiled code, where modules have no calls
            around, where = inside.get(tables.sites[row["site_id"]].path, (-1, OUTSIDE))
        forward = forwards.get((of_forward, row["site_id"]))
        if around < 0 or forward is None or not compared.differ(forward, row):
            continue
        part = _find_part(placed, around)
        if part not in told:
            told.add(part)
            yield _describe_module(placed, call, where, forward, row)


def _find_inside(placed: PlacedCalls) -> Mapping[str, tuple[int, int]]:
    """Returns, by path, which recomputed call ran a module as compiled code, and the index of the module's place."""
    found: dict[str, tuple[int, int]] = {}
    is_region = (placed.calls.phase == PHASES.index(RECOMPUTE)) & (placed.column("compiled") == 1)
    for call in np.flatnonzero(is_region & (placed.where >= 0)).tolist():
        region = placed.places[placed.where[call]]
        for where, place in enumerate(placed.places):
            if place.root == region.root and is_below(place.path or "", region.path or ""):
                found.setdefault(place.path or "", (call, where))
    return found


def _find_part(placed: PlacedCalls, call: int) -> int:
    """Returns the call whose backward asked for the recompute, or else the outermost recomputed call."""
    while placed.calls.parent[call] >= 0:
        call = int(placed.calls.parent[call])
    asked = int(placed.column("triggered_by")[call])
    return asked if asked >= 0 else -1 - call


def _describe_module(
    placed: PlacedCalls, call: int, where: int, forward: Row, recompute: Row
) -> RecomputeDifference:
    cause = find_cause_of_module(placed.name(where).type, forward, recompute)
    place = tell_place(placed, call, where) | {"op": None, "op_nth": None, "source_line": None}
    return _tell(place, forward, recompute, cause)


def _tell(place: Mapping[str, Any], forward: Row, recompute: Row, cause: Cause | None) -> RecomputeDifference:
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


def _read_rows(data: RecordingData, sites: Mapping[int, Site], *roles: str) -> list[dict[str, Any]]:
    """Returns what was measured in these roles in a step, with the slots."""
    slots = {number: site.slot for number, site in sites.items() if site.role in roles}
    values = data.table("values").select(_COLUMNS)
    rows = values.take(np.flatnonzero(np.isin(column_of(values, "site_id"), list(slots)))).to_pylist()
    known = (row for row in rows if row["count"] is not None or row["hash"] is not None)
    return [{**row, "slot": slots[row["site_id"]]} for row in known]


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
