"""Whatever a module returns: each tensor in it has rows under its key path, and nothing of it is touched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import modtrace
from helpers.kernels import both_kernels
from helpers.stat_rows import names, rows
from modtrace.collect.values import taps

kernel = both_kernels((taps, "tap_tensor"), (taps, "tap_gradient"))


def record(*arguments: Any, **options: Any) -> modtrace.LiveRecording:
    return modtrace.record(*arguments, strict=True, **options)


class Gives(nn.Module):
    """Returns what it is told to make of the output of its only layer, which doubles."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.layer.weight.data.fill_(2.0)
        self.make = make

    def forward(self, x):
        return self.make(self.layer(x))


def recorded(make: Callable[[torch.Tensor], Any]) -> tuple[modtrace.LiveRecording, Any]:
    """The recording of one call on 1.0, so that the layer gives 2.0, and what it returned."""
    with record() as rec:
        output = Gives(make)(torch.ones(1))
    assert rec.meta.marks == ()
    return rec, output


def slots(make: Callable[[torch.Tensor], Any]) -> dict[str, float | str | None]:
    """By slot of the outer module's output: the number in it, or the note."""
    rec, _ = recorded(make)
    found = rows(rec, path="", role="output")
    assert len({row.slot for row in found}) == len(found)
    return {row.slot: row.note if row.count is None else row.sum for row in found}


class Both(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclass
class Output:
    logits: torch.Tensor
    hidden: Any = None
    name: str = "x"


class State:
    """An ordinary object of a user's, which no pytree knows."""

    limit = torch.tensor([1000.0])  # of the class: no output

    def __init__(self, x: torch.Tensor) -> None:
        self.position = x
        self.history = [x * 3, {"deep": (x * 4,)}]
        self._private = x * 5
        self.name = "state"

    @property
    def trap(self):
        raise AssertionError("a property was read")


# docs/promises.md names this file; tests/collect/structures/test_find.py asks for all kinds of structures.
EXPECTED: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "a tensor": (lambda y: y, {"": 2.0}),
    "nothing": (lambda y: None, {}),
    "a dict": (lambda y: {"loss": y, ("a", 1): y * 2}, {"['loss']": 2.0, "[('a', 1)]": 4.0}),
    "a tuple of all sorts": (
        lambda y: (y, None, 3, [y * 2, torch.tensor([7])]),
        {"[0]": 2.0, "[3][0]": 4.0, "[3][1]": 7.0},
    ),
    "a namedtuple": (lambda y: Both(y, {"k": y * 2}), {".first": 2.0, ".second['k']": 4.0}),
    "a dataclass": (
        lambda y: Output(y, hidden=[y * 2, Output(y * 3)]),
        {".logits": 2.0, ".hidden[0]": 4.0, ".hidden[1].logits": 6.0},
    ),
    "an object of the user's": (
        State,
        {".position": 2.0, ".history[0]": 6.0, ".history[1]['deep'][0]": 8.0, "._private": 10.0},
    ),
    "a set of two": (
        lambda y: {y, y * 2},
        {"": "set of 2 objects: it has no order to name them by"},
    ),
    "a parameter": (lambda y: nn.Parameter(y.detach()), {"": 2.0}),
    "a sparse tensor": (lambda y: y.to_sparse(), {"": 2.0}),
}


@pytest.mark.parametrize(("make", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_each_tensor_has_a_row_under_its_key_path_in(make, expected):
    assert slots(make) == expected


def test_generator_is_left_untouched_and_has_a_row_with_a_note():
    rec, output = recorded(lambda y: (y * number for number in (1, 2, 3)))
    [row] = rows(rec, path="", role="output")
    assert (row.slot, row.count, row.shape, row.dtype, row.note) == (
        "",
        None,
        (),
        "",
        "generator: left untouched",
    )
    assert [each.item() for each in output] == [2.0, 4.0, 6.0]


def test_gradients_have_the_slots_of_the_outputs():
    with record() as rec:
        output = Gives(lambda y: Output(y, hidden=[y * 2, y.detach()]))(torch.ones(1))
        (output.logits * 3 + output.hidden[0] * 5).sum().backward()
    assert names(rows(rec, role="grad_output"), "path", "slot", "sum", "order") == [
        ("", ".hidden[0]", 5.0, 4),
        ("", ".logits", 13.0, 5),
        ("layer", "", 13.0, 5),
    ]


def test_two_views_of_one_tensor_are_two_measurements():
    rec, _ = recorded(lambda y: (y, y.view(1, 1)))
    found = rows(rec, path="")
    assert names(found, "slot", "shape") == [("[0]", (1,)), ("[1]", (1, 1))]
    assert found[0].order != found[1].order
