"""Every tensor in an output has its key path, and nothing of the user's is run or used up on the way."""

import asyncio
import collections
import dataclasses
import enum
import gc
import io
import logging
import re
import threading
import types
import weakref
from collections import OrderedDict, UserDict, UserList, deque, namedtuple
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from modtrace.collect.structures import find as slots
from modtrace.collect.structures.find import find_slots

A, B, C = (torch.full((size,), float(size)) for size in (1, 2, 3))
NAMES = {id(A): "A", id(B): "B", id(C): "C"}

Place = namedtuple("Place", ["row", "column"])


def found(output: object) -> list[tuple[str, str]]:
    """Each slot with the name of its tensor, or its note."""
    with torch._C.DisableTorchFunction():
        entries = find_slots(output)
    return [(each.slot, NAMES[id(each.tensor)] if each.note is None else each.note) for each in entries]


@dataclasses.dataclass
class Output:
    logits: object
    extra: object = None


@dataclasses.dataclass(slots=True)
class SlottedOutput:
    logits: object
    aux: object = None


@dataclasses.dataclass(frozen=True)
class Key:
    name: str


class Plain:
    """An object with the attributes that it is given."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("second", "first", "__private", "unset")  # noqa: RUF023

    def __init__(self) -> None:
        self.first, self.second, self.__private = A, B, C


class SlottedBelow(Slotted):
    __slots__ = "own"

    def __init__(self) -> None:
        super().__init__()
        self.own = A


class Mine(torch.Tensor):
    pass


class Colour(enum.Enum):
    RED = 1


class ListWithMask(list):
    pass


class Lazy(Mapping):
    """A mapping that makes its values when it is asked for them."""

    def __getitem__(self, key):
        return {"a": A, "b": [B]}[key]

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (A, [("", "A")]),
        ((A, B, A), [("[0]", "A"), ("[1]", "B"), ("[2]", "A")]),
        ([A, None, (B, [C])], [("[0]", "A"), ("[2][0]", "B"), ("[2][1][0]", "C")]),
        ((), []),
        ({"logits": A, 3: B, ("x", 1): C}, [("['logits']", "A"), ("[3]", "B"), ("[('x', 1)]", "C")]),
        ({"it's": A, "b.c": B}, [('["it\'s"]', "A"), ("['b.c']", "B")]),
        (OrderedDict(z=A, a=B), [("['z']", "A"), ("['a']", "B")]),
        (collections.defaultdict(list, x=[A]), [("['x'][0]", "A")]),
        (types.MappingProxyType({"x": A}), [("['x']", "A")]),
        (UserDict(x=A), [("['x']", "A")]),
        (UserList([A, B]), [(".data[0]", "A"), (".data[1]", "B")]),
        (deque([A, B]), [("[0]", "A"), ("[1]", "B")]),
        ({"x": A, "y": B}.values(), [("[0]", "A"), ("[1]", "B")]),
        ({"x": A}.items(), [("[0][1]", "A")]),
        (Place(A, [B]), [(".row", "A"), (".column[0]", "B")]),
        (Output(A, {"x": B}), [(".logits", "A"), (".extra['x']", "B")]),
        (SlottedOutput(A, [B]), [(".logits", "A"), (".aux[0]", "B")]),
        (Slotted(), [(".second", "B"), (".first", "A"), ("._Slotted__private", "C")]),
        (
            SlottedBelow(),
            [(".second", "B"), (".first", "A"), ("._Slotted__private", "C"), (".own", "A")],
        ),
        (Plain(x=A, nested=[Plain(y=B)], n=3), [(".x", "A"), (".nested[0].y", "B")]),
        (types.SimpleNamespace(x=A), [(".x", "A")]),
        ({A}, [("{0}", "A")]),
        (frozenset([A, "x"]), [("{0}", "A")]),
        ({1, 2}, []),
        ({A, B, 3}, [("", "set of 2 objects: it has no order to name them by")]),
        (Lazy(), [("['a']", "A"), ("['b'][0]", "B")]),
    ],
    ids=lambda value: None if isinstance(value, list) else type(value).__name__,
)
def test_tensors_have_the_key_path_that_leads_to_them(output: object, expected: list) -> None:
    assert found(output) == expected


def test_named_places_of_torchs_own_tuples_are_slots() -> None:
    largest = torch.max(torch.eye(3), dim=0)
    assert [(each.slot, each.tensor is largest[place]) for place, each in enumerate(find_slots(largest))] == [
        (".values", True),
        (".indices", True),
    ]


def test_model_output_with_a_cache_has_its_keys_and_values() -> None:
    from helpers.architectures import ARCHITECTURES

    torch.manual_seed(0)
    model, arguments = ARCHITECTURES["GPT-2"]()
    output = model(**arguments, use_cache=True, output_hidden_states=True)
    layers = output.past_key_values.layers
    expected = [
        (".loss", output.loss),
        (".logits", output.logits),
        (".past_key_values.layers[0].keys", layers[0].keys),
        (".past_key_values.layers[0].values", layers[0].values),
        (".past_key_values.layers[1].keys", layers[1].keys),
        (".past_key_values.layers[1].values", layers[1].values),
        (".hidden_states[0]", output.hidden_states[0]),
        (".hidden_states[1]", output.hidden_states[1]),
        (".hidden_states[2]", output.hidden_states[2]),
    ]
    entries = find_slots(output)
    assert [each.slot for each in entries] == [slot for slot, _ in expected]
    assert all(each.tensor is tensor for each, (_, tensor) in zip(entries, expected, strict=True))
    assert [each.note for each in entries] == [None] * len(expected)


def test_tensors_of_any_class_are_tensors() -> None:
    special = [
        nn.Parameter(A),
        A.as_subclass(Mine),
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([A, B], layout=torch.jagged),
    ]
    entries = find_slots(special)
    assert [each.slot for each in entries] == ["[0]", "[1]", "[2]", "[3]", "[4]"]
    assert all(each.tensor is tensor for each, tensor in zip(entries, special, strict=True))


@pytest.mark.parametrize(
    "nothing",
    [
        None,
        3,
        "text",
        b"bytes",
        range(3),
        np.ones(3),
        torch.float32,
        torch.device("cpu"),
        torch.Generator(),
        lambda: A,
        len,
        nn.Linear,
        torch,
        nn.Linear(2, 2),
        nn.ParameterList([A]),
        Colour.RED,
        threading.Lock(),
        threading.Thread(target=print, args=(A,)),
        logging.getLogger(__name__),
        weakref.ref(A),
        object(),
        Plain(),
        ValueError("x"),
        re.match("a", "a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_no_tensors_gives_nothing(nothing: object) -> None:
    assert found(nothing) == []
    assert found({"x": [nothing, A]}) == [("['x'][1]", "A")]


def test_generator_still_yields_everything_afterwards() -> None:
    output = Output(logits=(each for each in (A, B)), extra=[iter([C]), zip([A], [B], strict=True)])
    assert found(output) == [
        (".logits", "generator: left untouched"),
        (".extra[0]", "list_iterator: left untouched"),
        (".extra[1]", "zip: left untouched"),
    ]
    assert list(output.logits) == [A, B]
    assert list(output.extra[0]) == [C]
    assert list(output.extra[1]) == [(A, B)]


def test_what_waits_or_reads_is_left_alone() -> None:
    async def wait():
        return A

    async def several():
        yield A

    waiting = wait()
    expected = [
        ("[0]", "coroutine: left untouched"),
        ("[1]", "async_generator: left untouched"),
        ("[2]", "StringIO: left untouched"),
        ("[3]", "Future: left untouched"),
    ]
    assert found([waiting, several(), io.StringIO("text"), torch.futures.Future()]) == expected
    assert asyncio.run(waiting) is A


def test_container_inside_itself_is_not_entered_again() -> None:
    cycle: list = [A]
    cycle.append({"again": cycle, "b": B})
    this = Plain(x=C)
    this.me, this.list = this, cycle
    assert found(this) == [(".x", "C"), (".list[0]", "A"), (".list[1]['b']", "B")]


def test_what_is_reached_in_two_ways_has_both_slots() -> None:
    shared = [A]
    assert found({"x": shared, "y": shared, "z": A}) == [("['x'][0]", "A"), ("['y'][0]", "A"), ("['z']", "A")]


def test_dict_that_is_its_own_attributes_gives_each_tensor_once() -> None:
    class Attributes(dict):
        def __init__(self, **given) -> None:
            super().__init__(given)
            self.__dict__ = self

    assert found(Attributes(x=A, y=[B])) == [("['x']", "A"), ("['y'][0]", "B")]


def test_attributes_of_a_list_follow_its_elements() -> None:
    output = ListWithMask([A])
    output.mask, output.first = B, A
    assert found(output) == [("[0]", "A"), (".mask", "B")]


def test_lists_may_lie_in_each_other_5000_deep() -> None:
    nested: object = A
    for _ in range(5_000):
        nested = [nested]
    assert found((nested, B)) == [("[0]" + "[0]" * 5_000, "A"), ("[1]", "B")]


def test_properties_and_descriptors_are_not_touched() -> None:
    class Trap:
        def __get__(self, instance, owner):
            raise AssertionError("run")

    class Touchy:
        trap = Trap()

        def __init__(self) -> None:
            self.x = A

        @property
        def lazy(self):
            raise AssertionError("run")

        def __getattr__(self, name):
            raise AssertionError("run")

        def __getattribute__(self, name):
            raise AssertionError("run")

        def __eq__(self, other):
            raise AssertionError("run")

        __hash__ = None

    object.__setattr__(touchy := object.__new__(Touchy), "x", A)
    assert found([touchy, B]) == [("[0].x", "A"), ("[1]", "B")]


def test_methods_of_a_dict_or_list_subclass_are_not_run() -> None:
    def fail(self, *args):
        raise AssertionError("run")

    methods = dict.fromkeys(
        ["__iter__", "__len__", "__getitem__", "items", "values", "keys", "__bool__"], fail
    )
    of_dict = type("D", (dict,), methods)(x=A)
    of_list = list.__new__(type("L", (list,), methods))
    list.append(of_list, B)
    of_tuple = tuple.__new__(type("T", (tuple,), methods), [C])
    assert found([of_dict, of_list, of_tuple]) == [("[0]['x']", "A"), ("[1][0]", "B"), ("[2][0]", "C")]


def test_mapping_that_raises_has_a_note_and_the_rest_is_found() -> None:
    class AtOnce(Lazy):
        def items(self):
            raise KeyError("gone")

    class OnTheWay(Lazy):
        def items(self):
            yield "a", A
            raise OSError("file closed")

    assert found([AtOnce(), OnTheWay(), B]) == [
        ("[0]", "AtOnce: reading it raised KeyError"),
        ("[1]['a']", "A"),
        ("[1]", "OnTheWay: reading it raised OSError"),
        ("[2]", "B"),
    ]


def test_field_that_was_deleted_is_not_there() -> None:
    output, slotted = Output(A, B), SlottedOutput(A, B)
    del output.logits, slotted.logits
    assert found([output, slotted]) == [("[0].extra", "B"), ("[1].aux", "B")]


def test_key_that_has_no_text_has_its_class_and_place() -> None:
    class Wrong:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    keys = [Wrong(), object(), A, Key("x"), "y" * 100 + "end", Colour.RED, None]
    assert [slot for slot, _ in found(dict.fromkeys(keys, A))] == [
        "[Wrong#0]",
        "[object#1]",
        "[Tensor#2]",
        "[Key(name='x')]",
        "['" + "y" * 39 + "…" + "y" * 35 + "end']",
        "[<Colour.RED: 1>]",
        "[None]",
    ]


def test_more_than_10000_tensors_end_with_a_note() -> None:
    entries = find_slots([[A] * 6_000, [B] * 6_000])
    assert len(entries) == 10_001
    assert entries[9_999] == ("[1][3999]", B, None)
    assert entries[10_000] == ("[1][4000]", None, "more than 10,000 tensors: the rest is left out")


def test_more_than_100000_objects_end_with_a_note() -> None:
    endless = Plain(x=A)
    endless.items = [[[]] * 100_000, B]
    assert found(endless) == [
        (".x", "A"),
        (".items[0][99996]", "more than 100,000 objects: the rest is left out"),
    ]


def test_endless_mapping_ends_with_a_note() -> None:
    class Endless(Lazy):
        def items(self):
            while True:
                yield "x", 1

    assert found(Endless()) == [("['x']", "more than 100,000 objects: the rest is left out")]


def test_slots_of_a_long_chain_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(slots, "MAX_SLOT_CHARACTERS", 20)
    assert found([A, [B, [C, [A]]]]) == [
        ("[0]", "A"),
        ("[1][0]", "B"),
        ("[1][1][0]", "C"),
        ("[1][1][1][0]", "more than 20 characters of slots: the rest is left out"),
    ]


def test_a_million_numbers_do_not_hide_what_follows_them() -> None:
    numbers = [7] * 1_000_000
    assert found((numbers, dict(enumerate(numbers[:1000])), A)) == [("[2]", "A")]


def test_nothing_is_kept_alive() -> None:
    gc.disable()
    try:
        output = Plain(x=[torch.ones(1)], wrong=type("W", (Lazy,), {"items": lambda self: 1 / 0})())
        died = [weakref.ref(output), weakref.ref(output.x[0]), weakref.ref(output.wrong)]
        assert [each.slot for each in find_slots(output)] == [".x[0]", ".wrong"]
        del output
        assert [each() for each in died] == [None, None, None]
    finally:
        gc.enable()


def test_no_mode_of_the_users_sees_anything() -> None:
    seen = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    output = Output({"x": [A.as_subclass(Mine)], A: B}, torch.max(torch.eye(2), dim=0))
    with Dispatched(), Called(), torch._C.DisableTorchFunction():
        entries = find_slots(output)
    assert [each.slot for each in entries] == [
        ".logits['x'][0]",
        ".logits[Tensor#1]",
        ".extra.values",
        ".extra.indices",
    ]
    assert seen == []
