"""Training loops on a clock that only they move, so that it is known where each of their cycles goes."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

import modtrace

#: In a cycle: milliseconds, by what they are spent for.
Planted = Mapping[str, int]

BATCHES = 6


class Clock:
    """Stands for `time.perf_counter_ns`: each reading takes 100 ns, and `spend` what it is told."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        self.now_ns += 100
        return self.now_ns

    @torch.compiler.disable
    def spend(self, milliseconds: int) -> None:
        self.now_ns += milliseconds * 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("time.perf_counter_ns", found)
    return found


class _Spend(torch.autograd.Function):
    """Spends time in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, milliseconds: int) -> torch.Tensor:
        ctx.spend = clock, milliseconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> Any:
        clock, milliseconds = ctx.spend
        clock.spend(milliseconds)
        return *grad, None, None


class Slow(nn.Module):
    """A layer of 10 ms forward and 8 ms backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer, self.clock = nn.Linear(3, 3), clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.spend(10)
        return _Spend.apply(self.layer(x), self.clock, 8)


class Scale(nn.Module):
    """A transform without parameters: 3 ms."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.spend(3)
        return x * 2


class SGD(torch.optim.SGD):
    """4 ms beside its closure."""

    def __init__(self, clock: Clock, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.clock = clock

    def step(self, closure: Any = None) -> Any:
        self.clock.spend(4)
        return super().step(closure)


class Texts(Dataset):
    """20 ms a sample."""

    def __init__(self, clock: Clock, transform: nn.Module | None = None) -> None:
        self.clock, self.transform = clock, transform

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.spend(20)
        sample = torch.full((3,), float(index))
        return sample if self.transform is None else self.transform(sample)


class Stream(IterableDataset):
    """Batches of another loader."""

    def __init__(self, inner: DataLoader) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.inner)


class Run(NamedTuple):
    """What a loop is given: its clock, a model, its optimizer, and the recording that runs."""

    clock: Clock
    model: Slow
    optimizer: SGD
    record: Callable[..., Any]

    def loader(self, **options: Any) -> DataLoader:
        """A loader of 40 ms a batch."""
        return DataLoader(Texts(self.clock), **{"batch_size": 2, **options})

    def train(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()


_PASS = {"forward": 10, "backward": 8, "optimizer": 4}


def from_a_loader(run: Run) -> Planted:
    with run.record():
        for x in run.loader():
            run.train(x)
            run.clock.spend(1)
    return _PASS | {"data": 40, "between": 1}


def from_an_older_iterator(run: Run) -> Planted:
    batches = iter(run.loader())
    next(batches)
    with run.record():
        for x in batches:
            run.train(x)
    return _PASS | {"data": 40}


def from_an_iterator_of_its_own(run: Run) -> Planted:
    with run.record():
        for _ in range(BATCHES):
            run.clock.spend(40)
            run.train(torch.ones(2, 3))
    return _PASS | {"between": 40}


def from_two_loaders(run: Run) -> Planted:
    with run.record():
        for x, other in zip(run.loader(), run.loader(), strict=True):
            run.train(x + other)
    return _PASS | {"data": 80}


def from_a_loader_of_a_loader(run: Run) -> Planted:
    with run.record():
        for x in DataLoader(Stream(run.loader()), batch_size=None):
            run.train(x)
    return _PASS | {"data": 40}


def with_modules_in_the_loader(run: Run) -> Planted:
    with run.record():
        for x in DataLoader(Texts(run.clock, Scale(run.clock)), batch_size=2):
            run.train(x)
    return _PASS | {"data": 46}


def with_modules_before_the_model(run: Run) -> Planted:
    scale = Scale(run.clock)
    with run.record():
        for x in run.loader():
            run.train(scale(x))
    return _PASS | {"data": 40, "forward": 13}


def with_a_loader_on_another_thread(run: Run) -> Planted:
    with run.record():
        for _ in range(BATCHES):
            found: list[torch.Tensor] = []
            thread = threading.Thread(target=lambda found=found: found.append(next(iter(run.loader()))))
            thread.start()
            thread.join()
            run.train(found[0])
    return _PASS | {"between": 40}


def accumulating(run: Run) -> Planted:
    with run.record():
        for _ in range(5):
            for x in run.loader(batch_size=4):
                run.model(x).sum().backward()
                run.clock.spend(1)
            run.optimizer.step()
            run.optimizer.zero_grad()
    return {"data": 240, "forward": 30, "backward": 24, "optimizer": 4, "rest": 3}


def with_a_closure(run: Run) -> Planted:
    def closure() -> torch.Tensor:
        run.clock.spend(2)
        run.optimizer.zero_grad()
        loss = run.model(x).sum()
        run.clock.spend(3)
        loss.backward()
        return loss

    with run.record():
        for x in run.loader():  # noqa: B007 (the closure reads it)
            run.optimizer.step(closure)
    return _PASS | {"data": 40, "optimizer": 6, "rest": 3}


def with_lbfgs(run: Run) -> Planted:
    optimizer = torch.optim.LBFGS(run.model.parameters(), max_iter=1, max_eval=1)

    def closure() -> torch.Tensor:
        run.clock.spend(2)
        optimizer.zero_grad()
        loss = run.model(x).square().sum()
        loss.backward()
        return loss

    with run.record():
        for x in run.loader():  # noqa: B007 (the closure reads it)
            optimizer.step(closure)
    return {"data": 40, "forward": 10, "backward": 8, "optimizer": 2}


def with_a_grad_scaler(run: Run) -> Planted:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with run.record():
        for x in run.loader():
            run.optimizer.zero_grad()
            scaler.scale(run.model(x).sum()).backward()
            scaler.step(run.optimizer)
            scaler.update()
    return _PASS | {"data": 40}


def with_a_checkpoint(run: Run) -> Planted:
    with run.record():
        for x in run.loader():
            run.optimizer.zero_grad()
            checkpoint(run.model, x, use_reentrant=False).sum().backward()
            run.optimizer.step()
    return _PASS | {"data": 40, "recompute": 10}


def with_a_gradient_penalty(run: Run) -> Planted:
    with run.record():
        for x in run.loader():
            x.requires_grad_()
            run.optimizer.zero_grad()
            loss = run.model(x).sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + grad.square().sum()).backward()
            run.optimizer.step()
    return _PASS | {"data": 40, "backward": 16}


def with_evaluation_between(run: Run) -> Planted:
    """A cycle ends where the evaluation begins."""
    with run.record():
        for x in run.loader():
            run.train(x)
            run.clock.spend(1)
            with torch.no_grad():
                run.model(x)
    return _PASS | {"between": 1}


def with_steps_of_the_user(run: Run) -> Planted:
    with run.record() as rec:
        for x in run.loader():
            run.train(x)
            rec.step()
    return _PASS | {"data": 40}


def compiled(run: Run) -> Planted:
    model = torch.compile(run.model.layer, backend="eager")
    with run.record():
        for x in run.loader():
            run.optimizer.zero_grad()
            run.clock.spend(1)
            model(x).sum().backward()
            run.optimizer.step()
    return {"data": 40, "optimizer": 4, "between": 1}


LOOPS: tuple[Callable[[Run], Planted], ...] = (
    from_a_loader, from_an_older_iterator, from_an_iterator_of_its_own, from_two_loaders, from_a_loader_of_a_loader,
    with_modules_in_the_loader, with_modules_before_the_model, with_a_loader_on_another_thread, accumulating,
    with_a_closure, with_lbfgs, with_a_grad_scaler, with_a_checkpoint, with_a_gradient_penalty,
    with_evaluation_between, with_steps_of_the_user, compiled,
)  # fmt: skip


def run_loop(
    loop: Callable[[Run], Planted], clock: Clock, **options: Any
) -> tuple[modtrace.Recording, Planted]:
    """Runs a loop; returns its recording, and where each cycle but the first and the last goes."""
    recordings = []

    @contextmanager
    def record() -> Iterator[modtrace.Recording]:
        with modtrace.record(strict=True, **options) as rec:
            recordings.append(rec)
            yield rec

    torch.manual_seed(0)
    model = Slow(clock)
    planted = loop(Run(clock, model, SGD(clock, model), record))
    return recordings[0], planted
