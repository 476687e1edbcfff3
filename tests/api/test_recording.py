"""`modtrace.record` and what it gives."""

from fractions import Fraction

import pytest
import torch
from torch import nn

import modtrace
from builders import RecordingBuilder
from modtrace.errors import MisuseError, RecordingExistsError


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_a_recording_in_memory_and_one_on_disk_hold_the_same_kind_of_rows(model, tmp_path):
    with modtrace.record(model, strict=True) as memory, modtrace.record(model, to=tmp_path / "run") as disk:
        train(model)
    assert memory.table("modules").equals(disk.table("modules"))
    own = [
        "end_ns",
        "start_ns",
        "overhead_ns",
        "next_start_ns",
        "resident_bytes",
    ]  # of the recording, not the run
    assert memory.table("steps").drop_columns(own).equals(disk.table("steps").drop_columns(own))
    columns = ["step", "module_id", "nth", "raised", "start_ns", "end_ns"]
    # The clock decides which calls are written together, and with that the order of rows.
    calls, calls_on_disk = (
        each.table("calls").select(columns).sort_by("start_ns") for each in (memory, disk)
    )
    assert calls.equals(calls_on_disk)


def test_a_recording_is_readable_while_it_is_made(model, tmp_path):
    with modtrace.record(model, to=tmp_path / "run", strict=True) as rec:
        train(model, steps=3)
        assert rec.table("steps").num_rows == 2  # the third ends when the fourth begins
        assert "step 1 (train)" in str(rec)
        train(model, steps=1)
        assert rec.table("steps").num_rows == 3
    assert rec.table("steps").num_rows == 4
    assert rec.progress.steps == 4


def test_frame_of_steps_is_in_their_order():
    build = RecordingBuilder(complete=True)
    for step in (1, 0, 2):
        build.step(step, 10 * step, 10 * step + 5)
    frame = modtrace.Recording(build.data()).frame("steps")
    assert frame["step"].tolist() == [0, 1, 2]


def test_frame_gives_whole_numbers_where_some_are_missing(model):
    with modtrace.record(model, strict=True) as rec:
        train(model)
    frame = rec.frame("calls")
    assert str(frame.dtypes["parent_call_id"]) == "Int64"
    assert frame[frame.step == 1].module_id.tolist()[:3] == [0, 1, 2]


def test_write_makes_a_folder_that_opens_alike(model, tmp_path):
    with modtrace.record(model, strict=True) as rec:
        train(model)
    rec.write(tmp_path / "copy")
    assert modtrace.open_recording(tmp_path / "copy").table("calls").equals(rec.table("calls"))
    with pytest.raises(RecordingExistsError):
        rec.write(tmp_path / "copy")
    rec.write(tmp_path / "copy", overwrite=True)


def test_memory_is_bounded_and_what_was_dropped_is_marked(model):
    with modtrace.record(model, strict=True, max_bytes=20_000) as rec:
        for _ in range(30):
            train(model, steps=10)
            rec.table("steps")  # writes what has ended
    kept = sorted(set(rec.table("calls").column("step").to_pylist()))
    assert kept[-1] == 299
    assert 0 < len(kept) < 200
    assert any("dropped" in mark for mark in rec.meta.marks)
    assert rec.table("steps").num_rows == 300


def test_recording_inside_a_recording_to_the_same_place_is_refused(model, tmp_path):
    place = tmp_path / "run"
    with modtrace.record(model, to=place, strict=True):
        with pytest.raises(MisuseError) as caught, modtrace.record(model, to=tmp_path / "x" / ".." / "run"):
            pass
        train(model)
    assert "record() is writing there already in this process" in str(caught.value)
    assert modtrace.open_recording(place).table("steps").num_rows == 3


def test_a_folder_that_is_there_is_replaced_only_when_told(model, tmp_path):
    place = tmp_path / "run"
    with modtrace.record(model, to=place):
        train(model, steps=2)
    with pytest.raises(RecordingExistsError) as caught, modtrace.record(model, to=place):
        pass
    assert str(caught.value).startswith(f"{place}: there is a recording here already (created ")
    assert modtrace.open_recording(place).table("steps").num_rows == 2
    with modtrace.record(model, to=place, overwrite=True):
        train(model, steps=1)
    assert modtrace.open_recording(place).table("steps").num_rows == 1


def test_a_recording_is_entered_once(model):
    rec = modtrace.record(model)
    with rec:
        pass
    with pytest.raises(MisuseError, match="entered once"):
        rec.__enter__()


@pytest.mark.parametrize("call", ["step", "log"])
def test_step_and_log_work_inside_the_block_only(model, call):
    rec = modtrace.record(model)
    with pytest.raises(MisuseError, match=r"works inside the `with record"):
        getattr(rec, call)()
    with rec:
        getattr(rec, call)()
    with pytest.raises(MisuseError, match=r"works inside the `with record"):
        getattr(rec, call)()


@pytest.mark.parametrize(
    ("value", "kind"), [("high", "str"), (None, "NoneType"), (torch.ones(2), "Tensor"), ([1, 2], "list")]
)
def test_what_is_no_scalar_is_refused_by_name(model, value, kind):
    with modtrace.record(model) as rec, pytest.raises(TypeError) as caught:
        rec.log(loss=value)
    assert str(caught.value).startswith("log(loss='")
    assert str(caught.value).endswith(f"a scalar is a number or a tensor with one element, not {kind}")


@pytest.mark.parametrize("value", [10**400, -(10**5000), Fraction(10**400)], ids=["400", "5000", "fraction"])
def test_number_that_no_float_holds_is_refused_as_what_is_no_scalar(model, value):
    with modtrace.record(model) as rec, pytest.raises(TypeError) as caught:
        rec.log(loss=value)
    assert str(caught.value) == (
        "log(loss=...): the number is too large for a float of 64 bits, which reaches 1.8e308. Log its logarithm."
    )


class Unspeakable:
    """Raises whatever it is asked for."""

    def __float__(self):
        raise LookupError

    def __str__(self):
        raise LookupError


def test_object_whose_methods_raise_is_refused_as_what_is_no_scalar(model):
    with modtrace.record(model) as rec, pytest.raises(TypeError) as caught:
        rec.log(loss=Unspeakable())
    assert str(caught.value) == (
        "log(loss='...'): a scalar is a number or a tensor with one element, not Unspeakable"
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"steps": "1"}, ValueError, "steps='1' is not START:STOP"),
        ({"steps": "a:b"}, ValueError, "steps='a:b' is not START:STOP"),
        ({"steps": "5:2"}, ValueError, "steps='5:2' holds no step"),
        ({"steps": slice(-3, None)}, ValueError, "holds no step"),
        ({"steps": 7}, TypeError, "steps=7: give 'START:STOP[:EVERY]', a range or a slice"),
        ({"max_bytes": 0}, ValueError, "max_bytes=0: give a positive number of bytes"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options, error, text):
    with pytest.raises(error) as caught:
        modtrace.record(**options)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "text"),
    [("2:", "2:"), (range(2, 9, 3), "2:9:3"), (slice(4), "0:4"), (None, "0:"), ("::5", "0::5")],
)
def test_steps_are_given_in_several_ways(steps, text):
    from modtrace.recording.options.schedule import to_step_range

    assert str(to_step_range(steps)) == text


def test_an_unknown_table_is_refused_with_those_there_are(model):
    with modtrace.record(model) as rec:
        pass
    with pytest.raises(ValueError, match="no table 'call' in a recording; there are: modules, sites, calls"):
        rec.table("call")


def test_the_tree_of_a_run_without_nan_does_not_search_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("it searches")

    def build(numbers: list[float]) -> modtrace.Recording:
        made = RecordingBuilder(complete=True)
        made.step(0, 0, 100)
        made.output(made.call(made.module("", "Net"), 0, 90, nth=0), numbers)
        return modtrace.Recording(made.data())

    monkeypatch.setattr("modtrace.api.recording.run_checks", fail)
    assert build([1.0, 2.0]).module_tree().values_step == 0
    with pytest.raises(AssertionError, match="it searches"):
        build([1.0, float("nan")]).module_tree()


def test_recording_is_short_in_a_debugger() -> None:
    net = nn.Linear(2, 2)
    with modtrace.record(net) as recording:
        assert repr(recording) == "<LiveRecording steps=0>"
        net(torch.ones(1, 2))
    assert repr(recording) == "<LiveRecording steps=1>"
