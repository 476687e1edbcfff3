"""Timelines of recordings typed by hand: lanes, nesting, what was clipped, and arrows."""

from typing import Any, NamedTuple

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.typed_steps import begin_net, typed_net
from modtrace.analysis.timeline.arrange import SPAN_KINDS
from modtrace.analysis.timeline.spans import Detail
from modtrace.analysis.timeline.timeline import FLOW_KINDS, Lane, Timeline, build_timeline
from modtrace.recording.options.schedule import StepRange


class Span(NamedTuple):
    """What is tested of a span: nanoseconds since the timeline's start."""

    lane: str
    name: str
    start_ns: int
    end_ns: int


def spans(found: Timeline) -> list[Span]:
    """The spans lane by lane."""
    each = found.spans
    rows = zip(each.lane, each.name, each.start_ns, each.start_ns + each.duration_ns, strict=True)
    named = [
        (int(lane), Span(found.lanes[lane].kind, each.names[name], int(start), int(end)))
        for lane, name, start, end in rows
    ]
    return [span for _, span in sorted(named, key=lambda pair: pair[0])]


def details(found: Timeline, name: str, kind: str = "call") -> list[dict[str, Any]]:
    """What is told of the spans of a name, in their order."""
    names, kinds = found.spans.names, found.spans.kind
    rows = [row for row, code in enumerate(found.spans.name) if names[code] == name]
    told = []
    for row in (row for row in rows if SPAN_KINDS[kinds[row]] == kind):
        values = {each.name: value for each in found.spans.details if (value := read(each, row)) is not None}
        told.append(values)
    return told


def read(detail: Detail, row: int) -> str | int | bool | None:
    """What a detail tells of a span; None where it tells nothing."""
    value = detail.values[row].item()
    if value is True:
        return True
    if value is False or value < 0:
        return None
    return value if detail.dictionary is None else detail.dictionary[value]


def arrows(found: Timeline) -> list[tuple[str, str, str]]:
    """The arrows: what they lead to, and `lane/name` of both ends."""
    lane, name, names = found.spans.lane, found.spans.name, found.spans.names

    def tell(row: int) -> str:
        return f"{found.lanes[lane[row]].kind}/{names[name[row]]}"

    ends = zip(found.flows.kind, found.flows.source, found.flows.target, strict=True)
    return [(FLOW_KINDS[kind], tell(source), tell(target)) for kind, source, target in ends]


def training(**meta: Any) -> TypedRecording:
    """One step: a net whose head is called twice and recomputed inside of the backward, then the optimizer."""
    build, net = typed_net(**meta)
    head = build.module("head", "Linear", parent=net)
    build.step(0, 1_000, 20_000)
    outer = build.call(net, 2_000, 6_000, nth=0)
    first = build.call(head, 2_500, 3_500, parent=outer, nth=0, flops=12, saved_bytes=64)
    second = build.call(head, 4_000, 5_000, parent=outer, nth=1)
    backward = build.backward(outer, 7_000, 15_000, nth=0)
    build.backward(second, 7_000, 11_000, parent=backward, nth=1)
    build.recompute(second, 8_000, 9_000, nth=1)
    build.backward(first, 11_000, 14_000, parent=backward, nth=0, overhead_ns=100)
    build.optimizer(16_000, 18_000)
    return build.data()


def test_each_phase_has_its_lane_and_calls_have_their_names() -> None:
    found = build_timeline(training())
    assert found.lanes == (
        Lane("steps", None),
        Lane("forward", 0),
        Lane("recompute", 0),
        Lane("backward", 0),
        Lane("optimizer", 0),
    )
    assert spans(found) == [
        ("steps", "step 0", 0, 19_000),
        ("forward", "Net", 1_000, 5_000),
        ("forward", "head", 1_500, 2_500),
        ("forward", "head@1", 3_000, 4_000),
        ("recompute", "head@1", 7_000, 8_000),
        ("backward", "Net", 6_000, 14_000),
        ("backward", "head@1", 6_000, 10_000),
        ("backward", "head", 10_000, 13_000),
        ("optimizer", "optimizer", 15_000, 17_000),
    ]


def test_arrows_lead_from_forward_to_backward_and_to_recompute() -> None:
    assert arrows(build_timeline(training())) == [
        ("backward", "forward/Net", "backward/Net"),
        ("backward", "forward/head@1", "backward/head@1"),
        ("recompute", "forward/head@1", "recompute/head@1"),
        ("backward", "forward/head", "backward/head"),
    ]


def test_what_is_known_of_a_call_is_told() -> None:
    found = build_timeline(training())
    forward, backward = details(found, "head")
    assert forward == {
        "type": "Linear", "phase": "forward", "step": 0, "nth": 0, "flops": 12, "saved_bytes": 64
    }  # fmt: skip
    assert backward == {"type": "Linear", "phase": "backward", "step": 0, "nth": 0, "overhead_ns": 100}
    assert details(found, "optimizer") == [{"phase": "optimizer", "step": 0}]
    assert details(found, "step 0", "step") == [{"step": 0, "kind": "train"}]


def test_the_wall_clock_of_the_start_comes_from_the_clock_anchor() -> None:
    anchored = training(clock_time_ns=5_000_000, clock_perf_counter_ns=3_000, rank=2, world_size=4)
    found = build_timeline(anchored)
    assert found.start_unix_ns == 4_998_000
    assert (found.rank, found.world_size) == (2, 4)
    assert build_timeline(training()).start_unix_ns is None


def test_child_that_ends_after_its_parent_by_rounding_is_clipped_without_a_word() -> None:
    build, net = typed_net(9_000)
    head = build.module("head", "Linear", parent=net)
    outer = build.call(net, 100, 5_000, nth=0)
    build.call(head, 90, 5_040, parent=outer, nth=0)
    found = build_timeline(build.data())
    assert spans(found)[1:] == [("forward", "Net", 100, 5_000), ("forward", "head", 100, 5_000)]
    assert "measured_end_ns" not in details(found, "head")[0]


def test_clip_of_more_than_a_microsecond_is_told_with_the_times_measured() -> None:
    build, net = typed_net()
    head = build.module("head", "Linear", parent=net)
    build.step(0, 1_000, 90_000)
    outer = build.call(net, 11_000, 21_000, nth=0)
    build.call(head, 6_000, 31_000, parent=outer, nth=0)
    found = build_timeline(build.data())
    assert spans(found)[2] == ("forward", "head", 10_000, 20_000)
    [told] = details(found, "head")
    assert (told["measured_start_ns"], told["measured_end_ns"]) == (5_000, 30_000)


def test_siblings_that_overlap_end_where_the_next_begins() -> None:
    build = RecordingBuilder()
    a, b = build.module("", "A"), build.module("", "B")
    build.step(0, 0, 90_000)
    build.call(a, 0, 30_000, nth=0)
    build.call(b, 10_000, 20_000, nth=0)
    found = build_timeline(build.data())
    assert spans(found)[1:] == [("forward", "A", 0, 10_000), ("forward", "B", 10_000, 20_000)]
    assert details(found, "A")[0]["measured_end_ns"] == 30_000


def test_call_that_never_ended_ends_with_its_parent_or_the_next_beside_it() -> None:
    build, net, outer = begin_net(90_000, 50_000, nth=0)
    a, b = (build.module(name, "Linear", parent=net) for name in "ab")
    build.call(a, 10_000, None, parent=outer, nth=0)
    build.call(b, 20_000, None, parent=outer, nth=0)
    found = build_timeline(build.data())
    assert spans(found)[1:] == [
        ("forward", "Net", 0, 50_000),
        ("forward", "a", 10_000, 20_000),
        ("forward", "b", 20_000, 50_000),
    ]
    assert [details(found, name)[0].get("unfinished") for name in ("Net", "a", "b")] == [None, True, True]
    assert "measured_end_ns" not in details(found, "a")[0]


def test_root_that_never_ended_ends_with_its_step_or_with_the_last_seen() -> None:
    build, net = typed_net(90_000)
    head = build.module("head", "Linear", parent=net)
    build.call(net, 0, None, nth=0)
    build.begin_step(1)
    second = build.call(net, 95_000, None, nth=0)
    build.call(head, 96_000, 99_000, parent=second, nth=0)
    found = build_timeline(build.data())
    assert spans(found) == [
        ("steps", "step 0", 0, 90_000),
        ("steps", "step 1", 95_000, 99_000),
        ("forward", "Net", 0, 90_000),
        ("forward", "Net", 95_000, 99_000),
        ("forward", "head", 96_000, 99_000),
    ]
    assert details(found, "step 1", "step") == [{"step": 1, "unfinished": True}]


def test_call_that_raised_says_so() -> None:
    build, net = typed_net(900)
    build.call(net, 0, 500, nth=0, raised=True)
    assert details(build_timeline(build.data()), "Net") == [
        {"type": "Net", "phase": "forward", "step": 0, "nth": 0, "raised": True}
    ]


def test_each_thread_has_lanes_of_its_own_and_a_parent_on_another_thread_is_none() -> None:
    build, net, outer = begin_net(9_000, 5_000, nth=0)
    head = build.module("head", "Linear", parent=net)
    build.call(head, 4_000, 8_000, parent=outer, nth=0, thread=1)
    build.backward(outer, 8_000, 8_500, thread=1)
    found = build_timeline(build.data())
    assert found.lanes == (
        Lane("steps", None), Lane("forward", 0), Lane("forward", 1), Lane("backward", 1)
    )  # fmt: skip
    assert spans(found)[1:3] == [("forward", "Net", 0, 5_000), ("forward", "head", 4_000, 8_000)]


def test_eval_step_inside_of_a_training_step_and_an_optimizer_inside_of_another_nest_by_their_times() -> None:
    build = RecordingBuilder()
    build.step(1, 3_000, 4_000, kind="eval")
    build.step(0, 0, 9_000)
    build.optimizer(5_000, 8_000)
    build.optimizer(6_000, 7_000)
    assert spans(build_timeline(build.data())) == [
        ("steps", "step 0", 0, 9_000),
        ("steps", "step 1", 3_000, 4_000),
        ("optimizer", "optimizer", 5_000, 8_000),
        ("optimizer", "optimizer", 6_000, 7_000),
    ]


def two_steps() -> TypedRecording:
    """Two steps; the backward of the second runs through a call of the first."""
    build, net = typed_net(1_000)
    first = build.call(net, 100, 900, nth=0)
    build.step(1, 1_000, 2_000)
    second = build.call(net, 1_100, 1_300, nth=0)
    build.backward(second, 1_400, 1_500, nth=0)
    build.backward(first, 1_500, 1_600, nth=0)
    return build.data()


def test_steps_can_be_chosen_and_arrows_into_other_steps_are_left_out() -> None:
    found = build_timeline(two_steps(), steps=StepRange(1, 2))
    assert found.steps == (1,)
    assert spans(found) == [
        ("steps", "step 1", 0, 1_000),
        ("forward", "Net", 100, 300),
        ("backward", "Net", 400, 500),
        ("backward", "Net", 500, 600),
    ]
    assert arrows(found) == [("backward", "forward/Net", "backward/Net")]
    assert len(arrows(build_timeline(two_steps()))) == 2


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (StepRange(7, 8), "no step 7 in this recording; there are: 0..1"),
        (StepRange(5, None), "no step of 5: in this recording; there are: 0..1"),
    ],
)
def test_step_that_is_not_there_is_an_error(steps: StepRange, message: str) -> None:
    with pytest.raises(ValueError) as error:
        build_timeline(two_steps(), steps=steps)
    assert str(error.value) == message


def with_ops() -> TypedRecording:
    """Ops in calls, beside them, and at another time than their call."""
    build, _, outer = begin_net(90_000, 20_000, nth=0)
    forward = build.op(
        outer, "aten.mm.default", 1_000, 2_000, flops=8, bytes_read=4, bytes_written=2, saved_bytes=None
    )
    build.op(None, "aten.nll_loss_forward.default", 30_000, 31_000)
    build.op(None, "aten.ones_like.default", 40_000, 41_000, phase="backward")
    backward = build.backward(outer, 50_000, 60_000, nth=0)
    build.op(backward, "aten.mm.default", 51_000, 52_000, forward=forward)
    build.op(backward, "aten.t.default", 53_000, None, thread=1)
    build.op(backward, "aten.add.Tensor", 70_000, 71_000, raised=True)
    return build.data()


def test_ops_lie_in_their_calls_and_others_in_a_lane_of_their_own() -> None:
    assert spans(build_timeline(with_ops())) == [
        ("steps", "step 0", 0, 90_000),
        ("forward", "Net", 0, 20_000),
        ("forward", "aten.mm.default", 1_000, 2_000),
        ("backward", "Net", 50_000, 60_000),
        ("backward", "aten.mm.default", 51_000, 52_000),
        ("outside of modules", "aten.nll_loss_forward.default", 30_000, 31_000),
        ("outside of modules", "aten.ones_like.default", 40_000, 41_000),
        ("outside of modules", "aten.add.Tensor", 70_000, 71_000),
        ("backward", "aten.t.default", 53_000, 90_000),
    ]


def test_what_is_known_of_an_op_is_told() -> None:
    found = build_timeline(with_ops())
    assert details(found, "aten.mm.default", "op")[0] == {
        "phase": "forward",
        "step": 0,
        "nth": 0,
        "flops": 8,
        "bytes_read": 4,
        "bytes_written": 2,
        "call": "Net",
    }
    [loss] = details(found, "aten.ones_like.default", "op")
    assert (loss["phase"], loss.get("call")) == ("backward", None)
    [late] = details(found, "aten.add.Tensor", "op")
    assert (late["call"], late["raised"]) == ("Net", True)
    assert details(found, "aten.t.default", "op")[0]["unfinished"] is True


def test_ops_are_left_out_when_asked_and_their_arrows_come_when_asked() -> None:
    assert [each.name for each in spans(build_timeline(with_ops(), ops=False))] == ["step 0", "Net", "Net"]
    assert len(arrows(build_timeline(with_ops()))) == 1
    assert arrows(build_timeline(with_ops(), op_flows=True))[1:] == [
        ("backward", "forward/aten.mm.default", "backward/aten.mm.default")
    ]


def test_note_on_the_output_of_a_call_is_told_but_not_that_on_its_gradient() -> None:
    build, net = typed_net(900)
    noted, other = build.call(net, 0, 100, nth=0), build.call(net, 200, 300, nth=1)
    build.output(noted, None, "[0]", note="a meta tensor has no values")
    build.output(noted, None, "[1]", note="another")
    build.gradient(other, None, note="a meta tensor has no values")
    found = build_timeline(build.data())
    assert details(found, "Net")[0]["note"] == "a meta tensor has no values"
    assert "note" not in details(found, "Net@1")[0]


def test_two_roots_are_told_apart() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 900)
    for start_ns, name in ((0, "G"), (500, "D")):
        root = build.module("", "Net", name=name)
        layer = build.module("layer", "Linear", parent=root)
        outer = build.call(root, start_ns, start_ns + 100, nth=0)
        build.call(layer, start_ns + 10, start_ns + 20, parent=outer, nth=0)
    assert [each["root"] for each in details(build_timeline(build.data()), "layer")] == ["G", "D"]


def test_missing_backward_times_are_known_where_a_training_step_is_shown() -> None:
    def forward_only(kind: str = "train", **meta: Any) -> Timeline:
        build, net = typed_net(**meta)
        build.step(0, 0, 900, kind=kind)
        build.call(net, 0, 100, nth=0)
        return build_timeline(build.data())

    assert forward_only().lacks_backward
    assert not forward_only("eval").lacks_backward
    assert not forward_only(options={"backward_times": True}).lacks_backward
    assert not build_timeline(training()).lacks_backward
    assert not build_timeline(with_ops(), ops=False).lacks_backward


def test_recording_of_nothing_has_an_empty_timeline() -> None:
    found = build_timeline(RecordingBuilder().data())
    assert (found.lanes, found.steps, len(found.spans), len(found.flows)) == ((), (), 0, 0)
    assert not found.lacks_backward


def test_arrow_that_would_lead_back_in_time_is_left_out() -> None:
    build, net = typed_net(900)
    forward = build.call(net, 500, 600, nth=0)
    build.backward(forward, 100, 200, nth=0)
    assert arrows(build_timeline(build.data())) == []


def test_step_ends_where_its_end_was_recorded_also_if_the_calls_of_another_are_later() -> None:
    build, net = typed_net()
    build.step(4, 0, 900)
    build.call(net, 0, None, nth=0)
    build.step(2, 1_000, 5_000)
    build.call(net, 1_000, None, nth=0)
    assert [each.end_ns for each in spans(build_timeline(build.data()))] == [900, 5_000, 900, 5_000]


def test_spans_have_no_details_but_those_that_are_asked_for() -> None:
    found = build_timeline(training(), details=("phase", "unfinished"))
    assert {detail.name for detail in found.spans.details} == {"phase", "unfinished"}
    assert spans(found) == spans(build_timeline(training()))
