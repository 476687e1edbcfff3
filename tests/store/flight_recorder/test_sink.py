"""The sink that holds steps: which of them it writes, with which tensors, and how much it holds."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.interrupting import Interrupting
from helpers.typed_rows import calls_of, rows, step_row, write_step
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.meta import Note
from modtrace.recording.triggers.trigger_kinds import Above, NonFinite
from modtrace.store.flight_recorder.sink import FlightRecorder, in_front_of

MANY = 2**30
pytestmark = pytest.mark.usefixtures("joined_steps")


def steps_of(data: MemoryRecording) -> list[int]:
    found: list[int] = data.table("steps")["step"].to_pylist()
    return found


def write_logged(sink: FlightRecorder, step: int, loss: float) -> None:
    """A step in which a loss was logged."""
    sink.write("calls", calls_of(step))
    sink.write("scalars", {"step": [step], "name": ["loss"], "value": [loss]})
    sink.write("steps", step_row(step))
    sink.end_step(step)


# Which steps.


@settings(deadline=None)  # one example took 253 ms on a busy machine
@given(losses=st.lists(st.sampled_from([1.0, 1.0, 20.0]), max_size=40), keep=st.integers(1, 6))
def test_what_is_written_is_what_a_ring_of_that_length_held(losses: list[float], keep: int) -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, keep, [Above("log.loss", 10)], max_bytes=MANY)
    ring: deque[int] = deque(maxlen=keep)
    expected: list[int] = []
    before = 1.0
    for step, loss in enumerate(losses):
        write_logged(sink, step, loss)
        ring.append(step)
        if loss > 10 >= before:
            expected += ring
            ring.clear()
        before = loss
        assert sink.held_steps == len(ring)
        assert steps_of(data) == expected
    sink.close()
    assert rows(data).get("calls", []) == [row for step in expected for row in _rows("calls", calls_of(step))]
    assert data.meta.marks == ()


def _rows(table: str, columns: dict[str, Any]) -> list[dict[str, Any]]:
    recording = MemoryRecording()
    recording.write(table, columns)
    return recording.table(table).to_pylist()


def test_without_a_number_of_steps_each_is_passed_on_and_triggers_leave_notes() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, None, [Above("log.loss", 10)], max_bytes=MANY)
    for step, loss in enumerate([1.0, 20.0, 30.0, 1.0]):
        write_logged(sink, step, loss)
    sink.close()
    assert steps_of(data) == [0, 1, 2, 3]
    assert data.meta.notes == (Note(step=1, kind="Above", reason="log.loss 20 is above 10"),)
    assert sink.last_fired_step == 1


def test_nothing_stands_in_front_where_there_is_nothing_to_hold_or_to_look_for() -> None:
    data = MemoryRecording()
    assert in_front_of(data, None, (), max_bytes=1) is data
    assert isinstance(in_front_of(data, None, (NonFinite(),), max_bytes=1), FlightRecorder)
    assert isinstance(in_front_of(data, 1, (), max_bytes=1), FlightRecorder)


def test_modules_and_sites_are_never_held() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 2, max_bytes=MANY)
    sink.write("modules", {"module_id": [0], "path": [""], "type": ["Net"]})
    sink.write("sites", {"site_id": [0], "role": ["output"], "slot": [""]})
    write_step(sink, 0, 0)
    sink.close()
    assert sorted(rows(data)) == ["modules", "sites"]


def test_end_without_a_trigger_is_told_and_is_no_damage() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 2, max_bytes=MANY)
    for step in range(5):
        write_step(sink, step, 0)
    sink.close()
    assert data.meta.notes == (
        Note(step=4, kind="held", reason="no trigger fired; 5 steps were held and dropped"),
    )
    assert data.meta.complete


def test_end_after_a_trigger_tells_what_came_behind_it() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 2, max_bytes=MANY)
    write_step(sink, 0, 0)
    sink.fire("dump", "by hand", 0)
    write_step(sink, 1, 0)
    sink.close()
    assert [each.reason for each in data.meta.notes] == [
        "by hand",
        "after the last trigger, 1 step was held and dropped",
    ]


def test_firing_with_nothing_held_leaves_a_note_alone() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 2, max_bytes=MANY)
    sink.fire("dump", "", 0)
    sink.close()
    assert data.meta.notes == (Note(step=None, kind="dump", reason=""),)
    assert rows(data) == {}


def test_trigger_that_flaps_for_ever_does_not_fill_the_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modtrace.store.flight_recorder.sink._MOST_NOTES", 100)
    data = MemoryRecording()
    sink = FlightRecorder(data, 1, [Above("log.loss", 10)], max_bytes=MANY)
    for step in range(220):
        write_logged(sink, step, 20.0 if step % 2 else 1.0)
    sink.close()
    assert len(data.meta.notes) == 101
    assert data.meta.notes[-1].reason == "triggers fired more than 100 times"
    assert len(steps_of(data)) == 110


class Hearing(MemoryRecording):
    """Notes what is put into it, and whether steps that end are to be put to rest at once."""

    def __init__(self) -> None:
        super().__init__()
        self.forced: list[bool] = []
        self.put: list[str] = []

    def end_step(self, now_ns: int, *, force: bool = False) -> None:
        self.forced.append(force)
        super().end_step(now_ns, force=force)

    def put_tensor(self, name: str, *tensor: Any, **options: Any) -> str | None:
        self.put.append(name)
        return super().put_tensor(name, *tensor, **options)


def test_what_a_trigger_has_written_is_put_to_rest_at_once() -> None:
    data = Hearing()
    sink = FlightRecorder(data, 2, [Above("log.loss", 10)], max_bytes=MANY)
    for step, loss in enumerate([1.0, 1.0, 20.0]):
        write_logged(sink, step, loss)
    assert data.forced == [False, False, False, False, True]  # steps 0, 1, then 1 and 2 as they are written
    data.forced.clear()
    write_logged(sink, 3, 1.0)
    sink.fire("dump", "", 0)
    assert data.forced == [False, False, True]


# How much.


def test_oldest_steps_go_when_the_rows_take_too_much_and_a_dump_says_so() -> None:
    data = MemoryRecording()
    step_bytes = _held_bytes(1)
    sink = FlightRecorder(data, 20, max_bytes=int(step_bytes * 5.5))
    for step in range(30):
        write_step(sink, step, 0)
        assert sink.held_steps == min(step + 1, 5)
    sink.fire("dump", "", 0)
    assert steps_of(data) == [25, 26, 27, 28, 29]
    assert data.meta.marks == (
        f"only 5 of the last 20 steps before step 30 fitted into max_bytes={int(step_bytes * 5.5)}",
    )
    for step in range(30, 35):
        write_step(sink, step, 0)
    assert sink.held_steps == 5
    sink.fire("dump", "", 0)
    assert steps_of(data) == [*range(25, 35)]
    assert len(data.meta.marks) == 1  # nothing is missing of what came behind the first dump


def test_steps_that_went_for_a_large_one_are_not_missed_when_as_many_have_come_behind_it() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 3, max_bytes=3_000_000)
    for step in range(2):
        write_whole(sink, step, [1.0] * 600_000)
    for step in range(2, 4):
        write_step(sink, step, 0)
    sink.fire("dump", "", 0)
    assert steps_of(data) == [1, 2, 3]
    assert data.meta.marks == ()


def test_what_does_not_fit_again_and_again_does_not_fill_the_meta() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 5, max_bytes=1)
    for step in range(60):
        write_step(sink, step, 0)
        if step % 2:
            sink.fire("dump", "", 0)
    assert len(data.meta.marks) == 21
    assert data.meta.marks[19] == "only 1 of the last 5 steps before step 40 fitted into max_bytes=1"
    assert data.meta.marks[20] == "before step 42 and later, more did not fit into max_bytes=1"


def test_rows_that_outlive_their_step_count() -> None:
    sink = FlightRecorder(MemoryRecording(), 5, max_bytes=20_000)
    sink.write("tensors", {"tensor_id": np.arange(5000), "site_id": np.arange(5000)})
    for step in range(4):
        write_step(sink, step, 0)
        assert sink.held_steps == 1


def _held_bytes(steps: int) -> int:
    sink = FlightRecorder(MemoryRecording(), 1000, max_bytes=MANY)
    for step in range(steps):
        write_step(sink, step, 0)
    assert sink._held is not None
    return sink._held.size_bytes


def test_what_is_held_stays_the_same_over_three_hundred_steps() -> None:
    sink = FlightRecorder(MemoryRecording(), 20, [NonFinite()], max_bytes=MANY)
    sizes = []
    for step in range(300):
        write_graph_step(sink, step, frozen=(1, 2, 3))
        if step >= 100:
            assert sink._held is not None
            held = sink._held
            sizes.append(
                (len(held), held.size_bytes, held._tensor_rows.size_bytes, len(held._tensor_rows._last_use))
            )
    assert len(set(sizes)) == 1
    assert sizes[0][3] == 3  # the leaves; that a step reads what it has made itself says nothing


# Tensors that later steps refer to.


def write_graph_step(
    sink: FlightRecorder | MemoryRecording, step: int, frozen: Sequence[int] = (), reads: Sequence[int] = ()
) -> None:
    """A step that makes tensors `100 * step + 50 ...` and reads them, and others by number.

    Args:
        frozen: leaves that step 0 meets, and every step reads; their sites are their numbers.
        reads: more tensors that are read.
    """
    own = [100 * step + 50, 100 * step + 51]
    met = [*(frozen if step == 0 else ()), *own]
    sink.write("tensors", {"tensor_id": met, "site_id": [each if each in frozen else None for each in met]})
    read = [*own, *frozen, *reads]
    sink.write("uses", {"consumer_op": [step] * len(read), "slot": ["self"] * len(read), "tensor_id": read})
    sink.write("steps", step_row(step))
    sink.end_step(step)


def tensors_of(data: MemoryRecording) -> list[int]:
    found: list[int] = data.table("tensors")["tensor_id"].to_pylist()
    return found


def test_leaf_that_is_read_rarely_survives_until_then() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 2, max_bytes=MANY)
    sink.write("tensors", {"tensor_id": [1, 2], "site_id": [1, None]})
    write_graph_step(sink, 0)
    for step in range(1, 30):
        write_graph_step(sink, step)
    write_graph_step(sink, 30, reads=(1, 2))
    sink.fire("dump", "", 0)
    assert tensors_of(data) == [
        1,
        2950,
        2951,
        3050,
        3051,
    ]  # 2 is of no site: nothing said it would be read again


def test_tensor_that_only_a_dropped_step_has_read_is_not_written() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 1, max_bytes=MANY)
    for step in range(3):
        write_graph_step(sink, step, reads=(50,) if step == 1 else ())  # made in step 0
    sink.fire("dump", "", 0)
    assert tensors_of(data) == [250, 251]


def test_of_a_site_the_last_tensor_is_kept() -> None:
    """A parameter is another tensor after each optimizer step: the old ones are read by nobody."""
    data = MemoryRecording()
    sink = FlightRecorder(data, 1, max_bytes=MANY)
    for step in range(50):
        sink.write("tensors", {"tensor_id": [1000 + step], "site_id": [7]})
        write_graph_step(sink, step)
    assert sink._held is not None
    assert [len(each.tensor_id) for each in sink._held._tensor_rows._chunks] == [1]
    write_graph_step(sink, 50, reads=(1049,))
    sink.fire("dump", "", 0)
    assert tensors_of(data) == [1049, 5050, 5051]


@settings(max_examples=80)
@given(
    reads=st.lists(st.lists(st.integers(0, 24), max_size=4), min_size=1, max_size=12),
    dumps=st.sets(st.integers(0, 11)),
    keep=st.integers(1, 4),
)
def test_whatever_is_read_is_written_once_if_it_was_read_all_the_time(
    reads: list[list[int]], dumps: set[int], keep: int
) -> None:
    """Tensor t is met in step t // 2; odd ones are leaves, each of a site of its own."""
    data = MemoryRecording()
    sink = FlightRecorder(data, keep, max_bytes=MANY)
    refers: list[list[int]] = []
    for step, wanted in enumerate(reads):
        met = [2 * step, 2 * step + 1]
        refers.append([each for each in dict.fromkeys(wanted) if each <= met[-1]])
        sink.write("tensors", {"tensor_id": met, "site_id": [None, met[1]]})
        sink.write("uses", _uses(refers[-1]))
        sink.write("steps", step_row(step))
        sink.end_step(step)
        if step in dumps:
            sink.fire("dump", "", 0)
    found = tensors_of(data)
    assert len(found) == len(set(found))
    for step in steps_of(data):
        own = {2 * step, 2 * step + 1}
        assert own <= set(found)
        assert {each for each in refers[step] if each % 2} <= set(found)
        always = [
            each for each in refers[step] if all(each in refers[at] for at in range(each // 2 + 1, step))
        ]
        assert set(always) <= set(found)


def _uses(tensors: Sequence[int]) -> dict[str, Any]:
    return {
        "consumer_op": np.zeros(len(tensors), np.int64),
        "slot": ["self"] * len(tensors),
        "tensor_id": np.array(tensors, np.int64),
    }


# Whole tensors.


def write_whole(
    sink: FlightRecorder, step: int, numbers: Sequence[float], *, with_row: bool = True
) -> str | None:
    """A step with one whole tensor; its row names it."""
    array = np.array(numbers, np.float32)
    blob = sink.put_tensor("head.output", array, "float32", array.shape, step=step)
    array[:] = -1  # it was copied
    if with_row:
        sink.write(
            "values",
            {"step": [step], "site_id": [0], "order": [0], "shape": [[len(numbers)]], "blob": [blob]},
        )
    write_step(sink, step, 0)
    return blob


def test_whole_tensors_are_written_with_their_steps_and_rows_name_their_places() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 2, max_bytes=MANY)
    for step in range(5):
        write_whole(sink, step, [step, step + 0.5])
    sink.fire("dump", "", 0)
    table = data.table("values")
    assert table["step"].to_pylist() == [3, 4]
    found = [data.tensor(blob).to_numpy().tolist() for blob in table["blob"].to_pylist()]
    assert found == [[3.0, 3.5], [4.0, 4.5]]


def test_whole_tensors_that_no_row_names_are_let_go() -> None:
    sink = FlightRecorder(MemoryRecording(), 2, max_bytes=MANY)
    for step in range(50):
        write_whole(sink, step, [1.0], with_row=False)
        assert len(sink._held_tensors._waiting) <= 2


def test_whole_tensor_that_two_rows_name_is_written_once() -> None:
    data = Hearing()
    sink = FlightRecorder(data, 1, max_bytes=MANY)
    blob = sink.put_tensor("head.output", np.ones(2, np.float32), "float32", (2,), step=0)
    shared = {"step": [0, 0], "site_id": [0, 1], "order": [0, 0], "shape": [[2], [2]], "blob": [blob, blob]}
    sink.write("values", shared)
    write_step(sink, 0, 0)
    sink.fire("dump", "", 0)
    assert data.put == ["head.output"]
    first, second = data.table("values")["blob"].to_pylist()
    assert first == second
    assert data.tensor(first).to_numpy().tolist() == [1.0, 1.0]


def test_whole_tensor_that_a_step_but_one_later_names_is_there() -> None:
    """A step may yet be divided in two: what came in it is the later one's then."""
    data = MemoryRecording()
    sink = FlightRecorder(data, 2, max_bytes=MANY)
    blob = sink.put_tensor("head.output", np.array([1.5, 2.0], np.float32), "float32", (2,), step=0)
    for step in range(2):
        write_step(sink, step, 0)
    sink.write("values", {"step": [2], "site_id": [0], "order": [0], "shape": [[2]], "blob": [blob]})
    write_step(sink, 2, 0)
    sink.fire("dump", "", 0)
    [place] = data.table("values")["blob"].to_pylist()
    assert data.tensor(place).to_numpy().tolist() == [1.5, 2.0]


def test_whole_tensors_count_and_those_without_room_are_told_of() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 20, max_bytes=3_000_000)
    assert write_whole(sink, 0, [1.0] * 1_000_000) is None
    for step in range(1, 9):
        assert write_whole(sink, step, [1.0] * 250_000) is not None
        assert sink.held_steps <= 3
    sink.fire("dump", "", 0)
    assert [each for each in data.meta.marks if "fitted" in each] == [
        "only 2 of the last 20 steps before step 9 fitted into max_bytes=3000000"
    ]
    assert [each for each in data.meta.marks if "whole" in each] == [
        "1 whole tensors (4000000 bytes) of steps that had not ended did not fit into max_bytes=3000000"
    ]
    assert write_whole(sink, 9, [1.0] * 900_000) is None
    sink.fire("dump", "", 0)
    assert data.meta.marks[2:] == (
        "1 whole tensors (3600000 bytes) of steps that had not ended did not fit into max_bytes=3000000",
    )


def test_whole_tensors_are_passed_on_where_no_steps_are_held() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, None, [NonFinite()], max_bytes=MANY)
    blob = sink.put_tensor("x", np.ones(2, np.float32), "float32", (2,), step=0)
    assert blob is not None
    assert data.tensor(blob).to_numpy().tolist() == [1.0, 1.0]


# Interrupts and forks.


def test_interrupt_while_steps_are_written_leaves_the_rest_for_the_next_time() -> None:
    data = Interrupting(step=1)
    sink = FlightRecorder(data, 5, max_bytes=MANY)
    for step in range(4):
        write_step(sink, step, 0)
    with pytest.raises(KeyboardInterrupt):
        sink.fire("dump", "", 0)
    sink.fire("exception", "KeyboardInterrupt: ", 0)
    assert sorted({row["step"] for row in rows(data)["calls"]}) == [0, 2, 3]
    assert data.meta.marks == ("step 1 is incomplete: KeyboardInterrupt while it was written",)


def test_step_whose_rows_were_broken_off_is_written_as_far_as_it_came() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 5, max_bytes=MANY)
    write_step(sink, 0, 0)
    sink.write("calls", calls_of(1))
    sink.fire("exception", "KeyboardInterrupt: ", 0)
    assert len(rows(data)["calls"]) == 40
    assert data.meta.marks == ("the step behind step 0 is incomplete: its rows were broken off",)


def test_fork_lets_go_of_what_is_held() -> None:
    data = MemoryRecording()
    sink = FlightRecorder(data, 5, max_bytes=MANY)
    write_step(sink, 0, 0)
    sink.abandon()
    assert sink.held_steps == 0
    assert rows(data) == {}


def test_rows_that_do_not_fit_are_refused_at_once() -> None:
    sink = FlightRecorder(MemoryRecording(), 5, max_bytes=MANY)
    with pytest.raises(ValueError, match=r"^table 'calls' has no column 'name'$"):
        sink.write("calls", {"name": ["x"]})
