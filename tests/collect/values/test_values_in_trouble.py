"""Interrupts, failures, threads and other recordings: no row is lost, doubled, or kept for ever."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.stat_rows import names, rows
from modtrace import Capture
from modtrace.collect.recorder.ready_steps import ReadySteps
from modtrace.collect.recorder.trigger_signals import SignalWatch
from modtrace.collect.scopes import process
from modtrace.collect.values.buffers import BufferTaps
from modtrace.recording.in_memory.tensors import TensorMemory
from modtrace.recording.triggers.trigger_kinds import OnSignal
from modtrace.torch_internals.tensors import hooks_on


def record(model: object = None, **options: object) -> modtrace.LiveRecording:
    return modtrace.record(model, strict=True, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_interrupt_while_an_outermost_call_begins_costs_that_call_alone(monkeypatch):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    opened, original = itertools.count(), ReadySteps.settle

    def settle(self, *args):
        if next(opened) == 20:
            raise KeyboardInterrupt
        original(self, *args)

    with modtrace.record(model) as rec:
        monkeypatch.setattr(ReadySteps, "settle", settle)
        interrupted = 0
        for _ in range(30):
            try:
                train(model, optimizer)
            except KeyboardInterrupt:
                interrupted += 1
        monkeypatch.undo()
    assert interrupted == 1
    assert rec.table("steps").num_rows >= 29
    assert rec.meta.marks == ()


@pytest.mark.parametrize("steps", ["0:1", "1:2", "0:9:2"])
def test_step_that_is_joined_later_is_sampled_whole(steps):
    """A siamese model: the second call looks like a new step until the backward reaches both."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with record(model, steps=steps) as rec:
        for _ in range(3):
            a, b = model(torch.ones(2, 4)), model(torch.zeros(2, 4))
            (a.sum() - b.sum()).backward()
            model.zero_grad()
    kept = set(names(rows(rec), "step"))
    assert kept
    for step in kept:
        assert len(rows(rec, step=step, role="output")) == len(rows(rec, step=step, role="grad_output")) == 6


def test_two_recorders_each_have_a_late_gradient_once():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with record(model) as one, record(model) as other:
        kept = model(torch.ones(2, 4))
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4))
        kept.sum().backward()
    assert not kept._backward_hooks
    for rec in (one, other):
        assert names(rows(rec, role="grad_output"), "sum") == [2.0]


def test_scripted_module_is_measured_and_its_steps_are_found():
    scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(scripted, nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        for _ in range(3):
            train(model, optimizer)
    assert len(rows(rec, role="parameter")) == 6
    with record(scripted, values=None) as alone:
        for _ in range(3):
            scripted.zero_grad()
            scripted(torch.ones(2, 4)).sum().backward()
    assert alone.table("steps").num_rows == 3


def test_optimizer_that_comes_after_another_has_died_has_a_name_of_its_own():
    def make() -> torch.optim.Optimizer:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        return torch.optim.SGD([parameter], lr=0.1)

    with record() as rec:
        first, second = make(), make()
        first.step()
        second.step()
        del first
        third = make()
        third.step()
    assert names(rows(rec, role="parameter"), "slot") == [
        "param_groups[0].params[0]",
        "optimizer#1.param_groups[0].params[0]",
        "optimizer#2.param_groups[0].params[0]",
    ]


def test_optimizer_that_raises_takes_no_rows_for_ever():
    class Raises(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("on purpose")

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    optimizer = Raises(model.parameters(), lr=0.1)
    with record(model) as rec:
        for _ in range(200):
            with pytest.raises(RuntimeError, match="on purpose"):
                train(model, optimizer)
        blocks = len(rec._recorder._values.measurer._measurer.host_rows.blocks)
    assert blocks <= 10  # 40,000 rows were taken; 8,192 and those of a few steps may wait at once


def test_parameter_set_by_hand_before_the_optimizer_is_sampled_though_a_step_without_gradients_is_open():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(**options):
        with record(model, **options) as rec:
            for _ in range(3):
                with torch.no_grad():
                    model(torch.ones(2, 4))
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        return rec

    every = run()
    step = names(rows(every, role="parameter"), "step")[0]
    sampled = run(steps=f"{step}:{step + 1}")
    assert len(rows(sampled, role="parameter")) == 2


def test_recorder_whose_values_fail_costs_another_one_no_row(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with modtrace.record(model) as failing, record(model) as sound:
        with monkeypatch.context() as patch:
            patch.setattr(failing._recorder._values.measurer._measurer, "measure", None)
            with pytest.warns(modtrace.ModtraceWarning, match="measures no more values"):
                model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        assert len(failing._recorder._tracker.subscribers.returned) == 2
    assert [mark.split(":")[0] for mark in failing.meta.marks] == ["values are incomplete from step 0"]
    assert len(rows(sound, role="output")) == len(rows(sound, role="grad_output")) == 8


def interrupted(run: Callable[[], None], line: int, other: Callable[[], None]) -> bool:
    """Runs `other` before a line of collect/values/, as another thread might. Returns whether there were so many."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0:
            left = -1
            sys.settrace(None)
            other()
        return trace if left > 0 and "/collect/values/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return left < 0


@pytest.mark.parametrize("is_first", [True, False], ids=["first gradient", "passed on by an addition"])
def test_gradients_that_come_on_two_threads_at_once_have_rows_of_their_own(is_first: bool) -> None:
    """A backward on two devices runs on two threads."""
    model = nn.ModuleList(nn.Tanh() for _ in range(4))
    one, two = torch.full((2,), 1.0), torch.full((2,), 2.0)
    line, was_interrupted = 0, True
    with modtrace.record(model, values=Capture(roles="grad_output"), strict=True) as rec:
        while was_interrupted:
            line += 1
            outputs = [module(torch.zeros(2, requires_grad=True)) for module in model]
            first, second, third, fourth = (hooks_on(output)[0] for output in outputs)
            if not is_first:
                first(one)
            run = partial(first if is_first else second, one)
            was_interrupted = interrupted(run, line, partial(third, two))
            if is_first:
                second(one)
            fourth(two)
            rec.step()
    assert line > 20
    sums = rec.frame("values").groupby("step")["sum"].agg(list)
    assert set(map(tuple, map(sorted, sums[:-1]))) == {(2.0, 2.0, 4.0, 4.0)}


@pytest.mark.parametrize("tensors", [True, "lazy"])
def test_statistics_go_on_where_there_is_no_memory_for_whole_tensors(
    tensors: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, put_names = TensorMemory.put, []

    def put_unless_second(memory: TensorMemory, name: str, *args: Any) -> str | None:
        put_names.append(name)
        if len(put_names) == 2:
            raise MemoryError
        return put(memory, name, *args)

    monkeypatch.setattr(TensorMemory, "put", put_unless_second)
    model = nn.Linear(2, 2)
    whole = Capture(roles="output", tensors=tensors)
    with modtrace.record(model, values=["stats", whole], strict=True) as rec:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            model.zero_grad()
    rows_of_outputs = [
        row for row in rec.table("values").to_pylist() if row["phase"] == "forward" and row["shape"]
    ]  # the loss has no dimensions
    assert [row["count"] for row in rows_of_outputs] == [2, 2, 2]
    assert [row["blob"] is None for row in rows_of_outputs] == [False, True, False]
    assert rows_of_outputs[1]["note"] == "not kept: there was no memory for a copy"
    assert rec.meta.marks == ()


@pytest.fixture
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    after = signal.signal(signal.SIGTERM, before)
    assert after == signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_signals_are_given_back_by_recordings_that_end_in_another_order() -> None:
    heard: list[str] = []
    first = SignalWatch([OnSignal("SIGTERM")], lambda name: heard.append(f"first {name}"))
    second = SignalWatch([OnSignal("SIGTERM")], lambda name: heard.append(f"second {name}"))
    first.start()
    second.start()
    first.stop()
    with pytest.raises(SystemExit) as ended:  # not swallowed
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert ended.value.code == 128 + signal.SIGTERM
    second.act()
    first.act()
    second.stop()
    assert heard == ["second SIGTERM"]


def test_a_failure_of_ours_does_not_wait_for_a_thread_that_waits_for_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.BatchNorm1d(4)
    rec = modtrace.record(model, values=Capture(roles="buffer"))
    flushing: list[threading.Thread] = []

    def fail(self: BufferTaps, *given: Any) -> None:
        assert rec._recorder is not None
        flushing.append(threading.Thread(target=rec._recorder.flush, daemon=True))
        flushing[0].start()
        flushing[0].join(0.2)  # it has the sink now, and waits for what the tracker tells
        raise RuntimeError("ours")

    with pytest.warns(modtrace.ModtraceWarning, match="measures no more values"), rec:
        model(torch.ones(3, 4))
        rec.step()
        monkeypatch.setattr(BufferTaps, "_measure_below", fail)
        model(torch.ones(3, 4))
    flushing[0].join(5)
    assert not flushing[0].is_alive()
    assert [mark for mark in rec.meta.marks if mark.startswith("values are incomplete")]


def test_a_recording_that_cannot_begin_hears_nothing_of_another() -> None:
    model, raised = nn.Linear(2, 2), []

    def begin() -> None:
        try:
            modtrace.record(model, values=Capture(roles="input"), triggers=OnSignal("SIGUSR1")).__enter__()
        except Exception as error:
            raised.append(type(error).__name__)

    with modtrace.record(model, strict=True):
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        tracker = process.current()
        assert tracker is not None
        assert raised
        assert tracker.subscribers.entering == []
        assert len(tracker.subscribers.returned) == 1
