"""Every exception leaves clean state, and what ended by one says so."""

import re

import pytest
import torch
from torch import nn

import modtrace
from helpers.keeping import tracking
from modtrace.collect.scopes import process
from modtrace.collect.scopes import tracker as scopes
from zoo import Failing


def x():
    return torch.ones(2, 4)


def calls(recording):
    """Path, raised, whether it ended and the parent's path of every call, in order."""
    names = {row["module_id"]: row["path"] for row in recording.table("modules").to_pylist()}
    rows = {call["call_id"]: call for call in recording.table("calls").to_pylist()}
    return [
        (
            names[call["module_id"]],
            call["raised"],
            call["end_ns"] is not None,
            None if call["parent_call_id"] is None else names[rows[call["parent_call_id"]]["module_id"]],
        )
        for call in rows.values()
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_that_leaves_a_forward_marks_the_calls_it_left(error):
    model = Failing(error())
    with modtrace.record(model, strict=True) as rec:
        with pytest.raises(error):
            model(x())
        model.error = None
        model(x())
    assert calls(rec) == [
        ("", True, True, None),
        ("first", False, True, ""),
        ("second", True, True, ""),
        ("", False, True, None),
        ("first", False, True, ""),
        ("second", False, True, ""),
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_that_leaves_the_block_closes_the_recording(error, tmp_path):
    model = Failing(error("so it goes"))
    with pytest.raises(error), modtrace.record(model, to=tmp_path / "run", strict=True):
        model(x())
    rec = modtrace.open_recording(tmp_path / "run")
    assert calls(rec) == [
        ("", True, True, None),
        ("first", False, True, ""),
        ("second", True, True, ""),
    ]
    [mark] = rec.meta.marks
    said = f"the run ended by {error.__name__}: so it goes"
    assert re.fullmatch(said + (r", at .*\.py:\d+" if error is ValueError else ""), mark)
    assert process.current() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_that_the_parent_catches_ends_only_the_child(error):
    class Catching(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = Failing(error()), nn.Linear(4, 4)

        def forward(self, x):
            try:
                self.bad(x)
            except error:
                return self.good(x)

    model = Catching()
    with modtrace.record(model, strict=True) as rec:
        model(x())
    assert calls(rec) == [
        ("", False, True, None),
        ("bad", True, True, ""),
        ("bad.first", False, True, "bad"),
        ("bad.second", True, True, "bad"),
        ("good", False, True, ""),
    ]


def test_an_exception_in_a_users_pre_hook_leaves_nothing_open():
    model = nn.Sequential(nn.Linear(4, 4))

    def failing(module, args):
        raise ValueError("hook")

    handle = model[0].register_forward_pre_hook(failing)
    with tracking(model) as tracker:
        with pytest.raises(ValueError, match="hook"):
            model(x())
        handle.remove()
        assert tracker.where().call is None
        model(x())
        assert [segment.calls for segment in tracker.kept] == [2, 2]


def test_a_pre_hook_that_raises_before_ours_ends_no_call_of_ours():
    from torch.nn.modules.module import register_module_forward_pre_hook

    model = nn.Sequential(nn.Linear(4, 4))
    seen = []

    def failing(module, args):
        if module is model[0] and not seen:
            seen.append(module)
            raise ValueError("earlier hook")

    handle = register_module_forward_pre_hook(failing)
    try:
        with modtrace.record(model, strict=True) as rec:
            with pytest.raises(ValueError, match="earlier hook"):
                model(x())
            model(x())
    finally:
        handle.remove()
    assert calls(rec) == [("", True, True, None), ("", False, True, None), ("0", False, True, "")]


def test_a_module_that_returns_none_has_not_raised():
    class Silent(nn.Module):
        def forward(self, x):
            return None

    model = nn.Sequential(Silent())
    with modtrace.record(model, strict=True) as rec:
        model(x())
        try:
            raise ValueError("being handled while modules run")
        except ValueError:
            model(x())
    assert [raised for _, raised, _, _ in calls(rec)] == [False] * 4


def test_an_exception_in_backward_leaves_the_next_step_right():
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("backward")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.refuse = nn.Linear(4, 4), True

        def forward(self, x):
            y = self.layer(x)
            return Refusing.apply(y) if self.refuse else y

    model = Net()
    with modtrace.record(model, strict=True, backward_times=True) as rec:
        with pytest.raises(ValueError, match="backward"):
            model(x()).sum().backward()
        model.refuse = False
        model(x()).sum().backward()
    backward = [call for call in rec.table("calls").to_pylist() if call["phase"] == "backward"]
    assert [call["raised"] for call in backward] == [True, False, False]


def test_an_interrupt_inside_a_recompute_leaves_the_next_step_right():
    model = nn.Sequential(Failing(), nn.Tanh())
    with modtrace.record(model, strict=True, backward_times=True) as rec:
        loss = torch.utils.checkpoint.checkpoint(model, x().requires_grad_(), use_reentrant=False).sum()
        model[0].error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        model[0].error = None
        model(x()).sum().backward()
    rows = rec.table("calls").to_pylist()
    names = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    found = [(names[row["module_id"]], row["phase"], row["raised"]) for row in rows]
    assert [path for path, phase, raised in found if phase == "recompute" and raised] == ["", "0", "0.second"]
    assert [path for path, phase, raised in found if phase == "forward" and not raised] == [
        *("", "0", "0.first", "0.second", "1"),
        *("", "0", "0.first", "0.second", "1"),
    ]
    backward = [path for path, phase, raised in found if phase == "backward" and not raised]
    assert backward[-5:] == ["", "1", "0", "0.second", "0.first"]


def test_a_recording_begun_inside_a_forward_and_ended_outside_ignores_that_call():
    class Opening(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            self.recording = modtrace.record(strict=True)
            self.recording.__enter__()
            return self.second(x)

    model = Opening()
    model(x())
    nn.Linear(4, 4)(x())
    model.recording.__exit__(None, None, None)
    assert [(raised, ended) for _, raised, ended, _ in calls(model.recording)] == [(False, True)] * 2


def test_a_recording_ended_inside_a_forward_says_that_it_saw_no_end():
    class Closing(nn.Module):
        def forward(self, x):
            recording.__exit__(None, None, None)
            return x

    recording = modtrace.record(strict=True)
    recording.__enter__()
    Closing()(x())
    assert calls(recording) == [("", False, False, None)]


def test_an_internal_error_is_noted_once_and_the_run_goes_on(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4))

    def broken(*arguments):
        raise RuntimeError("a fault of ours")

    with modtrace.record(model) as rec:
        model(x()).sum().backward()
        monkeypatch.setattr(scopes, "Segment", broken)
        with pytest.warns(modtrace.ModtraceWarning, match="stopped recording; the run goes on"):
            model(x()).sum().backward()
        model(x()).sum().backward()
    [mark] = rec.meta.marks
    assert mark.startswith(
        "incomplete from step 0: modtrace failed at Sequential: RuntimeError: a fault of ours"
    )
    assert not rec.meta.complete
    with pytest.raises(RuntimeError, match="a fault of ours"), modtrace.record(model, strict=True):
        model(x())


def test_recordings_inside_each_other_see_the_same(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    with modtrace.record(model, strict=True) as outer:
        model(x())
        with modtrace.record(to=tmp_path / "inner", strict=True, backward_times=True) as inner:
            model(x()).sum().backward()
        model(x())
    assert len(calls(outer)) == 6  # without the backward times, which only the inner one has asked for
    assert len(calls(modtrace.open_recording(tmp_path / "inner"))) == 4
    assert len(calls(inner)) == 4
    assert process.current() is None
