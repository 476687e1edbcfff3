"""Makes the table of the timeline's spans, and its lanes."""

from collections.abc import Iterator, Mapping

import numpy as np

from ...recording.protocols import RecordingData
from ..graph.columns import Graph
from ..tables.columns import Column, RowFinder, Rows, column_of
from ..timeline.arrange import SPAN_KINDS
from ..timeline.names import name_calls
from ..timeline.timeline import Timeline
from .cut import GraphCut
from .modules import Place
from .tables import NONE, ReportColumn, ReportLane, ReportTable, coded_column, number_column, seconds

_CALL, _OP, _STEP = range(len(SPAN_KINDS))


def list_lanes(timeline: Timeline) -> tuple[ReportLane, ...]:
    """Returns the lanes from top to bottom."""
    several = len({each.thread for each in timeline.lanes if each.thread is not None}) > 1
    return tuple(
        ReportLane(
            label=f"{each.kind}, thread {each.thread}" if several and each.thread is not None else each.kind,
            kind=each.kind,
            thread=each.thread,
            rank=timeline.rank,
        )
        for each in timeline.lanes
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
    """Returns the spans in the order in which they begin, outer ones before inner ones.

    Args:
        data: the recording.
        timeline: the spans.
        graph: the graph of the shown step, whose rows its calls and ops refer to.
        cut: which of these rows are shown.
        index: the row of each module.
        steps: the numbers of the steps, in the order of their table.
        zero_ns: the time on the clock of the recording that starts count from; None for that of the first span.
    """
    spans = timeline.spans
    first_ns = 0 if zero_ns is None else timeline.start_ns - zero_ns
    is_call, is_op = spans.kind == _CALL, spans.kind == _OP
    call_id = np.where(is_call, spans.row_id, _calls_of_ops(data, spans.row_id, is_op))
    step = next((each.values for each in spans.details if each.name == "step"), np.full(len(spans), NONE))
    columns = (
        number_column("lane", "lane", "count", spans.lane),
        coded_column("label", "name", spans.name, spans.names),
        coded_column("kind", "kind", spans.kind, SPAN_KINDS),
        number_column("start", "start", "seconds", (spans.start_ns + first_ns) / 1e9),
        number_column("duration", "duration", "seconds", seconds(spans.duration_ns)),
        number_column("depth", "depth", "count", spans.depth),
        number_column("step", "step", "step", RowFinder(steps)(step)),
        number_column("module", "module", "module", _modules_of(data, call_id, index)),
        number_column("node", "node", "node", cut.renumber(_nodes_of(graph, spans.row_id, is_call, is_op))),
        *_phases(timeline),
    )
    return ReportTable(rows=len(spans), columns=columns)


def _phases(timeline: Timeline) -> Iterator[ReportColumn]:
    for each in timeline.spans.details:
        if each.name == "phase":
            yield coded_column("phase", "phase", each.values, each.dictionary or (), kind="phase")


def _calls_of_ops(data: RecordingData, op_id: Column, is_op: Column) -> Column:
    ops = data.table("ops").select(["op_id", "call_id"])
    row = RowFinder(column_of(ops, "op_id"))(np.where(is_op, op_id, NONE))
    return np.append(column_of(ops, "call_id"), NONE)[row]


def _modules_of(data: RecordingData, call_id: Column, index: Mapping[Place, int]) -> Rows:
    named = name_calls(data.table("modules"), data.table("calls"))
    of_place = np.array(
        [*(index.get(each, NONE) for each in zip(named.roots, named.paths, strict=True)), NONE], np.int64
    )
    of_call = np.append(of_place[named.place], NONE)
    return of_call[RowFinder(named.calls.call_id)(np.where(call_id >= 0, call_id, -2))]


def _nodes_of(graph: Graph, row_id: Column, is_call: Column, is_op: Column) -> Rows:
    layer = RowFinder(graph.layers.call_id)(np.where(is_call, row_id, -2))
    node = RowFinder(graph.nodes.op_id)(np.where(is_op, row_id, -2))
    return np.where(layer >= 0, layer, np.where(node >= 0, node + len(graph.layers), NONE))
