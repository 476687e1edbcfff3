"""Collectives are recorded as they are called, by C++ code too, and nothing of the run is touched by it."""

import sys
import threading
import time
import weakref
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.distributed_c10d import ProcessGroup, Work

import modtrace
from helpers.collective_calls import KINDS, record
from helpers.ranks import group_of_one
from modtrace.collect.collectives.buckets import BucketLayers
from modtrace.collect.collectives.recorder import CollectiveRecorder, _choose
from modtrace.collect.collectives.rows import CollectiveSite, Row
from modtrace.recording.protocols import LAST
from modtrace.store.collective_ring import read_ring
from modtrace.torch_internals import collectives
from modtrace.torch_internals.collectives import ENTRY_POINTS


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return record(tmp_path_factory.mktemp("collectives"))


def rows_of(recording: Any, rank: int | None = None) -> list[Mapping[str, Any]]:
    """The rows as collectives began, without those of the last numbers; those of torch's log may be written later."""
    rec = recording if rank is None else modtrace.open_recording(recording, rank=rank)
    rows = [row for row in rec.table("collectives").to_pylist() if row["name"] != LAST]
    return sorted(rows, key=itemgetter("start_ns"))


def all_rows_of(path: str, rank: int) -> list[Mapping[str, Any]]:
    return modtrace.open_recording(path, rank=rank).table("collectives").to_pylist()


def test_each_kind_is_a_row_of_its_module(recorded: list[str]) -> None:
    rows = rows_of(recorded[0], 0)
    for step, (name, (_, wanted)) in enumerate(KINDS.items()):
        own = [row for row in rows if row["step"] == step and row["path"]]
        facts = [
            (row["name"], row["reduce_op"], row["peer"], row["bytes_read"], row["bytes_written"])
            for row in own
        ]
        assert facts == wanted, name
        assert {(row["path"], row["phase"], row["ranks"]) for row in own} == {(name, "forward", "0-1")}
    last = rows[-1]
    assert (last["name"], last["path"], last["step"]) == ("barrier", None, len(KINDS) - 1)


def test_ranks_number_collectives_alike_and_messages_by_pair(recorded: list[str]) -> None:
    ranks = [rows_of(recorded[0], rank) for rank in (0, 1)]
    numbered = [
        [(row["name"], row["seq_id"]) for row in rows if row["name"] not in ("send", "recv")]
        for rows in ranks
    ]
    assert numbered[0] == numbered[1]
    numbers = [number for _, number in numbered[0]]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    lasts = [row for rank in (0, 1) for row in all_rows_of(recorded[0], rank) if row["name"] == LAST]
    assert [row["seq_id"] for row in lasts] == [numbers[-1]] * 2
    sent, received = (
        [row["seq_id"] for row in rows if row["name"] == name]
        for rows, name in ((ranks[0], "send"), (ranks[1], "recv"))
    )
    assert sent == received == [1, 2, 3]


def test_what_python_waits_for_has_an_end(recorded: list[str]) -> None:
    for row in rows_of(recorded[0], 0):
        if row["thread"] is not None:
            assert row["start_ns"] < row["end_ns"]
            assert row["wait_ns"] is None or 0 < row["wait_ns"] < row["end_ns"] - row["start_ns"]
        else:
            assert row["path"] == "functional"


def test_collective_that_raises_leaves_the_numbers_right(recorded: list[str]) -> None:
    rows = rows_of(recorded[1], 0)
    assert [row["end_ns"] is None for row in rows] == [True, False]
    assert rows[1]["seq_id"] == rows_of(recorded[1], 1)[1]["seq_id"]


def test_nothing_is_left_in_torch_or_on_disk(tmp_path: Path) -> None:
    before = {name: vars(ProcessGroup).get(name) for name in (*ENTRY_POINTS, "size")}, Work.wait
    model = nn.Linear(2, 2)
    with group_of_one():
        with modtrace.record(model, to=tmp_path / "run.modtrace", strict=True):
            assert ProcessGroup.allreduce is not before[0]["allreduce"]
            dist.all_reduce(model(torch.ones(2, 2)).detach())
            assert (tmp_path / "run.modtrace" / "rank-00000" / "collectives.ring").exists()
        after = {name: vars(ProcessGroup).get(name) for name in (*ENTRY_POINTS, "size")}, Work.wait
        assert after == before
    assert not [*tmp_path.rglob("*.ring")]
    [row] = rows_of(modtrace.open_recording(tmp_path / "run.modtrace"))
    assert (row["name"], row["path"], row["step"]) == ("all_reduce", None, 0)


def test_group_may_begin_and_end_inside_of_the_recording(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with modtrace.record(model, to=tmp_path / "run.modtrace", strict=True):
        for calls in (1, 0):
            with group_of_one():
                x = model(torch.ones(2, 2)).detach()
                for _ in range(calls):
                    dist.all_reduce(x)
                functional.all_reduce(x, "sum", dist.group.WORLD).clone()
            model(torch.ones(2, 2))
    rows = rows_of(modtrace.open_recording(tmp_path / "run.modtrace"))
    assert [
        (row["step"], row["seq_id"], row["thread"]) for row in sorted(rows, key=itemgetter("start_ns"))
    ] == [
        (0, 1, 0),
        (0, 2, None),
        (2, 1, None),
    ]


def test_what_is_written_while_the_recording_ends_has_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, writers = CollectiveRecorder.stop, list[str]()

    def stop_alone(recorder: CollectiveRecorder) -> None:
        writers.extend(thread.name for thread in threading.enumerate() if thread.name == "modtrace-flush")
        stop(recorder)

    monkeypatch.setattr(CollectiveRecorder, "stop", stop_alone)
    model = nn.Linear(2, 2)
    with group_of_one(), modtrace.record(model, to=tmp_path / "run.modtrace", strict=True) as rec:
        for step in range(4):
            functional.all_reduce(model(torch.ones(2, 2)).detach(), "sum", dist.group.WORLD).clone()
            if step < 3:  # the last one is open
                rec.step()
    rows = rows_of(modtrace.open_recording(tmp_path / "run.modtrace"))
    assert [(row["step"], row["seq_id"]) for row in rows] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert not writers  # one that wrote now would file what waits in the step before


def test_steps_that_are_not_recorded_have_no_rows() -> None:
    model = nn.Linear(2, 2)
    with group_of_one(), modtrace.record(model, steps="1:3", strict=True) as rec:
        for _ in range(4):
            dist.all_reduce(model(torch.ones(2, 2)).detach())
            rec.step()
    assert [row["step"] for row in rows_of(rec)] == [1, 2]


def test_held_steps_have_their_collectives(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with (
        group_of_one(),
        modtrace.record(model, to=tmp_path / "run.modtrace", keep_last=2, strict=True) as rec,
    ):
        for step in range(5):
            dist.all_reduce(model(torch.ones(2, 2)).detach())
            rec.step()
            if step == 3:
                rec.dump()
    rows = rows_of(modtrace.open_recording(tmp_path / "run.modtrace"))
    assert [(row["step"], row["seq_id"]) for row in rows] == [(2, 3), (3, 4)]


def test_step_of_a_thousand_calls_is_remembered_by_its_phases() -> None:
    """Else a run of such steps would keep all their calls in memory."""
    model = nn.Linear(2, 2)
    with group_of_one(), modtrace.record(model, strict=True) as rec:
        for _ in range(1000):
            y = model(torch.ones(2, 2))
        y.sum().backward()
        functional.all_reduce(y.detach(), "sum", dist.group.WORLD).clone()
        rec.step()
        assert all(len(span.phases) <= 3 for span in rec._recorder._writer.collectives._spans)


def test_an_internal_error_ends_the_rows_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> int:
        raise RuntimeError("no site")

    model = nn.Linear(2, 2)
    with (
        group_of_one(),
        pytest.warns(modtrace.ModtraceWarning, match="records no more collectives"),
        modtrace.record(model) as rec,
    ):
        dist.all_reduce(model(torch.ones(2, 2)).detach())
        rec.step()
        monkeypatch.setattr("modtrace.collect.collectives.called.CalledCollectives._add_site", fail)
        x = torch.ones(2)
        dist.broadcast(x, 0)  # the first of its kind
        assert x.tolist() == [1.0, 1.0]
        model(x)
    assert len(rows_of(rec)) == 1
    [mark] = rec.meta.marks
    assert mark.startswith("collectives are incomplete from step 1: modtrace failed: RuntimeError: no site")


def test_a_message_that_raises_is_not_counted() -> None:
    model = nn.Linear(2, 2)
    with group_of_one(), modtrace.record(model, strict=True) as rec:
        model(torch.ones(2, 2))
        with pytest.raises(RuntimeError, match="not connected"):
            dist.group.WORLD.send([torch.ones(2)], 0, 0)
        dist.all_reduce(torch.ones(2))
    found = [(row["name"], row["seq_id"]) for row in rec.table("collectives").to_pylist()]
    assert found == [("send", 1), ("all_reduce", 1), ("last", 1)]


def test_tensors_are_not_kept_and_arguments_may_be_given_by_name() -> None:
    model = nn.Linear(2, 2)
    with group_of_one(), modtrace.record(model, strict=True) as rec:
        model(torch.ones(2, 2))
        x, y = torch.ones(2), torch.ones(3)
        kept = weakref.ref(x), weakref.ref(y)
        dist.group.WORLD.allreduce([x]).wait()
        dist.group.WORLD.allreduce(opts=dist.AllreduceOptions(), tensors=[y]).wait()
        del x, y
        end = time.monotonic() + 10  # gloo's own thread lets go of them a moment after `wait`
        while any(tensor() is not None for tensor in kept) and time.monotonic() < end:
            time.sleep(0.01)
        assert [tensor() for tensor in kept] == [None, None]
    assert [(row["bytes_read"], row["reduce_op"]) for row in rows_of(rec)] == [(8, None), (12, "sum")]


def test_group_whose_backend_does_not_count_has_rows_without_numbers() -> None:
    model = nn.Linear(2, 2)
    excepthook = sys.excepthook
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with modtrace.record(model, strict=True) as rec:
            dist.all_reduce(model(torch.ones(2, 2)).detach())
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
    # Where a plugin has a backend, torch before 2.14 gives such a group none of its own that could count.
    number = 1 if torch.__version__ >= "2.14" else None
    assert [(row["name"], row["seq_id"], row["thread"]) for row in rows_of(rec)] == [
        ("all_reduce", number, 0)
    ]


def test_full_disk_takes_the_file_and_not_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("modtrace.store.collective_ring.os.fsync", no_room)
    model = nn.Linear(2, 2)
    with group_of_one(), modtrace.record(model, to=tmp_path / "run.modtrace", strict=True):
        dist.all_reduce(model(torch.ones(2, 2)).detach())
        assert not [*tmp_path.rglob("*.ring")]
    assert len(rows_of(modtrace.open_recording(tmp_path / "run.modtrace"))) == 1


def test_compiled_code_is_neither_broken_nor_compiled_again() -> None:
    def reduced(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        dist.all_reduce(x)
        return x + 1

    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    with group_of_one(), torch.no_grad():
        compiled = torch.compile(reduced, backend=counter, fullgraph=True)
        compiled(torch.ones(2))
        with modtrace.record(nn.Linear(2, 2), strict=True) as rec:
            compiled(torch.ones(2))
        compiled(torch.ones(2))
    assert counter.frame_count == 1
    [row] = rows_of(rec)
    assert (row["name"], row["thread"]) == ("all_reduce", None)


def test_wait_on_a_device_ends_nothing_nor_does_a_barrier_without_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wait()` of NCCL returns when the work is ordered, so that a rank that hangs would seem to have gone on."""
    monkeypatch.setattr("modtrace.collect.collectives.called.backend_of", lambda group: "nccl")
    model = nn.Linear(2, 2)
    with group_of_one(), modtrace.record(model, to=tmp_path / "run.modtrace", strict=True):
        dist.all_reduce(model(torch.ones(2, 2)).detach())
        dist.group.WORLD.barrier()
        kept = read_ring(tmp_path / "run.modtrace" / "rank-00000")
        assert [(row["name"], row["end_ns"]) for row in kept[:2]] == [("all_reduce", None), ("barrier", None)]
    rows = rows_of(modtrace.open_recording(tmp_path / "run.modtrace"))
    assert [(row["end_ns"], row["wait_ns"] is None) for row in rows] == [(None, False), (None, True)]


def entry(record: int, bytes_read: int) -> collectives.StartedCollective:
    return collectives.StartedCollective(
        "log", record, "world", record, "all_reduce", "float32", bytes_read, bytes_read, record, True
    )


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([100, 200, 100, 200], {0: "a", 1: "b", 2: "a", 3: "b"}),
        ([100, 50, 100, 200], {2: "a", 3: "b"}),
        ([100, 200, 100], {0: "a", 1: "b", 2: "a"}),
        ([200, 100, 100, 200], {2: "a", 3: "b"}),
        ([50], {}),
    ],
)
def test_buckets_are_named_in_whole_backwards(sizes: list[int], wanted: dict[int, str]) -> None:
    layers = BucketLayers()
    layers._models = [[(100, "a"), (200, "b")]]
    found = layers.find([entry(record, size) for record, size in enumerate(sizes)])
    assert {record: text for (_, record), text in found.items()} == wanted


def test_oldest_that_is_not_done_is_kept_however_many_follow() -> None:
    site = CollectiveSite("all_reduce", "world", None)
    rows = [Row(site, number, number, is_done=number < 1000) for number in range(3000)]
    kept = [row.seq_id for row in _choose(rows)]
    assert kept[0] < 1000 and 1000 in kept and len(kept) <= 1024
    assert _choose(rows[:1000])[-1].seq_id == 999


def test_torch_has_the_entry_points_and_the_log() -> None:
    """A new torch that renames them would lose collectives without a word."""
    known = {name for name in ENTRY_POINTS if hasattr(ProcessGroup, name)}
    assert known >= {
        "allreduce",
        "broadcast",
        "allgather",
        "reduce_scatter",
        "alltoall",
        "send",
        "recv",
        "barrier",
    }
    with group_of_one():
        dist.all_reduce(torch.ones(2))
        [entry] = collectives.read_torch_log()[-1:]
        assert (entry.name, entry.bytes_read, entry.dtype) == ("all_reduce", 8, "float32")
        assert collectives.read_progress()
