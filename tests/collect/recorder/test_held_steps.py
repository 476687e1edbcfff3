"""What is held, where threads put at any time, memory is short, an interrupt comes anywhere, or numbers are extreme."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

from helpers.typed_rows import calls_of, step_row
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.statistics.band import StepBand
from modtrace.store.flight_recorder import held_steps, held_tensors, sink
from modtrace.store.flight_recorder.held_tensors import HeldTensors
from modtrace.store.flight_recorder.sink import FlightRecorder

NUMBERS = np.ones(4, np.float32)


@pytest.fixture
def threads_take_turns() -> Iterator[None]:
    """Python changes between threads as often as it can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_threads_put_while_steps_end(threads_take_turns: None) -> None:
    held = HeldTensors(2**30)
    failures: list[BaseException] = []
    is_over = threading.Event()

    def put() -> None:
        try:
            while not is_over.is_set():
                held.put("x", NUMBERS, "float32", (4,), None)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=put) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for step in range(1000):
            held.end_step(step)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_copy_that_fails_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldTensors(NUMBERS.nbytes)

    def no_memory(*given: Any, **options: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(held_tensors.np, "array", no_memory)
        held.put("x", NUMBERS, "float32", (4,), 0)
    assert held.put("x", NUMBERS, "float32", (4,), 0) is not None
    assert held.left_out == 0


# Interrupts.


@contextmanager
def interrupted_at(line: int) -> Iterator[Callable[[], bool]]:
    """Raises KeyboardInterrupt at the n-th line that runs where steps are held; gives whether it has."""
    files = (sink.__file__, held_steps.__file__)
    ran = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal ran
        if event == "line":
            ran += 1
            if ran == line:
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename in files else None

    usual = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lambda: ran >= line
    finally:
        sys.settrace(usual)


def write_step(sink: FlightRecorder, step: int) -> None:
    """A step as a recorder writes it: the row of `steps` behind the others."""
    sink.write("calls", calls_of(step))
    sink.write("steps", step_row(step))
    sink.end_step(0)


def after_interrupt(line: int, act: Callable[[FlightRecorder], None]) -> MemoryRecording | None:
    """What is written of three steps when the n-th line of something is interrupted; None: it has fewer lines."""
    data = MemoryRecording()
    sink = FlightRecorder(data, 5, max_bytes=2**30)
    for step in range(3):
        write_step(sink, step)
    try:
        with interrupted_at(line) as was_interrupted:
            act(sink)
    except KeyboardInterrupt:
        pass
    sink.end_step(0)  # a recorder does so when it ends
    sink.fire("exception", "KeyboardInterrupt: ", 0)
    return data if was_interrupted() else None


def marked(data: MemoryRecording) -> bool:
    return any("incomplete" in mark for mark in data.meta.marks)


def assert_whole_or_marked(act: Callable[[FlightRecorder], None], expected: set[int]) -> None:
    line = 1
    while (data := after_interrupt(line, act)) is not None:
        ended = data.table("steps")["step"].to_pylist()
        assert len(ended) == len(set(ended)), f"line {line}: a step was written twice"
        with_rows = set(data.table("calls")["step"].to_pylist())
        assert marked(data) or (set(ended) == with_rows >= expected), (
            f"line {line}: a step has lost rows unseen"
        )
        line += 1
    assert line > 20


def test_dump_that_is_interrupted_anywhere_loses_nothing_unseen() -> None:
    assert_whole_or_marked(lambda sink: sink.fire("dump", "", 0), {0, 1, 2})
    assert_whole_or_marked(lambda sink: sink.fire("dump", "", 0, coming=[3, 4, 5]), {1, 2})


def test_step_whose_end_is_interrupted_anywhere_is_whole_or_marked() -> None:
    assert_whole_or_marked(lambda sink: write_step(sink, 3), {0, 1, 2})


def test_step_that_was_open_in_a_dump_and_whose_end_is_interrupted_anywhere_is_whole_or_marked() -> None:
    def end_asked_for(sink: FlightRecorder) -> None:
        sink.request_step()
        write_step(sink, 3)

    assert_whole_or_marked(end_asked_for, {0, 1, 2})


# Numbers.


@pytest.mark.parametrize(
    ("history", "number", "is_outside"),
    [
        ([1e308] * 12, -1e308, True),
        ([1e308] * 12, 1e308, False),
        ([-1.7e308, 1.7e308] * 6, 0.0, False),
        ([5e-324] * 12, 5e-324, False),
        ([0.0] * 12, 0.0, False),
        ([float("nan")] * 12, 1.0, False),  # nothing is known of where it is
    ],
)
def test_numbers_at_the_ends_of_float64_have_a_band(
    history: list[float], number: float, is_outside: bool
) -> None:
    band = StepBand(8.0, 50, 10)
    rows = band.rows_of(["x"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in history:
            band.judge(rows, np.array([each]))
            band.add(rows, np.array([each]))
        assert band.judge(rows, np.array([number])).is_outside.tolist() == [is_outside]
