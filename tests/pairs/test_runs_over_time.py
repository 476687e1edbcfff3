"""Steps of one run, and two runs of the same seed."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import modtrace
from helpers.pairs import GPT, Run, record, seeded, spoil, train


def by_adamw(steps: int) -> Run:
    model = seeded(GPT, dropout=0.5)
    return train(model, steps=steps, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


@pytest.fixture(scope="module")
def three_steps() -> modtrace.Recording:
    return record(by_adamw(3))


def test_same_seed_twice_is_equal_in_every_bit(three_steps: modtrace.Recording) -> None:
    found = modtrace.compare(three_steps, record(by_adamw(3)), tolerance=0.0)
    assert found.ok, str(found)
    assert found.compared == found.equal > 1000
    assert (found.first, found.divergences) == (None, ())
    assert not found.missing and not found.extra
    assert found.steps == ((0, 0), (1, 1), (2, 2))


def test_another_seed_parts_at_the_first_draw(three_steps: modtrace.Recording) -> None:
    run = by_adamw(3)

    def work() -> None:
        with reseeded(3):
            run.work()

    found = modtrace.compare(three_steps, record(Run(run.model, work)))
    assert found.first is not None
    assert (found.first.step, found.first.path, found.first.op) == (
        0,
        "blocks.0.drop",
        "aten.bernoulli_.float",
    )
    assert found.first.kind == "made"


class reseeded:
    """`torch.manual_seed` sets another seed in here."""

    def __init__(self, seed: int) -> None:
        self.seed, self.usual = seed, torch.manual_seed

    def __enter__(self) -> None:
        torch.manual_seed = lambda _: self.usual(self.seed)

    def __exit__(self, *_: object) -> None:
        torch.manual_seed = self.usual


def test_next_step_differs_from_its_parameters_on() -> None:
    model = seeded(GPT).requires_grad_(False)
    model.blocks[1].fc.requires_grad_(True)
    rec = record(train(model, steps=2, optimizer=torch.optim.SGD(model.blocks[1].fc.parameters(), lr=1.0)))
    found = modtrace.compare(rec, rec, step=(0, 1))
    assert found.first is not None
    assert found.steps == ((0, 1),)
    assert (found.first.path, found.first.role, found.first.kind) == ("blocks.1.fc", "parameter", "source")
    assert not found.missing and not found.extra


def test_gradients_that_the_next_step_adds_up_are_extra() -> None:
    model = seeded(GPT)
    rec = record(train(model, steps=2, optimizer=torch.optim.SGD(model.blocks[1].fc.parameters(), lr=0.0)))
    found = modtrace.compare(rec, rec, step=(0, 1))
    assert not found.missing
    assert [(each.name, each.count) for each in found.extra.ops] == [("add_ outside of modules", 27)]
    assert not found.ok


def test_next_step_without_training_is_the_same() -> None:
    model = seeded(GPT)
    rec = record(train(model, steps=2, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)))
    for steps in ((0, 1), (1, 0)):
        found = modtrace.compare(rec, rec, step=steps)
        assert found.ok, str(found)
        assert found.compared == found.equal


def test_difference_that_comes_in_a_later_step_is_told_with_its_step(three_steps: modtrace.Recording) -> None:
    run = by_adamw(3)

    def work() -> None:
        def plant(optimizer: torch.optim.Optimizer, *_: object) -> None:
            taken.append(1)
            if len(taken) == 2:
                spoil(run.model.blocks[1].fc.weight)

        taken: list[int] = []
        handle = register_optimizer_step_post_hook(plant)
        try:
            run.work()
        finally:
            handle.remove()

    found = modtrace.compare(three_steps, record(Run(run.model, work)))
    assert found.first is not None
    assert found.first.path == "blocks.1.fc"
    assert (found.first.step, found.first.phase) in ((1, "optimizer"), (2, "forward"))
    assert {each.step for each in found.firsts} <= {1, 2}
