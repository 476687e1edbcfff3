"""Builds the tables of steps and of the timeline's spans, and lists its lanes."""

from collections.abc import Iterator, Mapping

import numpy as np

from ...recording.protocols import RecordingData
from ..graph.columns import Graph
from ..tables.calls import read_all_calls
from ..tables.columns import Column, Rows, column_of, dictionary_codes, find_rows
from ..tables.placement import Placer
from ..timeline.arrange import SPAN_KINDS, Spans
from ..timeline.timeline import Timeline
from .limits import GraphCut
from .modules import Place
from .tables import (
    NONE,
    ReportColumn,
    ReportLane,
    ReportTable,
    coded_column,
    number_column,
    round_to_show,
    seconds,
    text_column,
)

_CALL, _OP, _STEP = (SPAN_KINDS.index(kind) for kind in ("call", "op", "step"))
#: The details of spans that their table has.
SPAN_DETAILS = ("step", "overhead_ns", "phase")
#: An id that no row has; -1 does not serve, as rows without id have it.
_NO_ID = -2


def number_steps(data: RecordingData) -> Column:
    """Returns the numbers of all steps that have rows, ascending."""
    tables = (data.table(name) for name in ("steps", "calls", "ops", "values", "scalars"))
    return np.unique(np.concatenate([column_of(table, "step") for table in tables])).astype(np.int64)


def find_start(data: RecordingData) -> int | None:
    """Returns the start of the first step on the recording's clock; None if no start was recorded."""
    starts = column_of(data.table("steps"), "start_ns")
    return int(starts[starts >= 0].min()) if (starts >= 0).any() else None


def tabulate_steps(data: RecordingData, numbers: Column, zero_ns: int | None) -> ReportTable:
    """Returns a row for each step; their starts count from `zero_ns`."""
    table = data.table("steps")
    row = find_rows(column_of(table, "step"), numbers)
    start, end, overhead = (
        np.append(column_of(table, name), NONE)[row] for name in ("start_ns", "end_ns", "overhead_ns")
    )
    kinds = [*table["kind"].to_pylist(), None]
    known = start >= 0
    taken = np.where(known, (end - start - np.maximum(overhead, 0)) / 1e9, np.nan)
    columns = (
        number_column("number", "step", "count", numbers),
        text_column("kind", "kind", (kinds[number] for number in row.tolist())),
        number_column("start", "start", "seconds", np.where(known, (start - (zero_ns or 0)) / 1e9, np.nan)),
        number_column("duration", "duration", "seconds", taken, overlay=True),
        *_scalars(data, numbers),
    )
    return ReportTable(rows=len(numbers), columns=columns)


def _scalars(data: RecordingData, numbers: Column) -> Iterator[ReportColumn]:
    """Yields two columns for each scalar: its last value in each step, and whether it was logged."""
    table = data.table("scalars")
    codes, names = dictionary_codes(table["name"])
    row, values = find_rows(numbers, column_of(table, "step")), table["value"].to_numpy()
    for code, name in enumerate(names):
        column = np.full(len(numbers), np.nan)
        rows = np.flatnonzero(codes == code)
        column[row[rows]] = values[rows]
        yield number_column(f"scalar.{name}", name, "number", column, scalar=True, overlay=True)
        logged = np.zeros(len(numbers), np.uint8)
        logged[row[rows]] = 1  # distinguishes a logged NaN from a missing value
        yield number_column(f"logged.{name}", f"{name} was logged", "flag", logged)


def list_lanes(timeline: Timeline) -> tuple[ReportLane, ...]:
    """Returns the lanes from top to bottom."""
    several = len({lane.thread for lane in timeline.lanes} - {None}) > 1
    return tuple(
        ReportLane(
            label=f"{lane.kind}, thread {lane.thread}" if several and lane.thread is not None else lane.kind,
            kind=lane.kind,
            thread=lane.thread,
            rank=timeline.rank,
        )
        for lane in timeline.lanes
    )


def tabulate_spans(
    data: RecordingData,
    timeline: Timeline,
    graph: Graph,
    cut: GraphCut,
    index: Mapping[Place, int],
    steps: Column,
    zero_ns: int | None,
) -> ReportTable:
    """Returns the spans in the order of their start, outer ones before inner ones.

    Args:
        data: the recording.
        timeline: the spans.
        graph: the graph of the shown step, to whose rows calls and ops of that step refer.
        cut: the selection of the graph's rows that are shown.
        index: the row of each module.
        steps: the numbers of the steps, in the order of their table.
        zero_ns: the time on the recording's clock from which starts count; None for the start of the first span.
    """
    spans = timeline.spans
    details = {detail.name: detail for detail in spans.details}
    first_ns = 0 if zero_ns is None else timeline.start_ns - zero_ns
    call = np.where(spans.kind == _CALL, spans.row_id, _NO_ID)
    op = np.where(spans.kind == _OP, spans.row_id, _NO_ID)
    step = details["step"].values if "step" in details else np.full(len(spans), NONE)
    layer, node = find_rows(graph.layers.call_id, call), find_rows(graph.nodes.op_id, op)
    node = np.where(layer >= 0, layer, np.where(node >= 0, node + len(graph.layers), NONE))
    columns = [
        number_column("lane", "lane", "count", spans.lane),
        coded_column("label", "name", spans.name, spans.names),
        coded_column("kind", "kind", spans.kind, SPAN_KINDS),
        number_column("start", "start", "seconds", (spans.start_ns + first_ns) / 1e9),
        number_column("duration", "duration", "seconds", seconds(spans.duration_ns)),
        number_column("depth", "depth", "count", spans.depth),
        number_column("step", "step", "step", find_rows(steps, step)),
        number_column("module", "module", "module", _find_modules(data, call, op, index)),
        number_column("node", "node", "node", cut.renumber(node)),
    ]
    if "overhead_ns" in details:
        measuring = _find_own_measuring(spans, details["overhead_ns"].values)
        if (measuring > 0).any():
            columns.append(
                number_column("measuring", "measuring", "seconds", round_to_show(seconds(measuring)))
            )
    if "phase" in details:
        phase = details["phase"]
        columns.append(coded_column("phase", "phase", phase.values, phase.dictionary or (), kind="phase"))
    return ReportTable(rows=len(spans), columns=tuple(columns))


def _find_own_measuring(spans: Spans, overhead_ns: Column) -> Column:
    """Returns how long modtrace measured in each call and op at its end, and not in what is inside it; -1 for none."""
    inside = np.zeros(len(spans), np.int64)
    known = np.maximum(overhead_ns, 0)
    for lane in np.unique(spans.lane):
        of_lane = np.flatnonzero(spans.lane == lane)
        depth = spans.depth[of_lane]
        for level in range(1, int(depth.max()) + 1):
            rows, outer = of_lane[depth == level], of_lane[depth == level - 1]
            around = outer[np.searchsorted(outer, rows) - 1]
            inside += np.bincount(around, known[rows], len(spans)).astype(np.int64)
    own = np.clip(known - inside, 0, spans.duration_ns)
    return np.where((own > 0) & (spans.kind != _STEP), own, NONE)


def _find_modules(data: RecordingData, call_id: Column, op_id: Column, index: Mapping[Place, int]) -> Rows:
    """Returns the row of the module that each span is a call of, or in whose call it ran."""
    ops = data.table("ops").select(["op_id", "call_id"])
    of_op = np.append(column_of(ops, "call_id"), NONE)[find_rows(column_of(ops, "op_id"), op_id)]
    calls = read_all_calls(data.table("calls"), Placer(data))
    places = (index.get((module.root, module.path), NONE) for module in calls.placer.name_modules())
    of_call = np.append(np.array([*places, NONE], np.int64)[calls.place], NONE)
    call_id = np.where(call_id >= 0, call_id, np.where(of_op >= 0, of_op, _NO_ID))
    return of_call[find_rows(calls.call_id, call_id)]
