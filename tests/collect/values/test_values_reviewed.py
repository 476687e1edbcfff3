"""What several recorders, threads and signals do to each other while values are recorded."""

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
from helpers.interrupting import Interrupting
from helpers.typed_rows import calls_of, rows, step_row, write_step
from modtrace import Capture
from modtrace.collect.recorder.trigger_signals import SignalWatch
from modtrace.collect.scopes import process
from modtrace.collect.values.buffers import BufferTaps
from modtrace.collect.values.micro_batches import MicroBatchTaps
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.in_memory.tensors import TensorMemory
from modtrace.recording.triggers.trigger_kinds import OnSignal
from modtrace.store.flight_recorder.sink import FlightRecorder
from modtrace.torch_internals.tensors import hooks_on

MICRO_BATCHES = Capture(roles="parameter_grad", micro_batches=True)


# Gradients.


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


# Hooks on parameters.


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()


def test_two_recorders_leave_parameters_as_if_they_had_never_been_hooked() -> None:
    model = nn.Linear(2, 2)
    with (
        modtrace.record(model, values=MICRO_BATCHES, strict=True),
        modtrace.record(model, values=MICRO_BATCHES, strict=True),
    ):
        train(model, 3)
    assert model.weight._backward_hooks is None
    assert model.bias._backward_hooks is None


def test_two_recorders_leave_a_hook_of_the_users_alone() -> None:
    model, heard = nn.Linear(2, 2), []
    handle = model.weight.register_hook(lambda gradient: heard.append(gradient.sum().item()))
    with (
        modtrace.record(model, values=MICRO_BATCHES, strict=True),
        modtrace.record(model, values=MICRO_BATCHES, strict=True),
    ):
        train(model, 2)
    train(model, 1)
    assert heard == [4.0, 4.0, 4.0]
    handle.remove()


def test_steps_without_a_backward_gather_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MicroBatchTaps] = []
    initialize = MicroBatchTaps.__init__

    def note(taps: MicroBatchTaps, *args: Any, **kwargs: Any) -> None:
        made.append(taps)
        initialize(taps, *args, **kwargs)

    monkeypatch.setattr(MicroBatchTaps, "__init__", note)
    model = nn.Linear(2, 2)
    with modtrace.record(model, values=MICRO_BATCHES, strict=True) as rec:
        for step in range(500):
            model(torch.ones(1, 2))
            rec.step()
            if step % 50 == 49:
                rec._recorder.flush()  # a step that waits to be written is known still
        assert len(list(made[0]._left.items())) <= 100
        assert len(made[0]._left._items) <= 200  # what is dead is swept when the number has doubled


# Whole tensors.


@pytest.mark.parametrize("tensors", [True, "lazy"])
def test_statistics_go_on_where_there_is_no_memory_for_whole_tensors(
    tensors: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, names = TensorMemory.put, []

    def put_unless_second(memory: TensorMemory, name: str, *args: Any) -> str | None:
        names.append(name)
        if len(names) == 2:
            raise MemoryError
        return put(memory, name, *args)

    monkeypatch.setattr(TensorMemory, "put", put_unless_second)
    model = nn.Linear(2, 2)
    whole = Capture(roles="output", tensors=tensors)
    with modtrace.record(model, values=["stats", whole], strict=True) as rec:
        train(model, 3)
    rows_of_outputs = [
        row for row in rec.table("values").to_pylist() if row["phase"] == "forward" and row["shape"]
    ]  # the loss has no dimensions
    assert [row["count"] for row in rows_of_outputs] == [2, 2, 2]
    assert [row["blob"] is None for row in rows_of_outputs] == [False, True, False]
    assert rows_of_outputs[1]["note"] == "not kept: there was no memory for a copy"
    assert rec.meta.marks == ()


# The flight recorder.


def test_interrupt_while_a_step_is_written_leaves_its_other_tables_for_the_next_time() -> None:
    data = Interrupting(step=1)
    sink = FlightRecorder(data, 5, max_bytes=2**30)
    for step in range(3):
        write_step(sink, step, 0)
    with pytest.raises(KeyboardInterrupt):
        sink.fire("dump", "", 0)
    assert sink.held_steps == 2
    sink.fire("exception", "KeyboardInterrupt: ", 0)
    assert [row["step"] for row in rows(data)["scalars"]] == [0, 1, 2]
    assert sorted({row["step"] for row in rows(data)["calls"]}) == [0, 2]
    assert data.meta.marks == ("step 1 is incomplete: KeyboardInterrupt while it was written",)
    assert sink._held is not None
    assert (sink.held_steps, sink._held.size_bytes) == (0, 0)


def test_step_that_was_broken_off_is_written_before_those_behind_it() -> None:
    data = Interrupting(step=1)
    sink = FlightRecorder(data, 5, max_bytes=2**30)
    write_step(sink, 0, 0)
    sink.write("calls", calls_of(1))
    sink.write("steps", step_row(1))
    with pytest.raises(KeyboardInterrupt):
        sink.fire("dump", "", 0)
    write_step(sink, 2, 0)
    sink.fire("dump", "", 0)
    assert [row["step"] for row in rows(data)["steps"]] == [0, 1, 2]


class Dumping(MemoryRecording):
    """A signal handler of the user's dumps while a dump is written."""

    sink: FlightRecorder | None = None

    def write(self, table: str, columns: Any) -> None:
        super().write(table, columns)
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.fire("dump", "from a handler", 0)


def test_dump_in_the_middle_of_a_dump_writes_every_step_once() -> None:
    data = Dumping()
    sink = FlightRecorder(data, 5, max_bytes=2**30)
    for step in range(3):
        write_step(sink, step, 0)
    data.sink = sink
    sink.fire("dump", "", 0)
    assert [row["step"] for row in rows(data)["steps"]] == [0, 1, 2]
    assert len(rows(data)["calls"]) == 60
    assert sink._held is not None
    assert (sink.held_steps, sink._held.size_bytes) == (0, 0)


# Signals.


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


# Failures of ours.


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
