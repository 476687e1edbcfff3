"""Modes of the user's that come and go in any order, and recordings inside each other, beside recordings of ops."""

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import modtrace
from collect.ops.test_ops_errors import LINEAR, names, recording, run
from collect.ops.test_ops_tensors import op_rows
from helpers.user_modes import SeesOps
from modtrace.collect.scopes import process

#: Where torch remembers whether a mode is on; Dynamo asks them.
FLAGS = ("_is_in_torch_dispatch_mode", "_is_in_any_mode_without_ignore_compile_internals")


@pytest.fixture
def tidy() -> Iterator[None]:
    """No mode is left on the stack, nor a recording that could not be left, whatever became of the test."""
    flags = {name: getattr(python_dispatch, name) for name in FLAGS}
    yield
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    for name, value in flags.items():
        setattr(python_dispatch, name, value)
    tracker = process.current()
    for listener in [] if tracker is None else list(tracker.subscribers.users):
        process.release(listener)


def test_mode_entered_inside_and_left_after_sees_the_same_and_leaves_torchs_flags_as_they_were(tidy):
    flags = {name: getattr(python_dispatch, name) for name in FLAGS}
    model, mode, rec = nn.Linear(2, 2), SeesOps(), recording()
    rec.__enter__()
    run(model)
    mode.__enter__()
    run(model)
    rec.__exit__(None, None, None)
    run(model)
    assert _get_current_dispatch_mode_stack() == [mode]
    mode.__exit__(None, None, None)
    assert names(rec) == LINEAR * 2
    assert mode.seen == LINEAR * 2
    assert {name: getattr(python_dispatch, name) for name in FLAGS} == flags


def test_recordings_that_are_left_in_the_order_of_their_beginning_see_what_ran_in_them(tidy):
    model, first, second = nn.Linear(2, 2), recording(), recording()
    first.__enter__()
    second.__enter__()
    run(model)
    first.__exit__(None, None, None)
    run(model)
    second.__exit__(None, None, None)
    assert (names(first), names(second)) == (LINEAR, LINEAR * 2)
    assert _get_current_dispatch_mode_stack() == []


def test_mode_entered_before_and_left_inside_leaves_ours_on(tidy):
    model, mode, rec = nn.Linear(2, 2), SeesOps(), recording()
    mode.__enter__()
    rec.__enter__()
    run(model)
    mode.__exit__(None, None, None)
    run(model)
    rec.__exit__(None, None, None)
    assert names(rec) == LINEAR * 2 or "a dispatch mode of yours" in rec.meta.marks[0]


def test_recordings_inside_each_other_see_what_ran_in_them(tmp_path):
    model = nn.Linear(2, 2)
    with recording() as outer:
        run(model)
        with modtrace.record(to=tmp_path / "inner", ops=True, strict=True) as inner:
            run(model)
        run(model)
    assert (names(outer), names(inner)) == (LINEAR * 3, LINEAR)
    assert {row["call_id"] for row in op_rows(inner)} == {
        None,
        inner.table("calls").to_pylist()[0]["call_id"],
    }


def test_recording_in_another_thread_sees_that_thread():
    model = nn.Linear(2, 2)
    found: list[Any] = []

    def work() -> None:
        with recording() as rec:
            model(torch.ones(1, 2)).sum().backward()
        found.append((names(rec), _get_current_dispatch_mode_stack()))

    thread = threading.Thread(target=work)
    thread.start()
    model(torch.ones(1, 2))
    thread.join()
    [(seen, modes)] = found
    assert seen[:3] == LINEAR
    assert seen.count("aten.addmm.default") == 1
    assert modes == []


def test_recording_left_on_another_thread_says_that_its_mode_stays_on_the_first_ones_stack(tidy):
    said: list[str] = []
    entered, left = threading.Event(), threading.Event()
    rec = modtrace.record(ops=True, values=None)

    def work() -> None:
        rec.__enter__()
        entered.set()
        left.wait()

    thread = threading.Thread(target=work, name="first")
    thread.start()
    entered.wait()
    with SeesOps() as mode, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rec.__exit__(None, None, None)
        assert _get_current_dispatch_mode_stack() == [mode]
        said += [str(each.message) for each in caught]
    left.set()
    thread.join()
    assert said == [
        "the recording was entered on the thread 'first' and left on 'MainThread': its dispatch mode stays on the "
        "stack of the first one, where it records nothing and costs 3 us an op. "
        "Leave the recording on the thread that entered it."
    ]


def test_recording_left_behind_a_thread_that_has_ended_says_nothing(tidy):
    rec = modtrace.record(ops=True, values=None)
    thread = threading.Thread(target=rec.__enter__)
    thread.start()
    thread.join()
    rec.__exit__(None, None, None)
    assert _get_current_dispatch_mode_stack() == []


def test_mode_inside_that_changes_what_ops_compute_is_recorded_as_it_computes():
    class Doubles(SeesOps):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return super().__torch_dispatch__(function, types, args, kwargs) * 2

    with recording() as rec:
        run(nn.Identity())
        with Doubles():
            y = torch.ones(1) + 1
    assert y.item() == 6.0
    assert names(rec) == [
        "aten.ones.default",
        *("aten.ones.default", "aten.mul.Tensor", "aten.add.Tensor", "aten.mul.Tensor"),
    ]
