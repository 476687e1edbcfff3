"""A recording of ops keeps no tensor alive, and stays small however long it runs."""

import gc
import tracemalloc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from collect.recorder.test_lifetimes import (
    CHECKPOINTS,
    Deaths,
    assert_same_deaths,
    by_mark,
    deaths_of,
    no_collection,
)
from helpers.ours import assert_bounded, objects_of_ours, settled
from zoo import TiedGPT

__all__ = ["no_collection"]  # the fixture is used by every test here

VALUES = pytest.mark.parametrize("values", [None, "stats"], ids=["", "values"])


@CHECKPOINTS
def test_activations_of_a_training_run_die_in_the_same_order(reentrant):
    def run(deaths: Deaths) -> None:
        model = TiedGPT(layers=2)
        deaths.watch(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            tokens = torch.randint(0, 17, (2, 8))
            optimizer.zero_grad()
            logits = model(tokens, reentrant)
            deaths.mark("forward")
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            del logits
            deaths.mark("loss")
            loss.backward()
            deaths.mark("backward")
            optimizer.step()
            del loss
            deaths.mark("step")

    plain = assert_same_deaths(run, ops=True, values=None)
    assert len(plain) > 50


@VALUES
def test_what_dies_at_which_statement_stays_the_same(values):
    def run(deaths: Deaths) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        deaths.watch(model)
        with deaths.saved():
            x = deaths.follow("x", torch.ones(2, 4))
            hidden = deaths.follow("hidden", x * 2)
            del x
            deaths.mark("input")
            loss = model(hidden).sum()
            del hidden
            deaths.mark("forward")
            loss.backward()
            deaths.mark("backward")
            del loss
            deaths.mark("loss")
        with torch.no_grad():
            model(deaths.follow("x", torch.ones(2, 4)))
        deaths.mark("evaluation")

    plain = deaths_of(run, nullcontext())
    recorded = deaths_of(run, modtrace.record(strict=True, ops=True, values=values))
    assert by_mark(recorded) == by_mark(plain)
    assert len(plain) > 15


@CHECKPOINTS
@VALUES
def test_nothing_of_ours_is_left_when_the_recording_is_gone(tmp_path, reentrant, values):
    model = TiedGPT(layers=1)
    with modtrace.record(model, ops=True, values=values):  # what is learnt of the tables is kept for good
        model(torch.zeros(2, 8, dtype=torch.long), reentrant).sum().backward()
    before = objects_of_ours()
    with modtrace.record(model, to=tmp_path / "run", strict=True, ops=True, values=values) as rec:
        model(torch.zeros(2, 8, dtype=torch.long), reentrant).sum().backward()
    del rec
    assert objects_of_ours() - before == {}


def small_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "values", [pytest.param(None, id="", marks=pytest.mark.soak), pytest.param("stats", id="values")]
)
def test_number_of_our_objects_is_the_same_after_many_steps(tmp_path, values):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(1, 4))

    counts = []
    with modtrace.record(to=tmp_path / "run", strict=True, ops=True, values=values) as rec:
        for step in range(300):
            small_step(model, optimizer)
            if step in (99, 199, 299):
                counts.append(settled(rec, evaluate))
    assert_bounded(counts)


def allocated_by_us() -> int:
    """Bytes that are held by what our own lines have allocated."""
    gc.collect()
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/modtrace/collect/*")])
    return sum(trace.size for trace in ours.traces)


def test_memory_of_ours_grows_by_less_than_a_step_takes(tmp_path):
    """What stays of a step is which op made which node, 17 bytes each, of so many ops as a bound allows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    with modtrace.record(to=tmp_path / "run", strict=True, ops=True, values=None) as rec:
        for step in range(250):
            if step == 50:
                tracemalloc.start()
            small_step(model, optimizer)
            if step in (99, 249):
                rec.data  # noqa: B018 (writes what has ended)
                sizes.append(allocated_by_us())
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 150 * 512  # the numbers of one step's ops alone take ten times that


def test_nothing_is_called_when_a_storage_dies_after_the_recording():
    model = nn.Linear(4, 4)
    storages = [each.untyped_storage() for each in model.parameters()]
    with modtrace.record(model, ops=True, strict=True):
        model(torch.ones(2, 4)).sum().backward()
        assert all(weakref.getweakrefs(each) for each in storages)
    assert not any(weakref.getweakrefs(each) for each in storages)
