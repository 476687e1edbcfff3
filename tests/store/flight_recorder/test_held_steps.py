"""What holding a step costs: as much as its rows, and no more for each step that is held already."""

import gc
import sys
import tracemalloc
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.typed_rows import Columns, calls_of, rows_of, scalars_of, step_row, writes
from modtrace.recording.arrow.batches import to_columns
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.meta import RunMeta
from modtrace.recording.protocols import Sink
from modtrace.store.flight_recorder.joined_steps import JoinedSteps
from modtrace.store.flight_recorder.sink import FlightRecorder
from modtrace.store.writer import FolderWriter

MANY = 2**40
OWN = 30  # the tensors that a step makes


def write_training_step(sink: Sink, step: int) -> None:
    """A step that reads its own tensors, those of the step before, and an old one that no other step reads."""
    first = 10_000 + OWN * step
    own = np.arange(first, first + OWN)
    read = np.concatenate([own, own - OWN, [first - 40 * OWN]])
    sink.write(
        "tensors", {"tensor_id": own, "site_id": np.ma.masked_array(np.arange(OWN), np.arange(OWN) > 9)}
    )
    sink.write("uses", {"consumer_op": np.arange(len(read)), "slot": ["self"] * len(read), "tensor_id": read})
    sink.write("calls", calls_of(step))
    sink.write("scalars", scalars_of(step))
    sink.write("steps", step_row(step))
    sink.end_step(step)


def count_instructions(sink: Sink, steps: range) -> int:
    """The instructions of Python that the steps take."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for step in steps:
            write_training_step(sink, step)
    finally:
        sys.settrace(before)
    return count


def test_end_of_a_step_takes_the_same_however_many_are_held() -> None:
    counts = []
    for keep in (100, 400):
        sink = FlightRecorder(MemoryRecording(), keep, max_bytes=MANY)
        for step in range(576):
            write_training_step(sink, step)
        assert sink.held_steps == keep
        counts.append(count_instructions(sink, range(576, 640)))
    assert counts[1] < 1.1 * counts[0]


def memory_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes()


def test_held_step_takes_little_more_memory_than_on_disk(tmp_path: Path) -> None:
    disk = FolderWriter(tmp_path / "run", RunMeta())
    for step in range(640):
        write_training_step(disk, step)
    disk.close()
    on_disk = sum(file.stat().st_size for file in disk.folder.glob("*.arrow")) / 640
    sink = FlightRecorder(MemoryRecording(), 10_000, max_bytes=MANY)
    tracemalloc.start()
    try:
        for step in range(64):
            write_training_step(sink, step)
        bytes_before, objects_before = memory_bytes(), len(gc.get_objects())
        for step in range(64, 704):
            write_training_step(sink, step)
        in_memory = (memory_bytes() - bytes_before) / 640
        objects = (len(gc.get_objects()) - objects_before) / 640
    finally:
        tracemalloc.stop()
    assert in_memory < 1.2 * on_disk
    assert objects < 10


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(writes(), min_size=1, max_size=5))
def test_joined_steps_hold_the_rows_of_each(steps: list[list[tuple[str, Columns]]]) -> None:
    joined = JoinedSteps([[(table, to_columns(table, columns)) for table, columns in step] for step in steps])
    for place, step in enumerate(steps):
        batches = joined.batches_of(place)
        assert repr(rows_of(batches)) == repr(rows_of(step))
        assert "steps" not in [table for table, _ in batches[:-1]]
