"""Whatever a module returns: each tensor in it has rows under its key path, and nothing of it is touched."""

import pickle
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import modtrace
from helpers.stat_rows import names, rows


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


@dataclass(frozen=True, slots=True)
class Slotted:
    logits: torch.Tensor
    scale: float


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


class Subclass(dict):
    pass


EXPECTED: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "a tensor": (lambda y: y, {"": 2.0}),
    "nothing": (lambda y: None, {}),
    "a number": (lambda y: 3, {}),
    "a dict": (lambda y: {"loss": y, "aux": y * 2}, {"['loss']": 2.0, "['aux']": 4.0}),
    "an ordered dict": (lambda y: OrderedDict(b=y, a=y * 2), {"['b']": 2.0, "['a']": 4.0}),
    "a subclass of dict": (lambda y: Subclass(a=y), {"['a']": 2.0}),
    "a dict with other keys": (lambda y: {0: y, ("a", 1): y * 2}, {"[0]": 2.0, "[('a', 1)]": 4.0}),
    "a tuple": (lambda y: (y, None, 3, y * 2), {"[0]": 2.0, "[3]": 4.0}),
    "a list": (lambda y: [y, [y * 2, [y * 3]]], {"[0]": 2.0, "[1][0]": 4.0, "[1][1][0]": 6.0}),
    "a deque": (lambda y: deque([y, y * 2]), {"[0]": 2.0, "[1]": 4.0}),
    "an empty list": (lambda y: [], {}),
    "a namedtuple": (lambda y: Both(y, {"k": y * 2}), {".first": 2.0, ".second['k']": 4.0}),
    "what torch.max returns": (
        lambda y: y.view(1, 1).max(dim=1),
        {".values": 2.0, ".indices": 0.0},
    ),
    "a dataclass": (
        lambda y: Output(y, hidden=[y * 2, Output(y * 3)]),
        {".logits": 2.0, ".hidden[0]": 4.0, ".hidden[1].logits": 6.0},
    ),
    "a dataclass with slots": (lambda y: Slotted(y, 2.0), {".logits": 2.0}),
    "an object of the user's": (
        State,
        {".position": 2.0, ".history[0]": 6.0, ".history[1]['deep'][0]": 8.0, "._private": 10.0},
    ),
    "a set of one": (lambda y: {y}, {"{0}": 2.0}),
    "a set of two": (
        lambda y: {y, y * 2},
        {"": "set of 2 objects: it has no order to name them by"},
    ),
    "a generator beside a tensor": (
        lambda y: {"y": y, "later": (each for each in [y])},
        {"['y']": 2.0, "['later']": "generator: left untouched"},
    ),
    "an integer tensor": (lambda y: (y, torch.tensor([7])), {"[0]": 2.0, "[1]": 7.0}),
    "a parameter": (lambda y: nn.Parameter(y.detach()), {"": 2.0}),
    "a packed sequence": (
        lambda y: nn.utils.rnn.pack_padded_sequence(y.view(1, 1, 1), [1]),
        {".data": 2.0, ".batch_sizes": 1.0},
    ),
    "a distribution": (
        lambda y: torch.distributions.Normal(y, y * 2, validate_args=False),
        {".loc": 2.0, ".scale": 4.0},
    ),
}


@pytest.mark.parametrize(("make", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_each_tensor_has_a_row_under_its_key_path_in(make, expected):
    assert slots(make) == expected


def test_model_output_of_transformers_with_a_cache_is_read_through():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    with record(model) as rec:
        output = model(torch.arange(8).view(1, 8), use_cache=True, output_hidden_states=True)
    found = rows(rec, path="", role="output")
    shapes = {row.slot: row.shape for row in found}
    assert shapes == {
        ".logits": (1, 8, 32),
        ".past_key_values.layers[0].keys": (1, 2, 8, 8),
        ".past_key_values.layers[0].values": (1, 2, 8, 8),
        ".past_key_values.layers[1].keys": (1, 2, 8, 8),
        ".past_key_values.layers[1].values": (1, 2, 8, 8),
        ".hidden_states[0]": (1, 8, 16),
        ".hidden_states[1]": (1, 8, 16),
        ".hidden_states[2]": (1, 8, 16),
    }
    assert output.past_key_values.get_seq_length() == 8


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


def test_tensor_in_two_places_is_measured_once():
    rec, _ = recorded(lambda y: {"a": y, "b": [y, y * 2]})
    assert names(rows(rec), "path", "slot", "order") == [
        ("layer", "", 0),
        ("", "['a']", 0),
        ("", "['b'][0]", 0),
        ("", "['b'][1]", 1),
    ]


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


def test_container_inside_itself_ends():
    def make(y):
        output = [y]
        output.append(output)
        return output

    assert slots(make) == {"[0]": 2.0}


def test_object_whose_code_raises_yields_a_row_with_a_note():
    class Trap(dict):
        def __iter__(self):
            raise RuntimeError("no")

        def items(self):
            raise RuntimeError("no")

        def __repr__(self):
            raise RuntimeError("no")

        def __getattribute__(self, name):
            raise RuntimeError("no")

    assert slots(lambda y: [y, Trap(a=y * 2)]) == {"[0]": 2.0, "[1]['a']": 4.0}


def test_a_hundred_thousand_numbers_are_passed_over():
    tokens = list(range(100_000))
    output = {"logits": torch.ones(1), "tokens": tokens}
    rec, given = recorded(lambda y: output)
    assert names(rows(rec, path=""), "slot") == ["['logits']"]
    assert given is output
    assert given["tokens"] == list(range(100_000))


def test_a_hundred_thousand_tensors_end_with_a_note():
    one = torch.ones(())
    rec, _ = recorded(lambda y: [[one] * 1000 for _ in range(100)])
    found = rows(rec, path="")
    assert len(found) == 10_001
    assert found[-1].note == "more than 10,000 tensors: the rest is left out"
    assert len({row.order for row in found[:-1]}) == 1  # all are one tensor


def test_output_is_given_back_as_it_was():
    made = State(torch.ones(1))
    _, output = recorded(lambda y: made)
    assert output is made
    assert sorted(vars(made)) == ["_private", "history", "name", "position"]


def test_user_object_keeps_its_identity_and_can_be_pickled():
    _, output = recorded(lambda y: Output(y.detach(), hidden={"a": y.detach() * 2}))
    again = pickle.loads(pickle.dumps(output))
    assert again.hidden["a"].item() == 4.0


def test_forward_that_is_a_coroutine_has_a_row_with_a_note():
    class Waits(nn.Module):
        async def forward(self, x):
            return x

    with record() as rec:
        coroutine = Waits()(torch.ones(1))
        coroutine.close()
    [row] = rows(rec)
    assert row.note == "coroutine: left untouched"


def test_each_kind_of_tensor_subclass_in_an_output_has_a_row():
    class Tagged(torch.Tensor):
        pass

    assert slots(lambda y: (y.as_subclass(Tagged), y.to_sparse())) == {"[0]": 2.0, "[1]": 2.0}
