"""Why a recording has no rows: nobody wanted them, or they are missing."""

from typing import Any

import pytest

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.provenance.search import find_first
from modtrace.analysis.tables.missing_rows import explain_none, require_ops
from modtrace.analysis.values.selection import Selection, kept_values, select_values
from modtrace.api.graph import graph_of
from modtrace.errors import NothingRecordedError
from modtrace.recording.meta import HELD, Note, RunMeta

NOT_CLOSED = "not closed: the process ended or is still running; no step is complete"
HELD_BACK = Note(step=7, kind=HELD, reason="no trigger fired; 8 steps were held and dropped")


def meta(**more: Any) -> RunMeta:
    wanted = {"values": "stats", "ops": {"saved": True}}
    return RunMeta(**{"complete": True, "options": wanted, **more})


def explain(what: str, *, called: bool = True, **more: Any) -> str:
    """Why there are none in a recording of one step, in which a module was called or not."""
    build = RecordingBuilder(**vars(meta(**more)))
    if called:
        build.step(0, 0, 900)
        build.call(build.module("", "Net"), 0, 500)
    return explain_none(build.data(), what)


@pytest.mark.parametrize(
    ("what", "advice"),
    [
        ("ops", "Record with ops=True (modtrace record --ops)."),
        (
            "values",
            "Record with values='stats' or modtrace.Capture(...) "
            "(modtrace record --values stats or --capture).",
        ),
        (
            "whole tensors",
            "Record with values=modtrace.Capture(tensors=True) (modtrace record --capture tensors).",
        ),
    ],
)
def test_rows_that_nobody_wanted_are_explained_by_the_option(what: str, advice: str) -> None:
    unwanted = {"values": None, "ops": None}
    for marks in ((), (NOT_CLOSED,)):
        assert explain(what, options=unwanted, marks=marks) == f"no {what} were recorded. {advice}"
    assert explain(what, options={}) == f"no {what} were recorded. {advice}"


@pytest.mark.parametrize("what", ["calls", "ops", "values"])
@pytest.mark.parametrize(
    "options", [{"values": "stats", "ops": {}, "steps": "0:"}, {}], ids=["known", "lost"]
)
def test_rows_that_are_missing_are_explained_by_the_marks(what: str, options: dict[str, Any]) -> None:
    wanted = {name: each if name != "ops" else {"saved": False} for name, each in options.items()}
    marks = ("values.arrow is missing", NOT_CLOSED)
    found = explain(what, called=False, options=wanted, complete=False, marks=marks)
    assert found == (
        f"no {what} are in this recording. The recording is not whole: values.arrow is missing; {NOT_CLOSED}."
    )


def test_whole_tensors_are_wanted_by_the_capture_that_keeps_them() -> None:
    captures = [{"roles": ["output"]}, {"roles": ["input"], "tensors": True}]
    missing = explain("whole tensors", options={"values": captures}, marks=("values.arrow is missing",))
    assert missing.startswith("no whole tensors are in this recording. The recording is not whole")
    unwanted = explain("whole tensors", options={"values": captures[:1]}, marks=("values.arrow is missing",))
    assert unwanted.startswith("no whole tensors were recorded. Record with")


def test_steps_that_were_held_are_the_reason() -> None:
    assert explain("values", called=False, notes=(HELD_BACK,)) == (
        "no values are in this recording: no trigger fired; 8 steps were held and dropped"
    )


def test_steps_that_were_held_do_not_hide_that_files_are_cut() -> None:
    assert explain("values", called=False, notes=(HELD_BACK,), marks=("values.arrow is cut",)) == (
        "no values are in this recording: no trigger fired; 8 steps were held and dropped. "
        "The recording is not whole: values.arrow is cut."
    )


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("ops", "no op ran on the thread that entered it, and it has no ops of other threads"),
        ("steps", "its calls are of no step"),
    ],
)
def test_whole_recording_in_which_nothing_ran_says_so(what: str, why: str) -> None:
    assert explain(what) == f"no {what} are in this recording: {why}."


@pytest.mark.parametrize("what", ["calls", "ops", "values", "whole tensors"])
@pytest.mark.parametrize("wanted", [True, False])
def test_recording_in_which_no_module_was_called_gives_no_advice_about_options(
    what: str, wanted: bool
) -> None:
    options = {"values": "stats", "ops": {}} if wanted else {"values": None, "ops": None, "steps": "0:"}
    assert explain(what, called=False, options=options) == (
        f"no {what} are in this recording: no module was called in its steps."
    )


@pytest.mark.parametrize("what", ["calls", "ops", "values"])
def test_steps_that_lie_behind_the_end_of_the_run_are_the_reason(what: str) -> None:
    assert explain(what, called=False, options={"values": "stats", "ops": None, "steps": "1000:2000"}) == (
        f"no {what} are in this recording: no step of 1000:2000 ran."
    )


def test_recording_that_is_being_made_has_none_yet() -> None:
    assert explain("values", complete=False) == (
        "no values are in this recording yet: no step with any has ended."
    )


def recording(**more: Any) -> TypedRecording:
    """Two steps; the ops of the second are not there."""
    build = RecordingBuilder(**vars(meta(**more)))
    net = build.module("", "Net")
    for step in (0, 1):
        build.step(step, step * 1000, step * 1000 + 900)
        call = build.call(net, step * 1000, step * 1000 + 500)
        if step == 0:
            build.tensor([2], producer=build.op(call, "aten.relu.default", 10, 20))
            build.output(call, None, note="meta tensor: it has no elements")
    return build.data()


def test_step_without_ops_says_which_steps_have_some() -> None:
    with pytest.raises(NothingRecordedError) as raised:
        require_ops(recording(), 1)
    assert str(raised.value) == "no ops are of step 1; steps with ops: 0."


def test_phase_without_ops_says_in_which_there_are_some() -> None:
    require_ops(recording(), 0, "forward")
    with pytest.raises(NothingRecordedError) as raised:
        require_ops(recording(marks=("ops.arrow is cut",)), 0, "recompute")
    assert str(raised.value) == (
        "no ops of step 0 ran in phase 'recompute'; they ran in: forward. "
        "The recording is not whole: ops.arrow is cut."
    )


def test_graph_of_a_step_whose_ops_are_missing_is_refused() -> None:
    assert graph_of(recording()).view.step.step == 1
    with pytest.raises(
        NothingRecordedError, match=r"^no ops are of step 1; steps with ops: 0\. The recording"
    ):
        graph_of(recording(marks=("ops.arrow is cut",)))


def test_tensors_that_could_not_be_measured_are_no_finite_tensors() -> None:
    with pytest.raises(NothingRecordedError) as raised:
        find_first(recording())
    assert str(raised.value) == (
        "none of the 1 tensors in this recording could be measured: meta tensor: it has no elements."
    )


def test_role_whose_rows_may_be_missing_says_so() -> None:
    damaged = recording(marks=("values.arrow is cut",))
    with pytest.raises(ValueError, match=r"The recording is not whole: values.arrow is cut\.$"):
        select_values(damaged, Selection(None, "input"))


def test_error_is_a_value_error_as_other_questions_about_nothing() -> None:
    with pytest.raises(ValueError, match=r"^no whole tensors were recorded\. Record with"):
        kept_values(recording())
