"""Dumps that are interrupted, or begin in the middle of another: every step is written once."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from helpers.interrupting import Interrupting
from helpers.typed_rows import calls_of, rows, step_row, write_step
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.store.flight_recorder import held_steps
from modtrace.store.flight_recorder.joined_steps import JoinedSteps
from modtrace.store.flight_recorder.sink import FlightRecorder

pytestmark = pytest.mark.usefixtures("joined_steps")


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


def test_dump_that_ends_early_while_steps_are_joined_writes_no_row_again(monkeypatch) -> None:
    """A signal handler of the user's dumps, and passes over an error."""
    data = Interrupting(step=1)
    sink = FlightRecorder(data, 5, max_bytes=2**30)

    class Interrupted(JoinedSteps):
        def __init__(self, steps: Sequence[Any]) -> None:
            super().__init__(steps)
            with suppress(KeyboardInterrupt):
                sink.fire("dump", "from a handler", 0)

    monkeypatch.setattr(held_steps, "_JOINED_STEPS", 3)
    monkeypatch.setattr(held_steps, "JoinedSteps", Interrupted)
    for step in range(3):
        write_step(sink, step, 0)
    sink.fire("dump", "", 0)
    assert [row["step"] for row in rows(data)["scalars"]] == [0, 1, 2]
    assert sorted({row["step"] for row in rows(data)["calls"]}) == [0, 2]
    assert [row["step"] for row in rows(data)["steps"]] == [0, 1, 2]


def test_dump_while_the_rows_of_a_joined_step_are_split_writes_no_row_again(monkeypatch) -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 5, max_bytes=2**30)
    monkeypatch.setattr(held_steps, "_JOINED_STEPS", 3)
    for step in range(3):
        write_step(sink, step, 0)
    split = JoinedSteps.batches_of

    def interrupted(self: JoinedSteps, place: int) -> Any:
        batches = split(self, place)
        if place == 1:
            monkeypatch.setattr(JoinedSteps, "batches_of", split)
            sink.fire("dump", "from a handler", 0)
        return batches

    monkeypatch.setattr(JoinedSteps, "batches_of", interrupted)
    sink.fire("dump", "", 0)
    assert [row["step"] for row in rows(data)["steps"]] == [0, 1, 2]
    assert [row["step"] for row in rows(data)["scalars"]] == [0, 1, 2]
