"""What holds for every recording, also one whose times make no sense: its trace is valid, and loses nothing."""

from hypothesis import given, settings
from hypothesis import strategies as st

from builders import RecordingBuilder, TypedRecording
from helpers.trace_events import find_faults, load, spans
from helpers.whole_text import render_perfetto
from modtrace.analysis.timeline.timeline import build_timeline
from modtrace.views.formats.perfetto import count_events

PHASES = ("forward", "backward", "recompute", "optimizer")
times = st.integers(0, 50)
ends = st.none() | st.integers(0, 20)


@st.composite
def recordings(draw: st.DrawFn) -> TypedRecording:
    """Calls and ops with any parents, phases, threads and times."""
    build = RecordingBuilder()
    net = build.module("", "Net")
    for number in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            build.step(number, start := draw(times), start + draw(st.integers(0, 40)))
        else:
            build.begin_step(number)
        first = number * 100
        calls: list[int] = []
        for _ in range(draw(st.integers(0, 6))):
            phase, start, lasts = draw(st.sampled_from(PHASES)), first + draw(times), draw(ends)
            known = st.none() | st.sampled_from(calls) if calls else st.none()
            calls.append(
                build.call(
                    None if phase == "optimizer" else net,
                    start,
                    None if lasts is None else start + lasts,
                    parent=draw(known),
                    phase=phase,
                    forward=draw(known) if phase == "backward" else None,
                    recompute_of=draw(known) if phase == "recompute" else None,
                    nth=draw(st.none() | st.integers(0, 2)),
                    thread=draw(st.integers(0, 1)),
                )
            )
        for nth in range(draw(st.integers(0, 4))):
            start, lasts = first + draw(times), draw(ends)
            build.op(
                draw(st.none() | st.sampled_from(calls)) if calls else None,
                "aten.relu.default",
                start,
                None if lasts is None else start + lasts,
                thread=draw(st.integers(0, 1)),
                forward=nth - 1 if nth and draw(st.booleans()) else None,
            )
    return build.data()


@settings(max_examples=60, deadline=None)
@given(recordings())
def test_trace_is_valid_and_has_every_call_and_op(data: TypedRecording) -> None:
    found = build_timeline(data, op_flows=True)
    trace = load(render_perfetto(found))
    assert find_faults(trace) == []
    assert len(trace["traceEvents"]) == count_events(found)
    kinds = [each["cat"] for each in spans(trace)]
    assert kinds.count("call") == data.table("calls").num_rows
    assert kinds.count("op") == data.table("ops").num_rows
