"""Backwards, waits for data loaders and our own writing are recorded, each with its step."""

import os
import traceback
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, dataloader

import modtrace
from helpers.timed_loops import LOOPS, Clock, Run, Texts, clock, from_a_loader, run_loop

__all__ = ["clock"]

METHODS = [(dataloader._BaseDataLoaderIter, "__next__"), (DataLoader, "__iter__")]


def rows_of(recording, *kinds):
    rows = recording.table("intervals").to_pylist()
    return [row for row in rows if not kinds or row["kind"] in kinds]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_each_interval_belongs_to_the_step_in_which_or_after_which_it_began(loop, clock, fresh_dynamo):
    rec, planted = run_loop(loop, clock)
    steps = rec.table("steps").to_pylist()
    starts = [step["start_ns"] for step in steps]
    for row in rows_of(rec):
        before = [number for number, start_ns in enumerate(starts) if start_ns <= row["start_ns"]]
        assert row["step"] == (before[-1] if before else 0)
        assert row["end_ns"] > row["start_ns"]
    spent_ms = Counter()
    for row in rows_of(rec, "data"):
        spent_ms[row["thread"]] += (row["end_ns"] - row["start_ns"]) // 1_000_000
    trained_on = rows_of(rec, "backward")[0]["thread"]
    assert bool(spent_ms[trained_on]) is ("data" in planted or "evaluation" in loop.__name__)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_step_knows_when_the_next_one_began(loop, clock, fresh_dynamo):
    rec, _ = run_loop(loop, clock)
    steps = rec.table("steps").to_pylist()
    written = {row["start_ns"]: row["end_ns"] for row in rows_of(rec, "writing")}
    found = [written.get(step["next_start_ns"], step["next_start_ns"]) for step in steps]
    is_told = "steps_of_the_user" in loop.__name__
    assert found == ([None] * len(steps) if is_told else [*(step["start_ns"] for step in steps[1:]), None])


def test_rows_name_the_dataset_and_its_workers(clock):
    def loop(run: Run):
        with run.record():
            for batch in run.loader(num_workers=2):
                run.train(batch)

    rec, _ = run_loop(loop, clock)
    assert {row["name"] for row in rows_of(rec, "data")} == {"Texts, 2 workers"}
    assert {row["name"] for row in rows_of(rec, "backward", "writing")} == {None}


def test_every_tenth_step_has_the_wait_behind_it(clock):
    def loop(run: Run):
        with run.record():
            for _epoch in range(4):
                for batch in run.loader():
                    run.train(batch)

    rec, _ = run_loop(loop, clock, steps="::10")
    assert sorted((row["step"], row["kind"]) for row in rows_of(rec, "backward", "data")) == [
        (0, "backward"), (0, "data"), (0, "data"), (0, "data"),
        (10, "backward"), (10, "data"),
        (20, "backward"), (20, "data"),
    ]  # fmt: skip


def test_the_last_steps_have_their_intervals(clock, tmp_path):
    path = tmp_path / "run.modtrace"
    rec, _ = run_loop(from_a_loader, clock, to=path, keep_last=2, triggers=[modtrace.OnSignal("SIGUSR1")])
    assert rows_of(rec) == []

    def loop(run: Run):
        with run.record() as rec:
            for number, batch in enumerate(run.loader()):
                run.train(batch)
                if number == 4:
                    rec.dump()

    rec, _ = run_loop(loop, clock, to=tmp_path / "dumped.modtrace", keep_last=2)
    assert {row["step"] for row in rows_of(rec, "backward")} == {3, 4}
    assert [row["step"] for row in rows_of(rec, "data")].count(3) == 1


def test_measuring_in_a_backward_is_overhead():
    model = nn.Linear(3, 3)
    with modtrace.record(model, values="stats", strict=True) as rec:
        model(torch.ones(2, 3)).sum().backward()
    (row,) = rows_of(rec, "backward")
    assert 0 < row["overhead_ns"] < row["end_ns"] - row["start_ns"]


class Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise KeyError("sample 2")
        return torch.ones(3)


def test_exceptions_pass_and_are_waits_too():
    batches = DataLoader(Broken())
    model = nn.Linear(3, 3)
    with modtrace.record(model, strict=True) as rec:
        iterator = iter(batches)
        with pytest.raises(KeyError, match="sample 2") as raised:
            for batch in iterator:
                model(batch)
        assert [*iter(DataLoader([1, 2]))] == [1, 2]
        with pytest.raises(StopIteration):
            next(iter(DataLoader([])))
    assert len([row for row in rows_of(rec, "data") if row["name"] == "Broken"]) == 4
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "__getitem__"


def test_methods_are_put_back_unless_others_have_replaced_them():
    before = [vars(holder)[name] for holder, name in METHODS]
    with modtrace.record(to=None):
        with modtrace.record(to=None):
            inside = [vars(holder)[name] for holder, name in METHODS]
        assert [vars(holder)[name] for holder, name in METHODS] == inside != before
    assert [vars(holder)[name] for holder, name in METHODS] == before

    def theirs(iterator):
        return wrapped(iterator)

    recording = modtrace.record(to=None)
    recording.__enter__()
    wrapped = dataloader._BaseDataLoaderIter.__next__
    dataloader._BaseDataLoaderIter.__next__ = theirs
    try:
        recording.__exit__(None, None, None)
        assert dataloader._BaseDataLoaderIter.__next__ is theirs
        assert [*DataLoader([1, 2])] == [1, 2]
    finally:
        dataloader._BaseDataLoaderIter.__next__ = before[0]


def test_without_steps_nothing_grows():
    with modtrace.record(strict=True) as rec:
        assert len([*DataLoader(range(100))]) == 100
    assert rows_of(rec) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_records_nothing_and_may_record_by_itself():
    model = nn.Linear(3, 3)
    with modtrace.record(model, strict=True) as rec:
        for batch in DataLoader(Texts(Clock(), Recording()), num_workers=1):
            model(batch)
    assert {row["name"] for row in rows_of(rec, "data")} == {"Texts, 1 workers"}


class Recording(nn.Module):
    """A transform that records itself in a worker, and tells how many waits it saw."""

    def forward(self, x):
        model = nn.Linear(3, 3)
        with modtrace.record(model, strict=True) as rec:
            for batch in DataLoader([x, x]):
                model(batch)
        assert len(rows_of(rec, "data")) == 4
        return x


def test_memory_is_read_when_a_step_ends():
    model, kept, read_here = nn.Linear(3, 3), [], []
    has_figures = os.path.exists("/proc/self/statm")
    with modtrace.record(model, strict=True) as rec:
        for _ in range(4):
            kept.append(torch.ones(4_000_000))
            read_here.append(
                _read_resident() if has_figures else None
            )  # the step before ends with what comes next
            model(torch.ones(2, 3)).sum().backward()
            model.zero_grad()
    bytes_of_steps = rec.table("steps")["resident_bytes"].to_pylist()
    if has_figures:  # other threads of this process may take and free memory between the two readings
        assert bytes_of_steps[:3] == pytest.approx(read_here[1:], abs=6_000_000)
    else:
        assert bytes_of_steps == [None] * 4
    assert rec.table("steps")["device_bytes"].null_count == 4


def _read_resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
