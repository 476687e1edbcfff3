"""When ended steps are written, by whom, and what happens where the system has no more threads."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.collect.recorder.flush_timer import FlushTimer
from modtrace.collect.recorder.ready_steps import ReadySteps
from modtrace.collect.recorder.recorder import Recorder
from modtrace.collect.recorder.row_writer import RowWriter
from modtrace.errors import ModtraceWarning


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def train(steps: int) -> None:
    model = nn.Linear(2, 2)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()


def test_recording_without_a_timer_has_every_step(tmp_path, no_more_threads):
    rec = modtrace.record(to=tmp_path / "run.modtrace", ops=True)
    with pytest.warns(ModtraceWarning) as caught:
        rec.__enter__()
    train(3)
    rec.__exit__(None, None, None)
    assert [str(each.message) for each in caught] == [
        "no thread could be started beside the training (can't start new thread): steps are written when later ones "
        "end, and at the close. The run and the recording go on; a higher limit of threads (ulimit -u) gives it one."
    ]
    assert rec.table("steps")["step"].to_pylist() == [0, 1, 2]
    assert rec.meta.marks == ()


def test_signal_is_acted_on_without_a_thread_when_a_step_ends(no_more_threads):
    before = signal.getsignal(signal.SIGUSR1)
    rec = modtrace.record(keep_last=2, triggers=modtrace.OnSignal("SIGUSR1"))
    with pytest.warns(ModtraceWarning) as caught:
        rec.__enter__()
    assert "signals are acted on when a step ends" in str(caught[1].message)
    train(3)
    os.kill(os.getpid(), signal.SIGUSR1)
    train(1)
    rec.__exit__(None, None, None)
    assert [each.reason for each in rec.triggers] == ["SIGUSR1"]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("ops", [False, True])
def test_step_is_written_at_its_end_by_the_training_itself(tmp_path, monkeypatch, no_more_threads, ops):
    """Once 100 ms have passed since the last time: here the clock stands still, or makes a leap."""
    now_s = [1000.0]
    monkeypatch.setattr("modtrace.collect.recorder.flush_timer.time.monotonic", lambda: now_s[0])
    steps = []
    with pytest.warns(ModtraceWarning):
        rec = modtrace.record(to=tmp_path / "run.modtrace", ops=ops).__enter__()
    for leap_s in (0.0, 0.0, 0.099, 0.002, 0.05, 0.1):
        now_s[0] += leap_s
        train(1)
        rec.step()
        steps.append(modtrace.open_recording(tmp_path / "run.modtrace").table("steps").num_rows)
    rec.__exit__(None, None, None)
    assert steps == [1, 1, 1, 3, 3, 5]
    assert rec.table("steps").num_rows == 6


@pytest.mark.parametrize(
    "options", [{}, {"ops": True}, {"values": modtrace.Capture(stats=2, hash=True, tensors=True)}]
)
def test_modes_of_the_users_see_nothing_of_what_is_written_at_a_steps_end(tmp_path, monkeypatch, options):
    monkeypatch.setattr("modtrace.collect.recorder.flush_timer.FLUSH_TO_DISK_S", 0.0)
    with SeesFunctions() as functions_alone, SeesOps() as ops_alone:
        for _ in range(3):
            train(1)
    written = []
    recording = modtrace.record(to=tmp_path / "run.modtrace", strict=True, **options)
    with recording as rec, SeesFunctions() as functions, SeesOps() as ops:
        for _ in range(3):
            train(1)
            rec.step()
            written.append(modtrace.open_recording(tmp_path / "run.modtrace").table("steps").num_rows)
    assert (functions.seen, ops.seen) == (functions_alone.seen, ops_alone.seen)
    if "ops" not in options:  # those the timer's thread writes
        assert written == [1, 2, 3]


class Stopped(BaseException):
    """What the handler of a signal raises."""


@pytest.fixture
def signal_in_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sends this process a signal whenever a step's end writes, and the handler raises."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        raise Stopped

    def write(writer: RowWriter, *args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGALRM)
        time.sleep(0)  # here the main thread calls the handler, if it is free
        original(writer, *args, **options)

    original = RowWriter.write
    monkeypatch.setattr(RowWriter, "write", write)
    monkeypatch.setattr("modtrace.collect.recorder.flush_timer.FLUSH_TO_DISK_S", 0.0)
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("options", [{}, {"keep_last": 2}])
def test_signal_that_raises_while_a_steps_end_writes_loses_no_step(tmp_path, signal_in_write, options):
    rec = modtrace.record(to=tmp_path / "run.modtrace", **options)
    with pytest.raises(Stopped), rec:
        train(5)
    assert rec.table("steps")["step"].to_pylist() == [0, 1]
    assert rec.meta.marks == ("the run ended by Stopped; step 0 was the last to end",)


@pytest.mark.usefixtures("no_more_threads")
def test_signal_that_raises_in_the_only_thread_while_it_writes_leaves_a_mark(tmp_path, signal_in_write):
    rec = modtrace.record(to=tmp_path / "run.modtrace")
    with pytest.warns(ModtraceWarning), pytest.raises(Stopped), rec:
        train(5)
    assert rec.table("steps")["step"].to_pylist() == [1]
    assert rec.meta.marks == (
        "the run ended by Stopped; step 0 was the last to end",
        "rows may be missing from step 0 on: Stopped while they were written",
    )


@pytest.mark.parametrize("error", [TimeoutError("a disk of the network"), KeyError("x")])
def test_what_the_thread_raises_is_raised_where_it_was_asked_for(error: Exception) -> None:
    def fail() -> None:
        raise error

    timer = FlushTimer(lambda: None)
    timer.start()
    try:
        with pytest.raises(type(error)) as raised:
            timer.run(fail)
    finally:
        timer.stop()
    assert raised.value is error


def test_handler_that_dumps_in_the_middle_of_our_own_work_does_not_wait_for_ever(monkeypatch):
    def settle(ready: ReadySteps, *args: Any) -> None:
        original(ready, *args)
        if len(fired) < 3:
            fired.append(ready.ended)
            signal.raise_signal(signal.SIGALRM)

    fired: list[int] = []
    original = ReadySteps.settle
    monkeypatch.setattr(ReadySteps, "settle", settle)
    before = signal.signal(signal.SIGALRM, lambda *_: rec.dump("asked"))
    try:
        with modtrace.record(keep_last=2) as rec:
            train(5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [each.reason for each in rec.triggers] == ["asked"] * 3


def test_steps_that_a_flight_recorder_looks_at_are_not_forced_into_files_at_each(tmp_path, monkeypatch):
    late = []
    monkeypatch.setattr("modtrace.collect.recorder.flush_timer.FLUSH_TO_DISK_S", 60.0)
    monkeypatch.setattr(Recorder, "_flush_late", lambda recorder: late.append(recorder.steps_ended))
    with modtrace.record(to=tmp_path / "run.modtrace", keep_last=2):
        train(20)
    assert late == []
