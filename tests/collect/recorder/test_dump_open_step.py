"""`rec.dump()` means the last steps up to now: the one that is open counts, and is written when it ends."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.typed_rows import write_step
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.meta import Note
from modtrace.store.flight_recorder.sink import FlightRecorder

MANY = 2**30

#: Where a recording goes: what `to` is, from a folder.
PLACES: dict[str, Callable[[Path], Path | None]] = {
    "to a folder": lambda folder: folder / "run.modtrace",
    "in memory": lambda folder: None,
}


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def train(rec: modtrace.LiveRecording, model: nn.Module, losses: list[float]) -> Iterator[int]:
    """Trains a step for each loss, gives its number when the loss is known, and logs it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step, size in enumerate(losses):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rec.log(loss=size)
        yield step


def steps_of(rec: modtrace.Recording, table: str = "steps") -> list[int]:
    return sorted(set(rec.table(table)["step"].to_pylist()))


def kept(keep_last: int | None = 3, **options: Any) -> modtrace.LiveRecording:
    return modtrace.record(keep_last=keep_last, **{"triggers": [], "strict": True, **options})


SPIKE_AT_6 = [1.0] * 6 + [400.0] + [1.0] * 3


@pytest.mark.parametrize(
    ("place", "options"),
    [(PLACES["to a folder"], {"ops": True}), (PLACES["in memory"], {})],
    ids=["to a folder, with ops", "in memory"],
)
def test_step_that_the_user_has_just_seen_is_written_with_those_before_it(
    tmp_path: Path, place: Callable[[Path], Path | None], options: dict[str, Any]
) -> None:
    with kept(to=place(tmp_path), **options) as rec:
        for step in train(rec, nn.Linear(4, 1), SPIKE_AT_6):
            if step == 4:
                assert steps_of(rec) == []
                assert rec.progress.held == 3
            if SPIKE_AT_6[step] > 100:
                rec.dump("spike")
                assert steps_of(rec) == [4, 5]
            if step == 7:
                assert steps_of(rec) == [4, 5, 6]
    assert [steps_of(rec, table) for table in ("steps", "calls", "values", "scalars")] == [[4, 5, 6]] * 4
    assert rec.table("scalars")["value"].to_pylist() == [1.0, 1.0, 400.0]
    assert rec.triggers == (Note(step=6, kind="dump", reason="spike"),)
    assert rec.meta.notes[-1].reason == "after the last trigger, 3 steps were held and dropped"
    assert rec.meta.marks == ()


@pytest.mark.parametrize(("keep_last", "expected"), [(1, [6]), (20, [0, 1, 2, 3, 4, 5, 6])])
def test_open_step_counts_among_the_last_ones(keep_last: int, expected: list[int]) -> None:
    with kept(keep_last) as rec:
        for step in train(rec, nn.Linear(4, 1), SPIKE_AT_6):
            if step == 6:
                rec.dump()
    assert steps_of(rec) == expected


def test_dump_behind_the_loop_has_the_last_step_written_with_the_block(tmp_path: Path) -> None:
    with kept(to=tmp_path / "run.modtrace") as rec:
        for _ in train(rec, nn.Linear(4, 1), [1.0] * 10):
            pass
        rec.dump()
        assert steps_of(rec) == [7, 8]
    assert steps_of(rec) == steps_of(rec, "scalars") == [7, 8, 9]
    assert rec.meta.complete


def test_dump_behind_a_step_that_the_user_has_ended_leaves_nothing_to_come() -> None:
    with kept() as rec:
        for step in train(rec, nn.Linear(4, 1), [1.0] * 8):
            rec.step()
            if step == 5:
                rec.dump()
                assert steps_of(rec) == [3, 4, 5]
    assert steps_of(rec) == [3, 4, 5]
    assert [each.step for each in rec.triggers] == [5]


def test_dump_twice_in_each_step_writes_each_once() -> None:
    with kept() as rec:
        for _ in train(rec, nn.Linear(4, 1), [1.0] * 5):
            rec.dump("one")
            rec.dump("two")
    assert rec.table("steps")["step"].to_pylist() == [0, 1, 2, 3, 4]
    assert [(each.step, each.reason) for each in rec.triggers] == [
        (step, reason) for step in range(5) for reason in ("one", "two")
    ]


def test_dump_inside_of_a_forward_means_its_step() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Tanh())
    with kept(2) as rec:
        hook = model[0].register_forward_hook(lambda *_: rec.dump() if next(number) == 4 else None)
        number = iter(range(100))
        for _ in train(rec, model, [1.0] * 7):
            pass
        hook.remove()
    assert steps_of(rec) == [3, 4]
    assert [each.step for each in rec.triggers] == [4]
    assert steps_of(rec, "scalars") == [3, 4]


def test_trigger_and_exception_in_a_dumped_step_write_it_once() -> None:
    rec = kept(triggers=[modtrace.Above("log.loss", 100)])
    with pytest.raises(ZeroDivisionError), rec:
        for step in train(rec, nn.Linear(4, 1), SPIKE_AT_6):
            if step == 6:
                rec.dump("odd")
                raise ZeroDivisionError("here")
    assert rec.table("steps")["step"].to_pylist() == [4, 5, 6]
    assert rec.triggers == (
        Note(step=6, kind="dump", reason="odd"),
        Note(step=6, kind="Above", reason="log.loss 400 is above 100"),
        Note(step=6, kind="exception", reason="ZeroDivisionError: here"),
    )


def test_capture_that_waits_looks_at_the_steps_behind_the_dumped_one() -> None:
    waiting = modtrace.Capture(roles="output", on_trigger=2)
    for keep_last in (1, None):
        triggers = modtrace.Above("log.loss", 1000)
        with kept(keep_last, triggers=triggers, values=waiting) as rec:
            for step in train(rec, nn.Linear(4, 1), [1.0] * 9):
                if step == 4:
                    rec.dump()
        assert rec.triggers == (Note(step=4, kind="dump", reason=""),)
        assert steps_of(rec, "values") == [5, 6]
        assert steps_of(rec) == ([4, 5, 6] if keep_last else list(range(9)))


# Steps that are not one behind the other.


def test_where_the_open_step_is_not_kept_the_last_that_is_kept_counts() -> None:
    with kept(2, steps="0::2") as rec:
        for step in train(rec, nn.Linear(4, 1), [1.0] * 9):
            if step == 5:
                rec.dump()
    assert steps_of(rec) == [2, 4]
    assert [each.step for each in rec.triggers] == [4]


def test_steps_whose_graphs_live_are_written_when_it_is_sure_that_they_have_ended() -> None:
    """Their outputs may be reached by a backward yet, which would join them."""
    model = nn.Linear(4, 1)
    with kept(3) as rec:
        outputs = []
        for step in range(8):
            rec.log(at=step)
            outputs.append(model(torch.ones(1, 4)))
            if step == 6:
                rec.dump()
                assert steps_of(rec) == []
        outputs.clear()
    assert steps_of(rec) == [4, 5, 6]
    assert [each.step for each in rec.triggers] == [6]


def test_step_that_turns_out_to_be_part_of_the_one_before_is_written_with_it() -> None:
    """A siamese model: the step of its second call is only joined to the first's by their backward."""
    model = nn.Linear(4, 1)
    with kept(1) as rec:
        for step in range(4):
            one, two = model(torch.ones(1, 4)), model(torch.zeros(1, 4))
            if step == 2:
                rec.dump()
            (one - two).sum().backward()
            model.zero_grad()
            rec.log(at=step)
    assert rec.table("scalars").select(["step", "value"]).to_pylist() == [{"step": 2, "value": 2.0}]


def test_step_that_is_divided_behind_the_dump_is_written_with_its_second_part() -> None:
    """Where `zero_grad()` comes behind the forward, it is only then known that a step has ended before it."""
    model = nn.Linear(4, 1)
    with kept(2) as rec:
        for step in range(5):
            loss = model(torch.ones(1, 4)).sum()
            if step == 3:
                rec.dump()
            model.zero_grad()
            loss.backward()
            rec.log(at=step)
    assert steps_of(rec, "scalars")[-1] == 3
    assert 4 not in steps_of(rec)


def test_step_that_is_divided_before_the_dump_ends_what_is_written() -> None:
    model = nn.Linear(4, 1)
    with kept(2) as rec:
        for step in range(6):
            loss = model(torch.ones(1, 4)).sum()
            model.zero_grad()
            loss.backward()
            rec.log(at=step)
            if step == 3:
                rec.dump()
    assert steps_of(rec) == [2, 3]


def test_threads_that_run_models_leave_the_dumped_steps_whole() -> None:
    model = nn.Linear(4, 1).eval()
    with modtrace.record(keep_last=4, strict=True) as rec:

        def run() -> None:
            with torch.no_grad():
                for _ in range(50):
                    model(torch.ones(1, 4))

        threads = [threading.Thread(target=run) for _ in range(3)]
        for each in threads:
            each.start()
        for _ in range(20):
            rec.dump()
        for each in threads:
            each.join()
        run()
        rec.dump()
    found = rec.table("steps")["step"].to_pylist()
    assert found == sorted(set(found))
    assert found[-1] == rec.progress.steps - 1 == rec.triggers[-1].step
    assert steps_of(rec, "calls") == found
    assert rec.meta.marks == ()


# The sink.


def sink_with(steps: int, keep: int, max_bytes: int = MANY) -> tuple[MemoryRecording, FlightRecorder]:
    data = MemoryRecording()
    sink = FlightRecorder(data, keep, max_bytes=max_bytes)
    for step in range(steps):
        write_step(sink, step, 0)
    return data, sink


def test_steps_that_are_still_to_come_leave_room_for_themselves() -> None:
    data, sink = sink_with(5, keep=4)
    sink.fire("dump", "", 0, coming=[5, 6])
    assert data.table("steps")["step"].to_pylist() == [3, 4]
    write_step(sink, 5, 0)
    assert data.table("steps")["step"].to_pylist() == [3, 4]
    sink.request_step()
    write_step(sink, 6, 0)
    write_step(sink, 7, 0)
    assert data.table("steps")["step"].to_pylist() == [3, 4, 5, 6]
    assert sink.last_fired_step == 6
    assert data.meta.notes == (Note(step=6, kind="dump", reason=""),)


def test_more_steps_to_come_than_are_held_leave_the_last_of_them() -> None:
    data, sink = sink_with(3, keep=2)
    sink.fire("dump", "", 0, coming=[3, 4, 5])
    assert data.table("steps").num_rows == 0
    for step in (3, 4):
        write_step(sink, step, 0)
    sink.request_step()
    write_step(sink, 5, 0)
    assert data.table("steps")["step"].to_pylist() == [4, 5]


def test_tensors_that_a_dropped_step_has_made_are_there_for_the_open_one_alone() -> None:
    """With one step to hold, the one before the open step goes; a momentum that it made is read in the open one."""
    data = MemoryRecording()
    sink = FlightRecorder(data, 1, max_bytes=MANY)
    for step, read in enumerate([[], [0], [1], [2], [3]]):
        if step == 3:
            sink.fire("dump", "", 0, coming=[3])
            sink.request_step()
        sink.write("tensors", {"tensor_id": [step, 100 + step]})
        sink.write(
            "uses", {"consumer_op": [step] * len(read), "slot": ["self"] * len(read), "tensor_id": read}
        )
        write_step(sink, step, 0)
    assert data.table("tensors")["tensor_id"].to_pylist() == [2, 3, 103]
    sink.fire("dump", "", 0)
    assert data.table("tensors")["tensor_id"].to_pylist() == [2, 3, 103, 4, 104]
    assert data.table("steps")["step"].to_pylist() == [3, 4]


def test_mark_counts_the_steps_that_were_to_be_written_at_once() -> None:
    data, sink = sink_with(8, keep=4, max_bytes=1)  # the last step stays, however large it is
    sink.fire("dump", "", 0, coming=[8])
    sink.request_step()
    write_step(sink, 8, 0)
    assert data.table("steps")["step"].to_pylist() == [7, 8]
    assert data.meta.marks == ("only 1 of the last 3 steps before step 8 fitted into max_bytes=1",)
    data, sink = sink_with(8, keep=2, max_bytes=1)
    sink.fire("dump", "", 0, coming=[8])
    assert data.meta.marks == ()  # two were wanted: the one that is there, and the open one


# What is said while steps are held.


def test_print_says_how_many_steps_are_held(tmp_path: Path) -> None:
    said = "2 steps held in memory; rec.dump() writes what is held"
    for place in (None, tmp_path / "run"):
        with kept(2, to=place) as rec:
            for step in train(rec, nn.Linear(4, 1), [1.0] * 4):
                assert (said in str(rec).splitlines()) == (step > 1)
                if step == 1:
                    assert "1 step held in memory; rec.dump() writes what is held" in str(rec).splitlines()
            assert rec.triggers == ()
            rec.dump()
            assert "held" not in str(rec)
        assert "held" not in str(rec)
    assert "held" not in str(modtrace.open_recording(tmp_path / "run"))
