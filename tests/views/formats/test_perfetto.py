"""The trace of a timeline: its text, its arrows, and what is no valid trace."""

from pathlib import Path
from typing import Any

import pytest

from builders import RecordingBuilder, TypedRecording
from golden import assert_golden
from helpers.trace_events import arrows, find_faults, lanes, load, spans
from helpers.typed_steps import typed_net
from helpers.whole_text import render_perfetto
from modtrace.analysis.timeline.timeline import build_timeline
from modtrace.errors import ModtraceError
from modtrace.views.formats.perfetto import count_events, iterate_perfetto, write_perfetto


def training() -> TypedRecording:
    """One step of a net with ops, checkpointed, which ends before its optimizer's step is recorded whole."""
    build = RecordingBuilder(
        argv=("train.py", "--lr", "0.1"),
        run_id="a1",
        rank=1,
        world_size=2,
        clock_time_ns=1_700_000_000_000_000_000,
        clock_perf_counter_ns=1_000_000,
        marks=("the run ended by KeyboardInterrupt",),
    )
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    build.step(0, 1_000_000, 1_090_000)
    outer = build.call(net, 1_000_000, 1_030_000, nth=0)
    inner = build.call(head, 1_010_000, 1_020_001, parent=outer, nth=0)
    op = build.op(inner, "aten.addmm.default", 1_011_000, 1_012_345, flops=1_200, saved_bytes=None)
    backward = build.backward(outer, 1_040_000, 1_080_000, nth=0)
    inner_backward = build.backward(inner, 1_040_000, 1_070_000, parent=backward, nth=0)
    build.recompute(inner, 1_045_000, 1_050_000, nth=0)
    build.op(inner_backward, "aten.mm.default", 1_060_000, 1_061_000, forward=op, raised=True)
    build.call(None, 1_085_000, None, phase="optimizer")
    return build.data()


def test_trace_is_as_it_was() -> None:
    assert_golden("timeline.json", render_perfetto(build_timeline(training(), op_flows=True)))


def test_trace_is_valid_and_has_as_many_events_as_are_counted() -> None:
    found = build_timeline(training(), op_flows=True)
    trace = load(render_perfetto(found))
    assert find_faults(trace) == []
    assert count_events(found) == len(trace["traceEvents"])
    assert lanes(trace) == ["steps", "forward", "recompute", "backward", "optimizer"]


def test_arrows_begin_and_end_at_their_calls_also_where_a_call_inside_begins_at_the_same_moment() -> None:
    trace = load(render_perfetto(build_timeline(training(), op_flows=True)))
    found = [(each.name, each.source["name"], each.target["name"]) for each in arrows(trace)]
    assert found == [
        ("backward", "Net", "Net"),
        ("backward", "head", "head"),
        ("recompute", "head", "head"),
        ("backward", "aten.addmm.default", "aten.mm.default"),
    ]


def test_lanes_of_several_threads_name_them() -> None:
    build, net = typed_net(900)
    for thread in (1, 0):
        build.call(net, 100, 200, nth=0, thread=thread)
        build.optimizer(300, 400, thread=thread)
    trace = load(render_perfetto(build_timeline(build.data())))
    assert find_faults(trace) == []
    assert lanes(trace) == [
        "steps",
        "forward (thread 0)",
        "optimizer (thread 0)",
        "forward (thread 1)",
        "optimizer (thread 1)",
    ]


def test_names_that_json_must_escape_stay_as_they_are() -> None:
    build = RecordingBuilder()
    net = build.module("", 'Net"\\\n\u2603\U0001f525')
    build.step(0, 0, 900)
    build.call(net, 0, 100, nth=0)
    text = render_perfetto(build_timeline(build.data()))
    assert text.isascii()
    assert spans(load(text))[-1]["name"] == 'Net"\\\n\u2603\U0001f525'


def test_trace_of_nothing_is_valid() -> None:
    found = build_timeline(RecordingBuilder().data())
    trace = load(render_perfetto(found))
    assert find_faults(trace) == []
    assert spans(trace) == []
    assert count_events(found) == 2
    assert trace["otherData"] == {"tool": "modtrace", "rank": 0, "world_size": 1}


def test_backward_times_that_are_missing_are_told_in_the_trace() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 900)
    build.call(build.module("", "Net"), 0, 100, nth=0)
    told = load(render_perfetto(build_timeline(build.data())))["otherData"]["missing"]
    assert told == (
        "no backward calls are shown: when they began and ended was not recorded. "
        "Record with backward_times=True or ops=True (modtrace record --backward-times or --ops)."
    )


def many_calls(count: int) -> TypedRecording:
    """More spans than are written at once, each with an arrow to its backward."""
    build, net = typed_net(1_000_000)
    calls = [build.call(net, 10 * nth, 10 * nth + 5, nth=nth) for nth in range(count)]
    for nth, call in enumerate(calls):
        build.backward(call, 500_000 + 10 * nth, 500_000 + 10 * nth + 5, nth=nth)
    return build.data()


def test_long_trace_comes_in_pieces_and_is_valid() -> None:
    found = build_timeline(many_calls(3_000))
    pieces = list(iterate_perfetto(found))
    trace = load("".join(pieces))
    assert len(pieces) == 5
    assert (
        find_faults({**trace, "traceEvents": trace["traceEvents"][:500]}) != []
    )  # arrows without their ends
    assert len(trace["traceEvents"]) == count_events(found) == 2 + 6 + 6_001 + 6_000
    assert all(each.source["name"] == each.target["name"] for each in arrows(trace))


def test_file_has_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    found = build_timeline(training())
    write_perfetto(found, path)
    assert path.read_text(encoding="utf-8") == render_perfetto(found)
    assert list(tmp_path.iterdir()) == [path]


def test_path_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "trace.json"
    with pytest.raises(ModtraceError) as error:
        write_perfetto(build_timeline(training()), path)
    assert str(error.value) == f"{path}: cannot be written: No such file or directory. Give another path."


X = {"ph": "X", "name": "a", "ts": 1, "dur": 2, "pid": 0, "tid": 1}
S = {"ph": "s", "name": "to", "cat": "flow", "id": 1, "ts": 1, "pid": 0, "tid": 1}


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([{**X, "ph": "Q"}], "event 0: no ph that is known"),
        ([{"ph": "X", "name": "a", "ts": 1, "pid": 0, "tid": 1}], "event 0: X without dur"),
        ([{**X, "dur": -1}], "event 0: dur is -1"),
        ([{**X, "ts": "1"}], "event 0: ts is '1'"),
        ([{**X, "color": 1}], "event 0: unknown key color"),
        ([X, {**X, "name": "b", "ts": 2}], "b at 2 ends after a, in which it began"),
        ([X, S], "flow ('flow', 'to', 1) has not one begin and one end"),
        ([X, S, {**S, "ph": "f", "ts": 9}], "flow ('flow', 'to', 1) at 9 lies in no span"),
        ([X, {**S, "ts": 2}, {**S, "ph": "f"}], "flow ('flow', 'to', 1) ends before it begins"),
        ([{"ph": "M", "name": "thread_name", "pid": 0, "args": {"name": "a"}}], "event 0: thread_name without tid"),
    ],
)  # fmt: skip
def test_trace_that_is_not_valid_is_found_out(events: list[Any], fault: str) -> None:
    assert find_faults({"traceEvents": events}) == [fault]
    assert find_faults(events) == ["no list of traceEvents"]
