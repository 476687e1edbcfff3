"""Reads steps, calls and ops as spans that need not nest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.phase import PHASES
from ...recording.protocols import RecordingData
from ..tables.calls import Calls, read_all_calls
from ..tables.columns import Column, Rows, find_rows, take
from ..tables.placement import Placer
from ..tables.rows import TableRows, read_rows
from ..tables.values import find_notes
from .spans import LANE_KINDS, OUTSIDE, STEPS, Detail, SpanRows, Wanted, choose_details

#: The kind of lane for each code of PHASES.
_LANE_OF_PHASE = np.array([LANE_KINDS.index(phase) for phase in PHASES], np.int8)
_OUTSIDE = np.int8(LANE_KINDS.index(OUTSIDE))
_NEVER_NS = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, eq=False)
class CallRows:
    """Calls as spans, with the columns that are needed to put ops into them."""

    spans: SpanRows
    on_device: SpanRows  # spans of the calls whose device times are known
    call_id: Column
    origin: Rows  # the forward call of a backward, or the call that a recompute repeats; -1 for none
    phase: Column


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSpans:
    """Ops as spans; `origin` is the forward op of an op in backward."""

    spans: SpanRows
    on_device: SpanRows
    origin: Rows


def read_call_rows(data: RecordingData, steps: Sequence[int], details: Wanted) -> CallRows:
    """Returns the spans of the calls in the given steps, with the wanted details."""
    calls, table = read_all_calls(data.table("calls"), Placer(data)), read_rows(data, "calls", steps)
    name, names = calls.full_names
    kept = np.isin(calls.call_id, table["call_id"])
    rows = np.flatnonzero(kept)
    parent, thread = _renumber(calls.parent, kept), table["thread"]
    # A call is drawn inside its parent only if both ran on the same thread, because lanes are of one thread.
    is_on_thread = thread == np.append(thread, -1)[parent]
    spans = SpanRows(
        name=Detail("name", name[rows], names),
        step=table["step"],
        thread=thread,
        lane=_LANE_OF_PHASE[calls.phase[rows]],
        start_ns=calls.start_ns[rows],
        end_ns=(calls.start_ns + calls.duration_ns + calls.overhead_ns)[rows],
        ended=calls.ended[rows],
        parent=np.where(is_on_thread, parent, -1),
        row_id=calls.call_id[rows],
        details=choose_details(
            _describe_calls(calls, rows, table, find_notes(data, calls.call_id[rows])), details
        ),
    )
    return CallRows(
        spans=spans,
        on_device=spans.on_device(table["device_start_ns"], table["device_end_ns"]),
        call_id=calls.call_id[rows],
        origin=_renumber(calls.repeats, kept),
        phase=calls.phase[rows],
    )


def _renumber(refers: Rows, kept: Column) -> Rows:
    """Returns for each kept row the row to which it refers, numbered among the kept rows; -1 for none."""
    number = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)
    return number[refers[kept]]


def _describe_calls(
    calls: Calls, rows: Rows, table: TableRows, notes: tuple[Column, tuple[str, ...]]
) -> Iterator[Detail]:
    overhead_ns, place, modules = calls.overhead_ns[rows], calls.place[rows], calls.placer.name_modules()
    roots = tuple(module.root for module in modules)
    yield Detail("type", place, tuple(module.type for module in modules))
    if len(set(roots)) > 1:
        yield Detail("root", place, roots)
    yield Detail("phase", calls.phase[rows], PHASES)
    costs = ("flops", "allocated_bytes", "peak_bytes", "saved_bytes")
    for name in ("step", "nth", *costs, "raised", "compiled"):
        yield Detail(name, table[name])
    yield Detail("overhead_ns", np.where(overhead_ns > 0, overhead_ns, -1))
    yield Detail("note", *notes)


def read_op_rows(data: RecordingData, steps: Sequence[int], calls: CallRows, details: Wanted) -> OpSpans:
    """Returns the spans of ops in the given steps, with the wanted details.

    An op is inside its call if it ran on the call's thread and during the call.
    """
    table = read_rows(data, "ops", steps)
    start_ns, ended = table["start_ns"], table.is_known("end_ns")
    end_ns = np.where(ended, table["end_ns"], start_ns)
    call = find_rows(calls.call_id, table["call_id"])
    parent, lane = _find_lanes(call, table["thread"], table.phase, start_ns, end_ns, calls.spans)
    spans = SpanRows(
        name=Detail("name", *table.codes("name")),
        step=table["step"],
        thread=table["thread"],
        lane=lane,
        start_ns=start_ns,
        end_ns=end_ns,
        ended=ended,
        parent=parent,
        row_id=table["op_id"],
        details=choose_details(_describe_ops(table, call, calls.spans.name), details),
    )
    return OpSpans(
        spans=spans,
        on_device=spans.on_device(table["device_start_ns"], table["device_end_ns"]),
        origin=find_rows(table["op_id"], table["forward_op_id"]),
    )


def _find_lanes(
    call: Rows, thread: Column, phase: Column, start_ns: Column, end_ns: Column, calls: SpanRows
) -> tuple[Rows, Column]:
    """Returns the call in which each op is drawn, and its lane."""
    call_end_ns = take(np.where(calls.ended, calls.end_ns, _NEVER_NS), call)
    in_time = (start_ns <= call_end_ns) & (end_ns >= take(calls.start_ns, call))
    is_same = (call >= 0) & (thread == take(calls.thread, call))
    inside = is_same & in_time
    beside = (call >= 0) & ~is_same & (phase >= 0)  # an engine thread works for another one
    lane = np.where(inside, take(calls.lane, call), np.where(beside, _LANE_OF_PHASE[phase], _OUTSIDE))
    return np.where(inside, call, -1), lane


def _describe_ops(table: TableRows, call: Rows, names: Detail) -> Iterator[Detail]:
    yield Detail("call", np.append(names.values, -1)[call], names.dictionary)
    yield Detail("phase", table.phase, PHASES)
    for name in ("step", "nth", "flops", "bytes_read", "bytes_written", "saved_bytes", "raised"):
        yield Detail(name, table[name])


def read_step_rows(
    data: RecordingData, steps: Sequence[int], inside: Sequence[SpanRows], details: Wanted
) -> SpanRows:
    """Returns the spans of the given steps. A step whose end was not recorded begins with the first span inside it."""
    table = read_rows(data, "steps", steps)
    open_steps, open_start_ns = _find_open(table["step"], inside)
    missing = np.full(len(open_steps), -1)
    kind, kinds = table.codes("kind")
    step = np.concatenate([table["step"], open_steps])
    overhead_ns = table["overhead_ns"]
    known = (
        Detail("kind", np.concatenate([kind, missing]), kinds),
        Detail("step", step),
        Detail("overhead_ns", np.concatenate([np.where(overhead_ns > 0, overhead_ns, -1), missing])),
    )
    return SpanRows(
        name=Detail("name", np.arange(len(step)), tuple(f"step {number}" for number in step.tolist())),
        step=step,
        thread=np.full(len(step), -1),
        lane=np.full(len(step), LANE_KINDS.index(STEPS)),
        start_ns=np.concatenate([table["start_ns"], open_start_ns]),
        end_ns=np.concatenate([table["end_ns"], missing]),
        ended=np.arange(len(step)) < len(table),
        parent=np.full(len(step), -1, np.int64),
        row_id=step,
        details=choose_details(known, details),
    )


def _find_open(known: Column, inside: Sequence[SpanRows]) -> tuple[Column, Column]:
    """Returns the steps that have spans but no recorded end, and the start of the first span in each."""
    step = np.concatenate([rows.step for rows in inside])
    start_ns = np.concatenate([rows.start_ns for rows in inside])
    rows = np.flatnonzero(~np.isin(step, known))
    rows = rows[np.argsort(start_ns[rows], kind="stable")]
    found, first = np.unique(step[rows], return_index=True)
    return found.astype(np.int64), start_ns[rows][first]
