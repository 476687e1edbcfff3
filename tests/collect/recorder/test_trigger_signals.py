"""A signal has the steps that are held written, and everybody's handlers are as before when the block ends."""

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from modtrace.collect.recorder.trigger_signals import SignalWatch
from modtrace.recording.triggers.trigger_kinds import OnSignal

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT)


@pytest.fixture(autouse=True)
def handlers_are_given_back() -> Iterator[None]:
    before = [signal.getsignal(each) for each in SIGNALS]
    yield
    after = [signal.getsignal(each) for each in SIGNALS]
    for each, handler in zip(SIGNALS, before, strict=True):
        signal.signal(each, handler)
    assert after == before


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def run(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()


def recording(*names: str) -> modtrace.LiveRecording:
    triggers = [modtrace.OnSignal(each) for each in names]
    return modtrace.record(keep_last=2, triggers=triggers, strict=True)


def test_signal_has_steps_written_when_the_next_one_begins() -> None:
    model = nn.Linear(2, 2)
    with recording("SIGUSR1") as rec:
        run(model, 5)
        send(signal.SIGUSR1)
        run(model, 5)
    kinds = [(each.kind, each.reason) for each in rec.triggers]
    assert kinds == [("OnSignal", "SIGUSR1")]
    steps = rec.table("steps")["step"].to_pylist()
    assert steps in ([2, 3], [3, 4])  # by the thread at once, or when a step ended


def test_signal_that_comes_last_is_not_lost_and_that_is_asked_for_twice_is_one() -> None:
    with recording("SIGUSR1", "SIGUSR1") as rec:
        run(nn.Linear(2, 2), 5)
        send(signal.SIGUSR1)
    assert [each.kind for each in rec.triggers] == ["OnSignal"]
    assert len(rec.table("steps")) == 2


def test_signal_is_acted_on_while_no_step_ends() -> None:
    came = threading.Event()
    names: list[str] = []

    def fire(name: str) -> None:
        names.append(f"{name} on {threading.current_thread().name}")
        came.set()

    watch = SignalWatch([OnSignal("SIGUSR1")], fire)
    watch.start()
    send(signal.SIGUSR1)
    assert came.wait(30)
    watch.stop()
    assert names == ["SIGUSR1 on modtrace-signals"]


def test_former_handler_hears_it_too() -> None:
    heard: list[Any] = []
    former = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append((number, frame is not None)))
    try:
        with recording("SIGUSR2") as rec:
            run(nn.Linear(2, 2), 2)
            send(signal.SIGUSR2)
        assert heard == [(signal.SIGUSR2, True)]
        assert len(rec.triggers) == 1
        send(signal.SIGUSR2)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGUSR2, former)


def test_handler_that_the_user_puts_on_inside_stays() -> None:
    def own(number: int, frame: Any) -> None:
        raise AssertionError("never sent")

    before = signal.getsignal(signal.SIGUSR1)
    with recording("SIGUSR1"):
        signal.signal(signal.SIGUSR1, own)
    assert signal.getsignal(signal.SIGUSR1) is own
    signal.signal(signal.SIGUSR1, before)


def test_signal_that_would_end_the_process_leaves_through_the_block() -> None:
    rec = recording("SIGTERM")
    with pytest.raises(SystemExit) as ended, rec:
        run(nn.Linear(2, 2), 3)
        send(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert [each.kind for each in rec.triggers] == ["OnSignal", "exception"]
    assert rec.table("steps")["step"].to_pylist() == [1, 2]


def test_signal_that_ends_nothing_ends_nothing() -> None:
    with recording("SIGCONT") as rec:
        send(signal.SIGCONT)
    assert [each.reason for each in rec.triggers] == ["SIGCONT"]


def test_ignored_signal_is_heard_and_still_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with recording("SIGHUP") as rec:
            send(signal.SIGHUP)
        assert [each.reason for each in rec.triggers] == ["SIGHUP"]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_for_the_main_thread() -> None:
    raised: list[BaseException] = []

    def enter() -> None:
        try:
            recording("SIGUSR1").__enter__()
        except modtrace.ModtraceError as error:
            raised.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert [str(each) for each in raised] == [
        "OnSignal(): only the main thread may handle signals. Enter record() there, or leave this trigger out."
    ]


def test_no_thread_runs_where_no_signal_is_wanted() -> None:
    with modtrace.record(keep_last=2):
        assert "modtrace-signals" not in [each.name for each in threading.enumerate()]


def test_recording_left_on_another_thread_says_that_its_handler_stays() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    rec = recording("SIGUSR1")
    rec.__enter__()
    said: list[str] = []

    def leave() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rec.__exit__(None, None, None)
        said.extend(str(each.message) for each in caught)

    thread = threading.Thread(target=leave, name="other")
    thread.start()
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    assert said == [
        "OnSignal(): the recording was left on the thread 'other', and only the main thread may take signal "
        "handlers off: ours stays, and passes on what comes. Leave the recording on the thread that entered it."
    ]
