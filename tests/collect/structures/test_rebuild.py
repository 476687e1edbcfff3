"""Structures are made again as they were, with something else for each tensor."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from modtrace.collect.compile.in_graphs import build_from_layout, find_in_graph
from modtrace.collect.structures.rebuild import GradientTree
from modtrace.tensor_tracker import default_stash_value, rmap_tensor

Point = namedtuple("Point", ["a", "b"])


@dataclass
class Pair:
    a: Any
    b: Any


LEAVES = st.one_of(st.integers(), st.text(), st.none(), st.booleans(), st.integers(0, 9).map(torch.tensor))
STRUCTURES = st.recursive(
    LEAVES,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), below, max_size=3),
        st.builds(Point, below, below),
        st.builds(Pair, below, below),
    ),
)


def with_numbers(value: Any) -> Any:
    """The structure with tensors as their numbers, written without the code under test."""
    if isinstance(value, Tensor):
        return ("tensor", value.item())
    if type(value) is Point:
        return ("point", with_numbers(value.a), with_numbers(value.b))
    if type(value) is Pair:
        return ("pair", with_numbers(value.a), with_numbers(value.b))
    if isinstance(value, dict):
        return ("dict", *((key, with_numbers(each)) for key, each in value.items()))
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(with_numbers(each) for each in value))
    return value


@given(STRUCTURES)
def test_copy_has_the_same_structure_and_other_tensors(value: Any) -> None:
    seen: list[Tensor] = []
    made = rmap_tensor(value, lambda tensor: seen.append(tensor) or tensor.clone())
    assert with_numbers(made) == with_numbers(value)
    again: list[Tensor] = []
    rmap_tensor(made, again.append)
    assert all(each is not other for each, other in zip(seen, again, strict=True))


@given(STRUCTURES)
def test_gradients_filled_into_a_structure_stand_where_the_tensors_were(value: Any) -> None:
    places: list[Tensor] = []

    def slot_of(tensor: Tensor) -> int:
        places.append(tensor)
        return len(places) - 1

    tree = GradientTree(value, slot_of)
    filled = tree.fill([each.clone() for each in places])
    if type(value) in (tuple, list):
        kept = [each if isinstance(each, (Tensor, tuple, list, dict, Pair)) else None for each in value]
        assert with_numbers(filled) == with_numbers(tuple(kept))
    else:
        assert with_numbers(filled) == with_numbers((value,))


def test_keys_of_a_dict_are_mapped_too() -> None:
    key = torch.tensor(3)
    assert rmap_tensor({key: 1, (key, "a"): 2}, Tensor.item) == {3: 1, (3, "a"): 2}


def test_other_dicts_become_plain_ones() -> None:
    for value in (OrderedDict(a=torch.tensor(1)), defaultdict(list, a=torch.tensor(1))):
        made = rmap_tensor(value, Tensor.item)
        assert (type(made), made) == (dict, {"a": 1})


class Words(list):
    def __init__(self, *, needed: int) -> None:
        super().__init__()


class Row(tuple):
    def __new__(cls, *, needed: int) -> "Row":
        return super().__new__(cls)


def test_subclasses_are_made_again_without_their_constructors() -> None:
    words = Words(needed=1)
    words.append(torch.tensor(3))
    made = rmap_tensor(words, Tensor.item)
    assert (type(made), list(made)) == (Words, [3])
    made = rmap_tensor((Row(needed=1),), Tensor.item)
    assert type(made[0]) is Row


def test_attributes_beside_the_fields_are_mapped_too() -> None:
    pair = Pair(torch.tensor(1), 2)
    pair.more = torch.tensor(3)
    made = rmap_tensor(pair, Tensor.item)
    assert vars(made) == {"a": 1, "b": 2, "more": 3}
    assert type(pair.more) is Tensor


@pytest.mark.parametrize(
    "value", [deque([torch.ones(1)]), {torch.ones(1)}, nn.Linear(1, 1), Pair, "text", torch.float32, object()]
)
def test_all_else_is_the_very_same_object(value: Any) -> None:
    assert rmap_tensor(value, lambda tensor: None) is value


def test_list_inside_itself_and_very_deep_lists_end() -> None:
    inside: list[Any] = [torch.tensor(1)]
    inside += [inside, inside]
    assert rmap_tensor(inside, Tensor.item) == [1, inside, inside]
    deep: Any = torch.tensor(1)
    for _ in range(5000):
        deep = [deep]
    made = rmap_tensor(deep, Tensor.item)
    assert made is not deep


def test_what_could_keep_tensors_alive_is_none_among_gradients() -> None:
    tree = GradientTree({"cache": deque([torch.ones(1)]), "n": 1, "y": torch.ones(1)}, lambda tensor: 0)
    assert tree.fill([7]) == ({"cache": None, "n": 1, "y": 7},)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(1).expand(5),
        torch.empty(0, 3),
        torch.tensor(float("nan")),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3).to(torch.float8_e5m2),
        torch.tensor([True]),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        nn.Parameter(torch.ones(2)),
        torch.ones(2, device="meta"),
    ],
    ids=lambda tensor: (
        f"{tensor.layout} {tensor.dtype} {tuple(tensor.shape) if not tensor.is_nested else ''}"
    ),
)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated)")
def test_default_value_copies_any_kind_of_tensor(tensor: Tensor) -> None:
    copied = default_stash_value(tensor)
    assert copied is not tensor
    assert (copied.dtype, copied.layout, copied.requires_grad) == (tensor.dtype, tensor.layout, False)
    assert type(copied) is Tensor
    if tensor.device.type != "meta" and tensor.layout is torch.strided and not tensor.is_nested:
        assert repr(copied) == repr(tensor.detach().resolve_conj())
        assert not tensor.numel() or copied.data_ptr() != tensor.data_ptr()


def test_default_value_of_a_tensor_made_in_inference_mode_is_a_copy() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    assert default_stash_value(tensor).tolist() == [1, 1]


def built_from_layout(value: Any) -> Any:
    tensors: list[Tensor] = []
    layout: list[str] = []
    find_in_graph(value, True, tensors, [], 0, [], "", layout)
    lines = "\n".join(layout).split("\n")
    return build_from_layout(iter(lines), iter(tensors))


def without_others(value: Any) -> Any:
    """The structure with None in place of what is neither a tensor nor a container."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Point):
        return Point(*map(without_others, value))
    if isinstance(value, Pair):
        return Pair(without_others(value.a), without_others(value.b))
    if isinstance(value, dict):
        return {key: without_others(each) for key, each in value.items()}
    return type(value)(map(without_others, value)) if isinstance(value, (list, tuple)) else None


@given(STRUCTURES)
def test_layout_is_enough_to_build_the_structure(value: Any) -> None:
    assert with_numbers(built_from_layout(value)) == with_numbers(without_others(value))


def test_layout_of_classes_that_cannot_be_found_again() -> None:
    @dataclass
    class Hidden:
        a: Any
        b: Any

    HiddenPoint = namedtuple("HiddenPoint", ["a", "b"])
    HiddenPoint.__module__ = "nowhere"
    one, two = torch.tensor(1), torch.tensor(2)
    assert built_from_layout(Hidden(one, [two])) == {"a": one, "b": [two]}
    assert built_from_layout([HiddenPoint(one, two)]) == [{"a": one, "b": two}]
    assert built_from_layout(OrderedDict(x=one)) == {"x": one}
    assert built_from_layout({3: one, (1, "k"): two}) == {3: one, (1, "k"): two}
    highest = torch.max(torch.eye(2), 1)
    assert isinstance(built_from_layout(highest), type(highest))
