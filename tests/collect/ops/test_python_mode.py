"""C records ops as its specification in Python does, row by row."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.architectures import ARCHITECTURES
from helpers.fuzzed import FUZZ
from helpers.python_op_mode import PythonOpMode
from modtrace.collect.ops import recorder
from modtrace.collect.ops.values import OpValues

#: What differs from run to run.
TIMES = {"start_ns", "end_ns", "device_start_ns", "device_end_ns", "overhead_ns"}

TABLES = ("alive", "ops", "tensors", "uses", "calls", "sites", "values")


class Doubled(torch.autograd.Function):
    """A Function of the user's, whose backward runs ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Interrupted(BaseException):
    """Is no Exception."""


def interrupt(gradient: Tensor) -> None:
    raise Interrupted


def actions(draw: random.Random, x: Tensor, layer: nn.Module) -> list[Callable[[], Tensor]]:
    """What a program may do with a tensor `[2, 4]`."""
    number: Any = draw.choice([1, 1.0, 0.0, -0.0, float("nan"), True, 2])
    return [
        lambda: layer(x),
        lambda: x * number,
        lambda: x.add(x, alpha=number).clone(),
        lambda: x.clone().mul_(number),
        lambda: x.detach(),
        lambda: x.view(8).view(2, 4),
        lambda: x[1:].expand(2, 4),
        lambda: torch.cat([*x.split(1)]),
        lambda: torch.stack([*x.unbind(1)], 1),
        lambda: x.topk(4).values,
        lambda: torch.mul(x.detach(), 2, out=torch.empty(0)),
        lambda: (torch._foreach_add_([kept := x.detach().clone(), x.detach()[:1].clone()], 1), kept)[1],
        lambda: (torch._foreach_mul([x, x], 2.0))[0],
        lambda: x.clone()[0].add_(1) + x,
        lambda: x + x.to_sparse().to_dense(),
        lambda: Doubled.apply(x),
        lambda: checkpoint(layer, x, use_reentrant=False),
        lambda: checkpoint(layer, x, use_reentrant=True),
        lambda: torch.stft(torch.ones(16), 8, window=torch.ones(8), return_complex=True).real.sum() + x,
        lambda: x.reshape(3, 3),  # raises
        lambda: torch.index_select(x, 0, torch.tensor([9])),  # raises in an op
        lambda: (x.sum().backward(retain_graph=True), x)[1] if x.requires_grad else x,
        lambda: torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0] if x.requires_grad else x,
        lambda: (x.register_hook(lambda gradient: gradient * 2), x)[1] if x.requires_grad else x,
        lambda: (x.clone().register_hook(interrupt), x)[1] if x.requires_grad else x,
        lambda: torch.no_grad()(layer)(x) + x,
        lambda: torch.utils._pytree.tree_map(torch.neg, {"a": [x]})["a"][0],
    ]


class Drawn(nn.Module):
    """Runs random actions, some of which raise, and calls modules inside of it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw, self.layers = random.Random(seed), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            with suppress(RuntimeError, IndexError, Interrupted):
                x = self.draw.choice(actions(self.draw, x, self.draw.choice(self.layers)))()
        return x


def random_program(seed: int) -> None:
    torch.manual_seed(seed)
    model = Drawn(seed)
    optimizer = random.Random(seed).choice([torch.optim.SGD, torch.optim.AdamW])(model.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        with suppress(RuntimeError):
            ((model(torch.ones(2, 4)) - 1) ** 2).mean().backward()
        optimizer.step()


def architecture(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    for _ in range(2):
        model(**inputs)[0].float().sum().backward()


@contextmanager
def seen_by_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "OpMode", PythonOpMode)
        yield


def recorded(run: Callable[[], None], **options: Any) -> dict[str, list[dict[str, Any]]]:
    with modtrace.record(ops=True, strict=True, **options) as rec:
        run()
    found = {name: rec.table(name) for name in TABLES}
    tables = {
        name: table.drop_columns([*TIMES & {*table.column_names}]).to_pylist()
        for name, table in found.items()
    }
    made = [row for row in tables["ops"] if row["sequence_nr"] is not None]
    firsts: dict[int, int] = {}
    for row in sorted(made, key=lambda row: row["sequence_nr"]):  # a thread counts on from program to program
        row["sequence_nr"] -= firsts.setdefault(row["sequence_thread"], row["sequence_nr"])
    return tables


def texts(tables: dict[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    """Returns rows as texts, in which NaN equals NaN."""
    return {name: [str(row) for row in rows] for name, rows in tables.items()}


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Lets no clock say which steps are written together: then calls of optimizers get their ids."""
    monkeypatch.setattr("modtrace.collect.recorder.flush_timer.FLUSH_TO_MEMORY_S", 3600.0)


@pytest.mark.parametrize("options", [{"values": None}, {}], ids=["without values", "with values"])
@pytest.mark.parametrize("seed", range(10 * FUZZ))
def test_random_programs_have_the_same_rows(seed, options, monkeypatch):
    found = recorded(lambda: random_program(seed), **options)
    with seen_by_python(monkeypatch):
        expected = recorded(lambda: random_program(seed), **options)
    assert texts(found) == texts(expected)
    assert len(expected["ops"]) > 20


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_have_the_same_rows(name, monkeypatch):
    found = recorded(lambda: architecture(name), values=None)
    with seen_by_python(monkeypatch):
        expected = recorded(lambda: architecture(name), values=None)
    assert texts(found) == texts(expected)


@pytest.mark.parametrize(
    ("values", "are_asked_for"),
    [
        ("stats", False),
        (modtrace.Capture(roles=("op_output",), stats=2), True),
        (modtrace.Capture(roles=("op_output",), ops=("aten.addmm*",)), True),
    ],
    ids=["usual statistics", "more than these", "some ops"],
)
def test_c_measures_outputs_itself_where_all_captures_want_their_usual_statistics(
    values, are_asked_for, monkeypatch
):
    asked: list[str] = []
    ended = OpValues.ended

    def told(self: OpValues, op: int, schema: Any, output: Any) -> None:
        asked.append(schema.name)
        ended(self, op, schema, output)

    monkeypatch.setattr(OpValues, "ended", told)
    found = recorded(lambda: random_program(0), values=values)
    measured = {row["op_id"] for row in found["values"] if row["op_id"] is not None}
    names = {row["name"] for row in found["ops"] if row["op_id"] in measured}
    assert (len(asked) > 20, bool(asked)) == (are_asked_for, are_asked_for)
    assert "aten.addmm.default" in names
