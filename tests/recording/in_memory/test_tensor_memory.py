"""Whole tensors in memory stay within a bound of their own, and what is dropped is told."""

import numpy as np
import pytest

from modtrace.errors import RecordingError
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.options.tensor_options import TensorOptions

SMALL = TensorOptions(max_bytes=4096)


def put(recording: MemoryRecording, size_bytes: int, step: int | None = None) -> str | None:
    return recording.put_tensor("t", np.zeros(size_bytes, np.uint8), "uint8", (size_bytes,), step=step)


def test_tensor_that_is_too_large_is_told_of() -> None:
    recording = MemoryRecording(tensors=SMALL)
    assert put(recording, 4097, step=3) is None
    assert recording.meta.marks == (
        "whole tensors of steps before 4 were dropped to stay within max_bytes=4096",
    )


def test_tensors_without_elements_are_bounded_too() -> None:
    recording = MemoryRecording(tensors=SMALL)
    blobs = [str(put(recording, 0, step=step)) for step in range(20)]
    assert [recording.tensor(each).shape for each in blobs[12:]] == [(0,)] * 8
    for each in blobs[:12]:
        with pytest.raises(RecordingError, match="whole tensors of steps before 12 were dropped"):
            recording.tensor(each)


def test_tensor_of_no_given_step_is_of_the_one_that_runs() -> None:
    recording = MemoryRecording(tensors=SMALL)
    for step in range(3):
        recording.write("steps", {"step": [step], "kind": ["train"]})
        recording.end_step(0)
    put(recording, 5000)
    assert recording.meta.marks[0].startswith("whole tensors of steps before 4 were dropped")


def test_rows_and_tensors_do_not_push_each_other_out() -> None:
    recording = MemoryRecording(max_bytes=3000, tensors=SMALL)
    blob = put(recording, 4000)
    recording.write("calls", {"call_id": [0], "step": [0], "phase": [0]})
    assert recording.table("calls").num_rows == 1
    assert recording.tensor(str(blob)).shape == (4000,)
    assert recording.meta.marks == ()


def test_abandoned_recording_has_no_tensors_and_takes_none() -> None:
    recording = MemoryRecording(tensors=SMALL)
    blob = put(recording, 1000)
    recording.abandon()
    assert recording.size_bytes == 0
    assert put(recording, 1000) is None
    recording.close()
    assert put(recording, 1000) is None
    with pytest.raises(RecordingError, match="the recording in memory has none of this name"):
        recording.tensor(str(blob))


def test_tensor_in_memory_cannot_be_written() -> None:
    recording = MemoryRecording()
    raw = recording.tensor(str(put(recording, 3)))
    assert raw.data.readonly
    with pytest.raises(ValueError, match="read-only"):
        raw.to_numpy()[0] = 1
