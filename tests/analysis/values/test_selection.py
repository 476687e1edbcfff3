"""Which rows are meant, in which order their sites stand, and what is said when none is."""

from typing import Any

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.typed_runs import typed_run
from modtrace.analysis.values.history import History, build_history
from modtrace.analysis.values.selection import Selection
from modtrace.recording.meta import HELD, Note


def history(data: TypedRecording, stat: str = "max", **wanted: Any) -> History:
    return build_history(data, stat, Selection(**wanted))


def test_what_an_op_of_the_optimizer_has_read_is_not_the_parameter_once_more() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.step(0, 0, 100)
    site = build.site(net, "parameter", "weight")
    build.value(site, [1.0], phase="optimizer", op_id=build.op(None, "aten.mul_", 1, 2, phase="optimizer"))
    build.value(site, [1.0], phase="optimizer")

    assert history(build.data(), "count", role="parameter").values.tolist() == [[1.0]]


def test_outputs_of_ops_stand_in_the_order_in_which_the_ops_ran_with_all_their_slots() -> None:
    build = RecordingBuilder()
    fc = build.module("fc", "Linear", parent=build.module("", "Net"))
    build.step(0, 0, 100)
    call = build.call(fc, 0, 5, nth=0)
    ops = (("aten.split", "[0]"), ("aten.split", "[1]"), ("aten.relu", ""))
    for site, (op, slot) in enumerate(ops):
        row = {"site_id": site, "module_id": fc, "nth": 0, "role": "op_output", "slot": slot}
        build._rows["sites"].append(row | {"op": op, "op_nth": 0})
        build.value(site, [1.0], call=call, op_id=site)

    assert history(build.data(), role="op_output").sites == (
        "fc/aten.split[0]",
        "fc/aten.split[1]",
        "fc/aten.relu",
    )


def test_a_module_that_ran_first_in_a_backward_stands_where_its_forward_does() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net")
    late, early = build.module("late", "Linear", parent=net), build.module("early", "Linear", parent=net)
    build.step(0, 0, 100)
    build.call(late, 0, 5, phase="backward")  # a custom Function's backward has called it
    for module, begin in ((early, 10), (late, 20)):
        build.output(build.call(module, begin, begin + 5, nth=0), [1.0])

    assert history(build.data()).sites == ("early", "late")


def test_a_parameter_that_no_module_owns_is_not_meant_by_the_path_of_the_root() -> None:
    build = RecordingBuilder()
    build.parameter(None, "alone", [1.0])

    with pytest.raises(ValueError, match=r"^path='' matches no module or parameter with role='parameter'"):
        history(build.data(), path="", role="parameter")


def test_of_many_steps_the_first_and_the_last_are_said() -> None:
    with pytest.raises(ValueError) as raised:
        history(typed_run(1, tuple(range(12))), steps=99)
    assert str(raised.value) == "step=99: nothing was measured there; there are: 0, 1, 2, 3, 4, 5, 6, …, 11"


def test_a_recording_whose_steps_were_held_and_never_written_says_why_it_is_empty() -> None:
    held = Note(step=7, kind=HELD, reason="no trigger fired")
    with pytest.raises(ValueError, match=r"^no values are in this recording: no trigger fired$"):
        history(RecordingBuilder(notes=(held,)).data())
