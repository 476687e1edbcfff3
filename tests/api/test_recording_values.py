"""What a `Recording` says about values."""

import math
from typing import Any

import pytest

import modtrace
from builders import RecordingBuilder
from modtrace.analysis.values.selection import Selection
from modtrace.api import recorded_tables
from modtrace.api import recording as recording_file
from modtrace.api.recording import Recording


def recording() -> Recording:
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.step(0, 0, 100)
    build.output(build.call(net, 0, 50, nth=0), [3.0, -4.0], "[0]")
    build.parameter(net, "weight", [math.nan])
    return Recording(build.data())


def test_frame_of_values_has_names_and_derived_columns() -> None:
    frame = recording().frame("values")
    assert frame.columns[:8].tolist() == ["step", "phase", "root", "path", "call", "type", "role", "slot"]
    assert frame[frame.role == "output"].rms.tolist() == [math.sqrt(12.5)]
    assert frame.nonfinite.tolist() == [0, 1]
    assert str(frame.dtypes["call"]) == "Int32"
    assert frame.path.tolist() == ["", ""]


def test_arrays_in_the_frame_are_arrays() -> None:
    build = RecordingBuilder()
    build.parameter(build.module("", "Net"), "weight", [1.0], sketch=[0.5] * 64, hash=b"\x01\xff")
    frame = Recording(build.data()).frame("values")
    assert frame.sketch[0].tolist() == [0.5] * 64
    assert frame.hash.tolist() == ["01ff"]


def test_polars_gets_the_columns_of_the_frame() -> None:
    polars = pytest.importorskip("polars")
    frame = recording().to_polars()
    assert isinstance(frame, polars.DataFrame)
    assert frame.columns == recording().frame("values").columns.tolist()
    assert frame.filter(polars.col("role") == "output")["rms"].to_list() == [math.sqrt(12.5)]
    assert recording().to_polars("steps")["step"].to_list() == [0]


def test_history_says_how_a_statistic_went() -> None:
    found = recording().history("", "output", "max")
    assert (found.sites, found.steps.tolist(), found.values.tolist()) == (("Net[0]",), [0], [[3.0]])
    assert recording().history(role="parameter", stat="nan_count").values.tolist() == [[1.0]]


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
    with pytest.raises(
        modtrace.ModtraceError, match=r"^no values were recorded\. Record with values='stats'"
    ):
        Recording(RecordingBuilder().data()).first_nonfinite()


def test_all_that_is_asked_for_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(data: Any, *given: Any, **named: Any) -> list[Any]:
        asked.append((*given, *named.values()))
        return []

    for name in ("build_history", "build_stack", "find_tensors"):
        monkeypatch.setattr(recorded_tables, name, note)
    monkeypatch.setattr(recording_file, "find_plotted", note)
    monkeypatch.setattr(recording_file, "draw", lambda found, kind, ax: asked.append((kind, ax)))
    recording = Recording(RecordingBuilder().data())
    where: dict[str, Any] = {"slot": "[1]", "phase": "forward", "call": 2}
    recording.history("a", "input", "max", steps="1:3", **where)
    recording.stack("a", 4, "input", **where)
    recording.tensors("a", role="input", steps="1:3", **where)
    recording.plot("a", "input", "max", "heatmap", step=4, steps="1:3", ax="mine", **where)

    some, all_steps = ("input", "[1]", "forward", 2), ("input", "[1]", "forward", 2, "1:3")
    assert asked == [
        ("max", Selection("a", *all_steps)),
        (4, Selection("a", *some)),
        ("a", Selection(None, *all_steps)),
        (Selection("a", *all_steps), "max", "heatmap", 4),
        ("heatmap", "mine"),
    ]


def test_a_picture_that_has_no_such_name_is_refused_before_it_is_drawn() -> None:
    with pytest.raises(ValueError, match=r"^a\.gif: a plot's name ends in"):
        Recording(RecordingBuilder().data()).write_plot("a.gif")
