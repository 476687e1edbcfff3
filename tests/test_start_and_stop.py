"""`rec.start()` and `rec.stop()`: a recording over several cells of a notebook."""

import gc
import sys
import warnings

import pyarrow.compute as pc
import pytest
import torch
from torch import nn

import modtrace
from modtrace.collect.recorder import running
from modtrace.errors import MisuseError, ModtraceWarning


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


@pytest.fixture(autouse=True)
def none_runs_afterwards():
    yield
    assert running._running == []


def run(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def calls_of(rec: modtrace.Recording) -> list[tuple[int, int]]:
    calls = rec.table("calls")
    forward = calls.filter(pc.equal(calls["phase"], "forward"))
    return sorted(zip(forward["step"].to_pylist(), forward["module_id"].to_pylist(), strict=True))


def test_recording_runs_from_start_to_stop_and_holds_what_a_block_would(model):
    run(model)
    rec = modtrace.record(model)
    assert rec.start() is None  # the last line of a cell shows nothing
    run(model, steps=2)
    rec.log(loss=1.5)
    assert rec.stop() is None
    run(model)

    with modtrace.record(model) as blocked:
        run(model, steps=2)
    assert calls_of(rec) == calls_of(blocked) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert rec.table("scalars")["value"].to_pylist() == [1.5]


def test_recording_that_runs_can_be_read(model):
    rec = modtrace.record(model)
    rec.start()
    run(model, steps=2)
    assert rec.table("steps").num_rows == 1  # the second ends when the next one begins
    run(model)
    assert rec.table("steps").num_rows == 2
    rec.stop()
    assert rec.table("steps").num_rows == 3


def test_second_start_is_refused_and_the_recording_goes_on(model):
    rec = modtrace.record(model)
    rec.start()
    with pytest.raises(MisuseError, match=r"^this recording is running already: rec\.stop\(\), or the end"):
        rec.start()
    with pytest.raises(MisuseError, match=r"^this recording is running already"), rec:
        pass
    run(model)
    rec.stop()
    assert rec.table("steps").num_rows == 1


def test_recording_that_has_ended_is_not_started_again(model):
    rec = modtrace.record(model)
    rec.start()
    rec.stop()
    for begin in (rec.start, rec.__enter__):
        with pytest.raises(
            MisuseError, match=r"^a recording is started or entered once; call record\(\) again"
        ):
            begin()


def test_stop_without_start_is_refused_and_a_second_stop_does_nothing(model):
    rec = modtrace.record(model)
    with pytest.raises(MisuseError, match=r"this one has not begun: rec\.start\(\) begins it$"):
        rec.stop()
    rec.start()
    run(model)
    rec.stop()
    rec.stop()
    assert rec.table("steps").num_rows == 1


def test_block_may_be_left_by_stop(model):
    with modtrace.record(model) as rec:
        with pytest.raises(MisuseError, match=r"^this recording is running already"):
            rec.start()
        run(model)
        rec.stop()
        run(model)
    assert rec.table("steps").num_rows == 1


def test_start_that_fails_can_be_done_again(model, tmp_path):
    place = tmp_path / "run"
    place.write_text("mine")
    rec = modtrace.record(model, to=place)
    with pytest.raises(modtrace.ModtraceError, match="run"):
        rec.start()
    place.unlink()
    rec.start()
    run(model)
    rec.stop()
    assert modtrace.open_recording(place).table("steps").num_rows == 1


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_cell_that_fails_does_not_end_the_recording(model, raised):
    def fail(module, args):
        raise raised("in the middle")

    rec = modtrace.record(model, backward_times=True, strict=True)
    rec.start()
    run(model)
    handle = model[1].register_forward_pre_hook(fail)
    try:
        run(model)
    except raised as error:
        kept = error  # as IPython keeps it, with the frames of the cell
    handle.remove()
    run(model)
    rec.stop()

    assert str(kept) == "in the middle"
    assert rec.table("steps")["kind"].to_pylist() == ["train", "eval", "train"]
    [step] = {row["step"] for row in rec.table("calls").to_pylist() if row["raised"]}
    assert step == 1
    assert [row["raised"] for row in rec.table("calls").to_pylist() if row["step"] == 0].count(True) == 0


def test_recording_whose_variable_is_used_again_is_ended_when_the_next_one_begins(model, tmp_path):
    place = tmp_path / "run"
    rec = modtrace.record(model, to=place)
    rec.start()
    run(model)
    rec = modtrace.record(model, to=place, overwrite=True)
    with pytest.warns(
        ModtraceWarning, match="^a recording was still running that nothing refers to"
    ) as given:
        rec.start()
    assert given[0].filename == __file__
    run(model, steps=2)
    rec.stop()
    assert modtrace.open_recording(place).table("steps").num_rows == 2
    assert modtrace.open_recording(place).meta.marks == ()


def test_recording_that_is_forgotten_in_a_cycle_is_whole_when_the_next_one_begins(model, tmp_path):
    rec = modtrace.record(model, to=tmp_path / "run")
    rec.start()
    cycle = [rec]
    cycle.append(cycle)
    del rec, cycle
    gc.collect()
    run(model)
    with pytest.warns(ModtraceWarning, match="^a recording was still running"), modtrace.record(model):
        pass

    forgotten = modtrace.open_recording(tmp_path / "run")
    assert forgotten.table("steps").num_rows == 1
    assert forgotten.meta.marks == ()


def test_start_beside_a_recording_that_runs_is_warned_of_and_both_record(model):
    first, second = modtrace.record(model), modtrace.record(model)
    first.start()
    with pytest.warns(ModtraceWarning, match="^another recording is still running: both record") as given:
        second.start()
    assert given[0].filename == __file__
    run(model)
    first.stop()
    run(model)
    second.stop()
    assert (first.table("steps").num_rows, second.table("steps").num_rows) == (1, 2)


def test_block_inside_a_started_recording_is_no_reason_to_warn(model):
    rec = modtrace.record(model)
    rec.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with modtrace.record(model):
            run(model)
    rec.stop()


@pytest.mark.parametrize(
    ("argv", "session", "command"),
    [
        (["/x/ipykernel_launcher.py", "-f", "/run/kernel-1.json"], None, ()),
        (["/x/ipykernel_launcher.py", "-f", "/run/kernel-1.json"], "/home/a/b.ipynb", ("/home/a/b.ipynb",)),
        (["train.py", "--lr", "1"], "/home/a/b.ipynb", ("train.py", "--lr", "1")),
        ([], None, ()),
    ],
)
def test_command_of_a_notebook_is_its_path_and_not_that_of_the_kernel(
    model, monkeypatch, argv, session, command
):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if session is not None:
        monkeypatch.setenv("JPY_SESSION_NAME", session)
    with modtrace.record(model) as rec:
        pass
    assert rec.meta.argv == command
