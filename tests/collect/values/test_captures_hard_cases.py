"""Captures where it is not plain whose a tensor is: recomputes, steps that interleave, aliases, compilers' modules."""

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.stat_rows import holds, names, one, rows
from modtrace import Capture


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def train(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


# Recomputes.


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return x + self.block(x)
        return x + checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "not reentrant", "reentrant"])
def test_gradient_of_an_input_counts_once_however_often_it_is_given(reentrant: bool | None) -> None:
    model = Checkpointed(reentrant)
    with modtrace.record(model, strict=True, values=Capture(roles=("grad_input", "grad_output"))) as rec:
        model(torch.ones(3, 4)).sum().backward()
    found = Counter(names(rows(rec), "path", "role"))
    assert found == {
        ("", "grad_output"): 1,
        ("first", "grad_output"): 1,
        ("block", "grad_input"): 1,
        ("block", "grad_output"): 1,
        ("block.0", "grad_input"): 1,
        ("block.0", "grad_output"): 1,
        ("block.1", "grad_input"): 1,
        ("block.1", "grad_output"): 1,
    }
    gradient = one(rec, path="block.0", role="grad_input")
    assert (
        gradient.sumsq == one(rec, path="first", role="grad_output").sumsq
    )  # of the very tensor, sum x included
    assert rec.history("block.0", "grad_input", "l2").values[0, 0] == pytest.approx(gradient.sumsq**0.5)


def test_gradient_of_what_only_a_recompute_was_given_is_there() -> None:
    class Backwards(torch.autograd.Function):
        """Runs a module in backward alone, on a tensor that no call was given in forward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
            ctx.module = module
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            again = torch.ones(2, 4, requires_grad=True)
            with torch.enable_grad():
                ctx.module(again).sum().backward()
            return 2 * gradient, None

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Backwards.apply(x, self.inner)

    model = Outer()
    with modtrace.record(model, strict=True, values=Capture(roles="grad_input", include="inner")) as rec:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert holds(one(rec), model.inner.weight.sum(0).expand(2, 4).contiguous())


# Backwards in a later step than their forward.


def test_generator_that_is_trained_after_its_critic_has_its_micro_batches() -> None:
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    expected = []
    capture = Capture(roles="parameter_grad", micro_batches=True)
    with modtrace.record({"generator": generator, "critic": critic}, strict=True, values=capture) as rec:
        for _ in range(2):
            of_critic.zero_grad()
            fake = generator(torch.randn(2, 3))
            critic(fake.detach()).mean().backward()
            of_critic.step()
            of_generator.zero_grad()
            critic(fake).mean().backward()
            expected.append(generator.weight.grad.clone())
            of_generator.step()
    found = rows(rec, root="generator", slot="weight")
    assert names(found, "step", "phase") == [
        (1, "backward"),
        (1, "optimizer"),
        (3, "backward"),
        (3, "optimizer"),
    ]
    for row, gradient in zip(found[::2], expected, strict=True):
        assert holds(row, gradient)
    assert not any(each._backward_hooks for each in (*generator.parameters(), *critic.parameters()))


def test_graph_that_is_dead_has_no_hooks_in_the_next_backward() -> None:
    used, other = nn.Linear(4, 1), nn.Linear(4, 1)
    hooked = []
    capture = Capture(roles="parameter_grad", micro_batches=True)
    with modtrace.record(strict=True, values=capture) as rec:
        used(torch.ones(1, 4)).sum().backward()
        rec.step()
        out = other(torch.ones(1, 4))
        out.register_hook(lambda gradient: hooked.append(bool(used.weight._backward_hooks)))
        out.sum().backward()
    assert hooked == [False]


# Which module.


@pytest.mark.parametrize("name", ["one", "two", "held.three"])
def test_module_with_several_names_below_its_caller_is_meant_by_each(name: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = self.one
            self.held = nn.ModuleDict({"three": self.one})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(x)

    model = Shared()
    with modtrace.record(model, strict=True, values=Capture(include=name)) as rec:
        train(model)
    assert {row.role for row in rows(rec)} == {"output", "grad_output", "parameter", "parameter_grad"}


def test_ops_outside_of_modules_are_not_taken_for_those_of_the_root() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    capture = Capture(roles="op_output", types="Linear")
    with modtrace.record(model, strict=True, ops=True, values=capture) as rec:
        nn.functional.linear(x, torch.ones(4, 4), torch.ones(4))
        with torch.no_grad():
            model(x)
        nn.functional.linear(x, torch.ones(4, 4), torch.ones(4))
    assert names(rows(rec), "path", "phase") == [("", "forward")]


@pytest.mark.parametrize("extra", ["tensors", "hash", "sketch"])
def test_op_in_place_is_measured_after_it_has_written(extra: str) -> None:
    class Writes(nn.Module):
        def forward(self) -> torch.Tensor:
            made = torch.empty(3).fill_(1)
            made.mul_(2)
            return (made + 1).mul_(2).add_(1)

    captured = modtrace.Capture(roles=["op_output"], **{extra: True})
    model = Writes()
    with modtrace.record(model, ops=True, values=captured, strict=True) as rec:
        model()
    found = rec.table("values").select(["min", "max"]).to_pylist()
    assert [(row["min"], row["max"]) for row in found] == [
        (None, None),  # empty
        (1, 1),
        (2, 2),
        (3, 3),
        (6, 6),
        (7, 7),
    ]


def test_ops_of_two_roots_are_told_apart() -> None:
    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

    class Other(One):
        pass

    one_root, other = One(), Other()
    capture = Capture(roles="op_output", types="Other")
    with modtrace.record({"one": one_root, "other": other}, strict=True, ops=True, values=capture) as rec:
        one_root(torch.ones(2))
        other(torch.ones(2))
    assert names(rows(rec), "root") == ["other"]


def test_what_a_compiler_hands_its_own_modules_is_no_input_of_the_model() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2, 4)).sum().backward()
    with modtrace.record(model, strict=True, values=Capture(roles=("input", "grad_input"))) as rec:
        compiled(torch.ones(2, 4)).sum().backward()
    torch._dynamo.reset()
    assert names(rows(rec), "path", "role", "slot") == [("", "input", "[0]")]


# What a capture is told.


def test_a_function_that_chooses_steps_is_asked_anew_in_each_recording() -> None:
    chosen: set[int] = set()
    capture = Capture(roles="output", steps=lambda step: step in chosen)
    model, found = nn.Linear(4, 1), []
    for step in (1, 2):
        chosen = {step}
        with modtrace.record(model, strict=True, values=capture) as rec:
            train(model, 3)
        found.append(names(rows(rec), "step"))
    assert found == [[1], [2]]


def choose_badly(*_: Any) -> bool:
    raise ValueError("no idea")


@pytest.mark.parametrize("argument", ["where", "steps", "function"])
def test_function_that_raises_where_warnings_are_errors_ends_neither_run_nor_recording(argument: str) -> None:
    captures = ["stats", Capture(roles="input", **{argument: choose_badly})]
    model = nn.Linear(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with modtrace.record(model, strict=True, values=captures) as rec:
            train(model, 2)
    [mark] = rec.meta.marks
    assert "ValueError: no idea" in mark
    assert {row.step for row in rows(rec, role="output")} == {0, 1}


def test_numbers_of_numpys_are_numbers() -> None:
    capture = Capture(
        roles="output", steps=[np.int64(1)], sample=np.int64(2), channel_dim=np.int32(0), stats=2
    )
    model = nn.Linear(4, 1)
    with modtrace.record(model, strict=True, values=capture) as rec:
        train(model, 3)
    assert names(rows(rec), "step") == [1]
    assert rec.meta.options["values"][0]["sample"] == 2


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"roles": None}, TypeError, "roles=None: give one such as 'output', a list of them, or 'all'"),
        ({"ops": 5}, TypeError, "ops=5: give names of ops or globs"),
        ({"ops": [5]}, TypeError, r"ops=\[5\]: give names of ops or globs"),
        ({"channel_dim": None}, TypeError, "channel_dim=None: give the number of a dimension, such as -1"),
        (
            {"tensors": 1},
            ValueError,
            r"tensors=1: give True \(--capture tensors\), False or 'lazy' \(--capture tensors=lazy\)",
        ),
        ({"hash": "no"}, TypeError, "hash='no': give True or False"),
        ({"micro_batches": 1}, TypeError, "micro_batches=1: give True or False"),
    ],
)
def test_a_capture_says_what_it_cannot_read(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Capture(**given)
