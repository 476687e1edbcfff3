"""Builds a timeline: spans of steps, calls and ops in lanes for threads and phases, with arrows between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.options.schedule import ALL_STEPS, StepRange
from ...recording.phase import BACKWARD, PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ..tables.chosen_step import name_steps
from ..tables.columns import Column, Rows
from ..tables.ops import has_ops
from ..tables.rows import find_recorded_steps, read_rows
from .arrange import SPAN_KINDS, Arranged, Lane, Spans, arrange
from .rows import CallRows, read_call_rows, read_op_rows, read_step_rows
from .spans import Wanted, join_rows

_CALL, _OP, _STEP = (SPAN_KINDS.index(kind) for kind in ("call", "op", "step"))

#: The kinds of arrows: from a forward to its backward, and to its recompute.
FLOW_KINDS = (BACKWARD, RECOMPUTE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Flows:
    """Arrows from forwards to their backwards and recomputes."""

    kind: Column  # codes of FLOW_KINDS
    source: Rows  # indices of spans
    target: Rows

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """The spans of some steps of a recording."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    run_id: str
    rank: int
    world_size: int
    start_ns: int  # time 0 of the timeline on the clock of the recording
    start_unix_ns: int | None  # time 0 as a time of day; None if the recording has no clock anchor
    steps: tuple[int, ...]
    lanes: tuple[Lane, ...]  # from top to bottom
    spans: Spans
    flows: Flows
    lacks_backward: bool  # whether a training step is shown whose backward times were not recorded
    lacks_device_times: bool = False  # whether device times were to be recorded, but none is known


def build_timeline(
    data: RecordingData,
    *,
    steps: StepRange = ALL_STEPS,
    ops: bool = True,
    op_flows: bool = False,
    details: Wanted = None,
) -> Timeline:
    """Returns the steps, calls and ops of a recording with their times, clipped so that they nest.

    A span lies inside the span of its call. Times that were measured otherwise, or that have no end, are clipped. If
    this moves a time by more than a microsecond, the span has the measured times as details `measured_start_ns` and
    `measured_end_ns`. A span that never ended has the detail `unfinished`.

    Args:
        data: the recording.
        steps: the steps to include.
        ops: includes the ops, if they were recorded.
        op_flows: includes arrows from forward ops to those of their backward.
        details: the names of the details to include; None for all.

    Raises:
        ValueError: the recording has no such step.
    """
    wanted = _choose(data, steps)
    calls = read_call_rows(data, wanted, details)
    of_ops = read_op_rows(data, wanted if ops else (), calls, details)
    of_steps = read_step_rows(data, wanted, (calls.spans, of_ops.spans), details)
    parts = (calls.spans, of_ops.spans, of_steps, calls.on_device, of_ops.on_device)
    kind = np.repeat(np.array([_CALL, _OP, _STEP, _CALL, _OP], np.int8), [len(part) for part in parts])
    rows, op_origin = join_rows(parts, parents=(0, 0, 2, 3, 4)), of_ops.origin if op_flows else None
    del of_ops, parts  # which for a million ops take 60 MB
    arranged = arrange(rows, kind, details)
    meta, start_ns = data.meta, arranged.start_ns
    return Timeline(
        command=meta.argv,
        marks=meta.marks,
        run_id=meta.run_id,
        rank=meta.rank,
        world_size=meta.world_size,
        start_ns=start_ns,
        start_unix_ns=meta.clock_time_ns + start_ns - meta.clock_perf_counter_ns
        if meta.clock_time_ns
        else None,
        steps=wanted,
        lanes=arranged.lanes,
        spans=arranged.spans,
        flows=_find_flows(calls, op_origin, arranged),
        lacks_backward=_lacks_backward(data, calls, wanted),
        lacks_device_times=bool(data.meta.options.get("device_times")) and not len(calls.on_device),
    )


def _choose(data: RecordingData, steps: StepRange) -> tuple[int, ...]:
    known = find_recorded_steps(data)
    wanted = tuple(step for step in known if step in steps)
    if not wanted and steps != ALL_STEPS:
        is_one = steps.stop == steps.start + 1
        named = f"{steps.start}" if is_one else f"of {steps}"
        raise ValueError(f"no step {named} in this recording; there are: {name_steps(known) or 'none'}")
    return wanted


def _lacks_backward(data: RecordingData, calls: CallRows, steps: Sequence[int]) -> bool:
    asked = data.meta.options.get("backward_times") or has_ops(data)
    if asked or np.any(calls.phase == PHASES.index(BACKWARD)):
        return False
    kind, kinds = read_rows(data, "steps", steps).codes("kind")
    return "train" in {kinds[code] for code in kind.tolist() if code >= 0}


def _find_flows(calls: CallRows, op_origin: Rows | None, arranged: Arranged) -> Flows:
    """Returns the arrows from calls, and from ops if their origins are given. No arrow leads back in time."""
    call = np.flatnonzero(calls.origin >= 0)
    kind = np.where(calls.phase[call] == PHASES.index(BACKWARD), 0, 1)
    source, target = calls.origin[call], call
    if op_origin is not None:
        op = np.flatnonzero(op_origin >= 0)
        first = len(calls.call_id)
        kind = np.concatenate([kind, np.zeros(len(op), np.int64)])
        source = np.concatenate([source, op_origin[op] + first])
        target = np.concatenate([target, op + first])
    source, target = arranged.place[source], arranged.place[target]
    forth = arranged.spans.start_ns[source] <= arranged.spans.start_ns[target]
    return Flows(kind=kind[forth], source=source[forth], target=target[forth])
