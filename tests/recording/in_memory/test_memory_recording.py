"""A recording in memory stays within its bound and says what it dropped."""

import pytest

from modtrace.errors import MisuseError
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.meta import RunMeta


def write_steps(recording: MemoryRecording, steps: range, calls: int = 100) -> None:
    for step in steps:
        recording.write("tensors", {"tensor_id": [step] * 10})
        ids = list(range(step * calls, (step + 1) * calls))
        recording.write("calls", {"call_id": ids, "step": [step] * calls, "phase": [0] * calls})
        recording.write("steps", {"step": [step], "kind": ["train"]})
        recording.end_step(0)


def test_oldest_rows_are_dropped_and_marked() -> None:
    recording = MemoryRecording(RunMeta(run_id="x"), max_bytes=300_000)
    recording.write("modules", {"module_id": [0]})
    write_steps(recording, range(500))
    recording.close()
    assert recording.size_bytes <= 300_000
    [mark] = recording.meta.marks
    first_whole = int(mark.split(" before ")[1].split()[0])
    assert mark == (
        f"calls, tensors of steps before {first_whole} were dropped to stay within max_bytes=300000"
    )
    assert 0 < first_whole < 500
    assert recording.meta.complete is False
    kept = recording.table("calls").column("call_id").to_pylist()
    assert kept == list(range(kept[0], 50_000))
    assert kept[0] <= first_whole * 100
    tensors = recording.table("tensors").column("tensor_id").to_pylist()
    assert tensors.count(first_whole) == 10
    assert recording.table("steps").num_rows == 500
    assert recording.table("modules").num_rows == 1


def test_one_table_is_named_when_only_its_rows_were_dropped() -> None:
    recording = MemoryRecording(max_bytes=100_000)
    for step in range(130):
        recording.write("calls", {"call_id": [step] * 100, "step": [step] * 100, "phase": [1] * 100})
        recording.end_step(0)
    oldest = recording.table("calls").column("step")[0].as_py()
    assert recording.meta.marks == (
        f"calls of steps before {oldest} were dropped to stay within max_bytes=100000",
    )


def test_step_larger_than_the_bound_leaves_nothing_and_is_marked() -> None:
    recording = MemoryRecording(max_bytes=1000)
    recording.write("calls", {"call_id": [1] * 100, "step": [3] * 100, "phase": [1] * 100})
    assert recording.table("calls").num_rows == 0
    assert recording.meta.marks == ("calls of steps before 4 were dropped to stay within max_bytes=1000",)


def test_nothing_is_dropped_within_the_bound() -> None:
    recording = MemoryRecording()
    write_steps(recording, range(20))
    recording.close()
    assert recording.meta.marks == ()
    assert recording.meta.complete is True
    assert recording.table("calls").num_rows == 2000


def test_columns_that_were_not_given_take_no_room() -> None:
    recording = MemoryRecording()
    for step in range(200):
        recording.write("calls", {"call_id": [step] * 100, "step": [step] * 100, "phase": [0] * 100})
    calls = recording.table("calls")
    assert calls.num_rows == 20_000
    assert 20_000 * (8 + 4 + 1) <= recording.size_bytes < 1.02 * 20_000 * (8 + 4 + 1)
    assert calls.column("flops").null_count == 20_000


def test_many_tiny_steps_become_few_batches() -> None:
    recording = MemoryRecording()
    for step in range(9_000):
        recording.write("steps", {"step": [step], "kind": ["train"]})
        recording.end_step(step)
    steps = recording.table("steps")
    assert steps.column("step").to_pylist() == list(range(9_000))
    assert steps.column("step").num_chunks == 2
    assert [each.dictionary.to_pylist() for each in steps.column("kind").chunks] == [["train"]] * 2


def test_table_that_was_read_is_not_changed_by_later_rows() -> None:
    recording = MemoryRecording()
    recording.write("scalars", {"step": [0], "name": ["loss"], "value": [1.0]})
    before = recording.table("scalars")
    recording.write("scalars", {"step": [1], "name": ["lr"], "value": [2.0]})
    assert before.num_rows == 1
    assert recording.table("scalars").column("name").to_pylist() == ["loss", "lr"]


def test_abandoned_recording_is_empty_and_takes_no_more() -> None:
    recording = MemoryRecording()
    write_steps(recording, range(3))
    recording.abandon()
    write_steps(recording, range(3))
    recording.close()
    assert (recording.rows, recording.size_bytes) == (0, 0)


def test_rows_after_the_close_are_misuse() -> None:
    recording = MemoryRecording()
    recording.close()
    with pytest.raises(MisuseError, match=r"^rows of 'scalars' come after the recording was closed$"):
        recording.write("scalars", {"step": [1]})
