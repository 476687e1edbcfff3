"""No weak reference of ours has a callback where the object is not ours: CPython 3.11 may crash when that dies.

`PyObject_ClearWeakRefs` calls freed callbacks if an object has two and a garbage collection frees one meanwhile.
"""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.capture_soak import TRIGGERS, described
from modtrace import Capture
from modtrace.collect.compile.hooks import compile_safe_hooks
from modtrace.collect.identity_map import IdentityMap

DYING_TOGETHER = Path(__file__).parents[2] / "helpers" / "dying_together.py"

EVERYTHING = [
    Capture(roles="all", micro_batches=True),
    Capture(roles="all", stats=2, hash=True, sketch=True, sample=8, function=described, tensors="lazy"),
]


def crashes(*arguments: int) -> str:
    done = subprocess.run(
        [sys.executable, DYING_TOGETHER, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_objects_that_die_during_a_collection_crash_nothing():
    assert crashes(0, 150, 13) == "12 runs, 0 crashed\n"


@pytest.mark.soak
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_objects_that_die_during_any_of_150_collections_crash_nothing():
    assert crashes(0, 150, 1) == "150 runs, 0 crashed\n"


class Buffered(nn.Module):
    """A bit of everything: a buffer, a view, a checkpoint, a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)).view(-1, 2, 2).flatten(1)
        return checkpoint(self.second, hidden, use_reentrant=False)  # type: ignore[no-any-return]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[Any]:
    """Three steps; what there is of tensors and nodes comes out in the middle of each."""
    for step in range(3):
        x = torch.ones(3, 4, requires_grad=True)
        output = model(x + step)
        loss = F.mse_loss(output, torch.ones_like(output))
        yield [x, output, loss, output.grad_fn, loss.grad_fn]
        loss.backward()
        yield [x, output, loss, *(each.grad for each in model.parameters())]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def with_callbacks(model: nn.Module, optimizers: list[torch.optim.Optimizer], more: list[Any]) -> set[int]:
    """The weak references with callbacks on any of these, on storages, and on nodes of graphs."""
    tensors = [
        each for each in (*model.parameters(), *model.buffers(), *more) if isinstance(each, torch.Tensor)
    ]
    tensors += [each for one in optimizers for state in one.state.values() for each in state.values()]
    known = [*model.modules(), *optimizers, *tensors, *more, *(each.untyped_storage() for each in tensors)]
    known += [
        node
        for each in more
        if isinstance(each, torch.autograd.graph.Node)
        for node, _ in each.next_functions
    ]
    return {id(ref) for each in known for ref in weakref.getweakrefs(each) if ref.__callback__ is not None}


def test_no_weak_reference_of_a_run_has_a_callback(tmp_path):
    model = Buffered()
    optimizers = [
        torch.optim.AdamW(model.first.parameters()),
        torch.optim.SGD(model.second.parameters(), lr=0.1, momentum=0.9),
    ]
    before = with_callbacks(model, optimizers, [])  # Dynamo, once it is imported, has some on every module

    def hook(*given: Any) -> None:
        pass

    tracked = modtrace.track(model, strict=True)
    with (
        modtrace.record(model, tmp_path / "a", ops=modtrace.Ops(saved=True, source=True), values=EVERYTHING),
        modtrace.record(ops=True, values=EVERYTHING, keep_last=2, triggers=TRIGGERS, to=tmp_path / "b"),
        modtrace.ModuleTracker(strict=True) as tracker,
        compile_safe_hooks(model, hook, hook, hook, hook),
    ):
        tracker.register_user_hooks(hook, hook, hook, hook)
        for given in train(model, optimizers):
            assert with_callbacks(model, optimizers, given) == before
            assert all(vars(each.untyped_storage()) for each in model.parameters())
    tracked.unregister()
    assert with_callbacks(model, optimizers, given) == before
    assert [vars(each.untyped_storage()) for each in model.parameters()] == [{}] * 6


# The map that has the place of `weakref.WeakKeyDictionary`.


class Odd:
    """Has no hash, and is equal to nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")


def test_values_belong_to_objects_that_cannot_be_compared():
    known: IdentityMap[Odd, str] = IdentityMap()
    one, other = Odd(), Odd()
    known[one], known[other] = "one", "other"
    known[one] = "one again"
    assert [known.get(one), known.get(other), known.get(Odd())] == ["one again", "other", None]
    assert [(key is one, value) for key, value in known.items()] == [(True, "one again"), (False, "other")]
    assert [known.pop(one), known.pop(one), known.get(one)] == ["one again", None, None]


def test_object_at_the_address_of_a_dead_one_is_another():
    known: IdentityMap[Odd, int] = IdentityMap()
    for number in range(1000):
        one = Odd()
        assert known.get(one) is None
        known[one] = number
        assert known.get(one) == number


def test_values_of_the_dead_do_not_add_up():
    known: IdentityMap[Odd, int] = IdentityMap()
    alive = [Odd() for _ in range(20)]
    for one in alive:
        known[one] = 0
    most = 0
    for number in range(1000):
        batch = [Odd() for _ in range(10)]
        for one in batch:
            known[one] = number
        most = max(most, len(known._items))
    del one, batch
    assert most <= 80
    known.sweep()
    assert len(known._items) == 20
    known.clear()
    assert list(known.items()) == []


def test_value_dies_when_its_key_is_swept():
    known: IdentityMap[Odd, Odd] = IdentityMap()
    key, value = Odd(), Odd()
    known[key] = value
    ref = weakref.ref(value)
    del value, key
    gc.collect()
    assert ref() is not None
    known.sweep()
    assert ref() is None
