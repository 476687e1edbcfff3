"""Whatever happens to storages, the allocated, peak and saved bytes of calls are those of an independent count."""

import gc
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modtrace
from helpers.fuzzed import FUZZ
from helpers.python_op_mode import PythonOpMode
from helpers.ranks import fsdp2, group_of_one
from helpers.storage_count import StorageCount
from modtrace.collect.ops import recorder

Pool = list[torch.Tensor]

SIZES = [0, 1, 2, 5, 8, 100]


@pytest.fixture(params=["python", "compiled"], autouse=True)
def counted_in(request, monkeypatch):
    """Recordings identify tensors by Python, or by C."""
    if request.param == "python":
        monkeypatch.setattr(recorder, "OpMode", PythonOpMode)


@pytest.fixture(scope="module", autouse=True)
def freeing_op() -> Iterator[None]:
    """An op that frees tensors while it runs, as the wait for a collective may."""
    library = torch.library.Library("storage_test", "DEF")
    library.define("free(Tensor x) -> Tensor")

    def free(x: torch.Tensor) -> torch.Tensor:
        _kept.clear()
        return torch.ones(1)

    library.impl("free", free, "CPU")
    yield
    library._destroy()


_kept: list[Any] = []


def free_in_op(pool: Pool) -> None:
    _kept.extend(pool[2:4])
    del pool[2:4]
    pool.append(torch.ops.storage_test.free(pool[0]))


def raising_op(x: torch.Tensor, out: torch.Tensor) -> None:
    """Raises, with `out` resized to three elements."""
    with pytest.raises(IndexError):
        torch.index_select(x, 0, torch.tensor([9] * 3), out=out)


def on_another_thread(run: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def has_memory(x: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie in its storage, which may have been resized under it."""
    last = x.storage_offset() + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.numel() == 0 or (last + 1) * x.itemsize <= x.untyped_storage().nbytes()


def actions(draw: random.Random, pool: Pool, folder: Path) -> list[Callable[[], object]]:
    """What may happen to storages."""
    size, x, y = draw.choice(SIZES), draw.choice(pool), draw.choice(pool)
    a, b = (draw.choice([each for each in pool if has_memory(each)]) for _ in range(2))
    at = draw.randrange(len(pool))
    file = str(folder / str(draw.random()))
    add = pool.append
    return [
        # Ops that make storages, views, and what shares a storage.
        lambda: add(torch.ones(size)),
        lambda: add(torch.empty(size, dtype=torch.float64)),
        lambda: add(a * 2),
        lambda: add(x[1:]),
        lambda: add(x.detach()),
        lambda: add(torch.from_file(file, shared=True, size=size, dtype=torch.float32)),
        # Ops that write, and may resize what they write to.
        lambda: a.add_(1),
        lambda: torch._foreach_add_([a, b], 1),
        lambda: torch.mul(a, 2, out=b),
        lambda: torch.index_select(a, 0, torch.tensor([7]), out=b),  # raises, with `b` resized
        lambda: torch.max(a, 0, out=(b, torch.empty(0, dtype=torch.int64))),
        lambda: x.resize_(size),
        lambda: x.resize_as_(y),
        lambda: x.set_(y),
        lambda: x.set_(y.untyped_storage(), 0, (size,), (1,)),  # may resize that
        lambda: x.set_(),
        # What no op shows.
        lambda: x.untyped_storage().resize_(4 * size),
        lambda: x.untyped_storage().resize_(0),
        lambda: on_another_thread(lambda: x.untyped_storage().resize_(8 * size)),
        lambda: setattr(x, "data", y),
        lambda: torch.utils.swap_tensors(x, y),
        # Storages that no op has made.
        lambda: add(torch.from_numpy(np.ones(size, np.float32))),
        lambda: on_another_thread(lambda: add(torch.ones(size))),
        lambda: add(torch.empty(0).set_(torch.UntypedStorage(4 * size))),
        # Deaths.
        lambda: pool.pop(at),
        lambda: pool.pop(at),
        lambda: on_another_thread(lambda: pool.pop(at)),
        lambda: free_in_op(pool),
        lambda: (pool.append(pool), gc.collect(), pool.remove(pool)),
    ]


class Part(nn.Module):
    """Runs random actions, and parts inside of it."""

    def __init__(self, depth: int, run: Callable[[], None], count: StorageCount) -> None:
        super().__init__()
        self.inside = nn.ModuleList(Part(depth - 1, run, count) for _ in range(2 if depth else 0))
        self.run, self.count = run, count

    def forward(self) -> None:
        with self.count.call():
            self.run()
            for part in self.inside:
                part()
                self.run()


def random_runs(draw: random.Random, count: StorageCount, folder: Path) -> Callable[[], None]:
    pool: Pool = [torch.ones(3), torch.ones(2), torch.ones(4)]

    def run() -> None:
        for _ in range(draw.randrange(12)):
            with suppress(
                RuntimeError, IndexError, ValueError
            ):  # it cannot be resized, has no such element ...
                draw.choice(actions(draw, pool, folder))()
            while sum(map(has_memory, pool)) < 3:
                pool.append(torch.ones(2))
            count.ask()

    return run


@contextmanager
def recorded_beside(count: StorageCount) -> Iterator[Any]:
    with modtrace.record(ops=True, values=None, strict=True) as rec, count:
        yield rec


def call_costs(rec: Any, phase: str = "forward") -> list[tuple[int, int | None]]:
    """The allocated and peak bytes of calls, in the order in which they began."""
    calls = sorted(rec.table("calls").to_pylist(), key=lambda call: call["call_id"])
    return [(call["allocated_bytes"], call["peak_bytes"]) for call in calls if call["phase"] == phase]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("seed", range(8 * FUZZ))
def test_whatever_happens_to_storages_calls_have_the_costs_of_an_independent_count(seed, tmp_path):
    draw, count = random.Random(seed), StorageCount()
    with recorded_beside(count) as rec:
        model = Part(2, random_runs(draw, count, tmp_path), count)
        for _ in range(2):
            model()
    assert count.ours == [(line.op, line.began, line.after) for line in count.lines]
    assert call_costs(rec) == [(costs.allocated_bytes, costs.peak_bytes) for costs in count.calls]
    assert len(count.calls) == 14


class Fixed(nn.Module):
    """A call of given actions."""

    def __init__(self, count: StorageCount, *run: Callable[[], object]) -> None:
        super().__init__()
        self.count, self.run = count, run

    def forward(self) -> None:
        with self.count.call():
            for run in self.run:
                run()
                self.count.ask()


def costs_of(*run: Callable[[Pool], object]) -> tuple[int, int | None]:
    """The allocated and peak bytes of a call that does these things with a list, which are those that were counted."""
    count, pool = StorageCount(), []
    with recorded_beside(count) as rec:
        pool.append(torch.ones(4))
        Fixed(count, *(lambda step=step: step(pool) for step in run))()
    [costs] = call_costs(rec)
    assert costs == (count.calls[0].allocated_bytes, count.calls[0].peak_bytes)
    return costs


CASES: dict[str, tuple[list[Callable[[Pool], object]], tuple[int, int]]] = {
    "an op during which older memory is freed": (
        [lambda pool: (_kept.append(pool.pop()), torch.ops.storage_test.free(torch.ones(1)))], (8, 4),
    ),
    "a tensor that grows": ([lambda pool: pool[0].resize_(10)], (24, 24)),
    "a tensor that shrinks does not": ([lambda pool: pool[0].resize_(1)], (0, 0)),
    "a storage that grows": (
        [lambda pool: pool[0].untyped_storage().resize_(40), lambda pool: pool[0].add_(1)], (24, 24),
    ),
    "a storage that is freed and allocated again": (
        [
            lambda pool: pool[0].untyped_storage().resize_(0), lambda pool: torch.ones(1),
            lambda pool: pool[0].untyped_storage().resize_(16), lambda pool: pool[0].add_(1),
        ], (20, 16),
    ),
    "an output that is resized": ([lambda pool: torch.add(pool[0], 1, out=pool[0].new_empty(0))], (16, 16)),
    "an output that is resized by an op that raises": (
        [
            lambda pool: pool.append(torch.empty(0)),
            lambda pool: raising_op(*pool),
            lambda pool: pool[1].zero_(),
        ], (12, 12),
    ),
    "memory that a set tensor grows": (
        [lambda pool: torch.empty(0).set_(pool[0].untyped_storage(), 0, (10,), (1,))], (24, 24),
    ),
    "memory that no op has made": ([lambda pool: torch.from_numpy(np.ones(5)).add_(1)], (0, 0)),
}  # fmt: skip


@pytest.mark.parametrize(("run", "costs"), CASES.values(), ids=CASES)
def test_call_is_charged_for(run, costs):
    assert costs_of(*run) == costs


def test_memory_that_no_op_has_made_counts_once_it_is_resized():
    pool: Pool = [torch.ones(4)]  # before the recording
    count = StorageCount()
    with recorded_beside(count) as rec:
        pool[0].add_(1)
        Fixed(count, lambda: pool[0].untyped_storage().resize_(0), lambda: torch.ones(1))()
        Fixed(count, lambda: pool[0].untyped_storage().resize_(16), lambda: pool[0].add_(1))()
    assert call_costs(rec) == [(4, 4), (16, 16)]


def test_sharded_parameters_count_while_they_are_gathered():
    """FSDP frees them behind each part by `resize_`, so that the peak of all is that of one part, and their results."""
    with group_of_one(), modtrace.record(ops=True, values=None, strict=True) as rec:
        model = fsdp2()
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        del model
    gathered, results = 4 * (4 * 4 + 4), 2 * 4 * (2 * 4)  # of a part: of `addmm` and of `relu`
    net, part, linear = (
        (2 * (gathered + results), gathered + results + 32),
        (gathered + results,) * 2,
        (32, 32),
    )
    assert call_costs(rec) == 2 * [net, part, linear, part, linear]


def test_saved_bytes_are_those_of_the_storages_when_the_backward_begins():
    """A storage may have grown since it was saved."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = x.exp()  # saves what it returns
            b = a.sin()  # saves what it reads
            c = b * a.detach().cos()  # saves the second, for that requires no gradient
            a.untyped_storage().resize_(100)
            b.untyped_storage().resize_(60)
            return c

    with modtrace.record(ops=True, values=None, strict=True) as rec:
        Chain()(torch.ones(4, requires_grad=True)).sum().backward()
    [saved] = [call["saved_bytes"] for call in rec.table("calls").to_pylist() if call["phase"] == "forward"]
    assert saved == 100 + 16
