"""What a `Recording` says about values."""

import math

from builders import RecordingBuilder
from modtrace.face import Recording


def recording() -> Recording:
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.step(0, 0, 100)
    build.output(build.call(net, 0, 50, nth=0), [3.0, -4.0], "[0]")
    build.parameter(net, "weight", [math.nan])
    return Recording(build.data())


def test_frame_of_values_has_names_and_derived_columns() -> None:
    frame = recording().frame("values")
    assert frame.columns[:8].tolist() == ["root", "path", "call", "type", "role", "slot", "step", "phase"]
    assert frame[frame.role == "output"].rms.tolist() == [math.sqrt(12.5)]
    assert frame.nonfinite.tolist() == [0, 1]
    assert str(frame.dtypes["call"]) == "Int32"
    assert frame.path.tolist() == ["", ""]


def test_table_of_values_stays_as_it_was_written() -> None:
    assert "rms" not in recording().table("values").column_names


def test_first_nonfinite_values_are_found() -> None:
    found = recording().first_nonfinite()
    assert found is not None
    assert (found.role, found.slot, found.source, found.step, found.count) == (
        "parameter",
        "weight",
        "weight",
        0,
        1,
    )
    assert Recording(RecordingBuilder().data()).first_nonfinite() is None
