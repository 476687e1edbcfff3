"""What a user's function returns becomes what JSON can hold, with the same values."""

import enum
import json
import math
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modtrace.measure.measurers.user_functions import to_json_value


class Text(str):
    __slots__ = ()


class Color(enum.IntEnum):
    RED = 3


Pair = namedtuple("Pair", "a b")

VALUES = {
    "None": (None, None),
    "bool": (True, True),
    "text of a subclass": (Text("a"), "a"),
    "enum": (Color.RED, 3),
    "numpy float": (np.float32(0.5), 0.5),
    "numpy bool": (np.bool_(True), True),
    "numpy text": (np.str_("a"), "a"),
    "long double": (np.longdouble(0.5), 0.5),
    "array": (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    "array of objects": (np.array([1, "a", None], object), [1, "a", None]),
    "array of texts": (np.array(["a", "b"]), ["a", "b"]),
    "tuple": ((1, (2.5,)), [1, [2.5]]),
    "named tuple": (Pair(1, 2), [1, 2]),
    "dict": ({2: "a", None: 2.0, True: [], 0.5: {}}, {"2": "a", "null": 2.0, "true": [], "0.5": {}}),
    "ordered dict of tensors": (OrderedDict(a=torch.ones(1)), {"a": [1.0]}),
    "scalar tensor": (torch.tensor(2.5), 2.5),
    "bfloat16": (torch.tensor([1.5], dtype=torch.bfloat16), [1.5]),
    "float8": (torch.tensor([1.5]).to(torch.float8_e4m3fn), [1.5]),
    "bool tensor": (torch.tensor([[True, False]]), [[True, False]]),
    "no elements": (torch.empty(0, 3), []),
    "leaf": (torch.ones(1, requires_grad=True), [1.0]),
    "expanded": (torch.ones(1).expand(3), [1.0, 1.0, 1.0]),
    "largest tensor": (torch.zeros(10_000), [0.0] * 10_000),
}


@pytest.mark.parametrize("kind", VALUES)
def test_each_kind_of_value(kind):
    value, expected = VALUES[kind]
    found = to_json_value(value)
    assert found == expected
    assert type(found) is type(expected)
    assert json.loads(json.dumps(found)) == expected


def test_nan_and_infinite_numbers_stay():
    found = to_json_value([math.nan, torch.tensor([math.inf]), np.float64(-math.inf)])
    assert json.dumps(found) == "[NaN, [Infinity], -Infinity]"


REFUSED = {
    "set": ({1}, "JSON cannot hold a value of type set"),
    "bytes": (b"a", "JSON cannot hold a value of type bytes"),
    "complex": (1j, "JSON cannot hold a value of type complex"),
    "object inside": ([{"a": object()}], "JSON cannot hold a value of type object"),
    "key": ({(1, 2): 3}, "JSON cannot hold a dict with keys of type tuple"),
    "complex array": (np.ones(1, complex), "JSON cannot hold an array of complex128"),
    "dates": (np.array(["2020-01-01"], "datetime64[D]"), "JSON cannot hold an array of datetime64[D]"),
    "complex tensor": (
        torch.ones(1, dtype=torch.complex64),
        "JSON cannot hold a complex tensor. Return torch.view_as_real(...) of it.",
    ),
    "too many elements": (torch.zeros(10_001), "a tensor of 10,001 elements; lists have at most 10,000"),
    "expanded to many": (
        torch.zeros(1).expand(101, 100),
        "a tensor of 10,100 elements; lists have at most 10,000",
    ),
    "too large an array": (np.zeros((101, 100)), "an array of 10,100 elements; lists have at most 10,000"),
    "too long an integer": (10**5000, "an integer of 16,610 bits is too long for JSON"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_json_cannot_hold_is_refused(kind):
    value, message = REFUSED[kind]
    with pytest.raises((TypeError, ValueError)) as refused:
        to_json_value(value)
    assert str(refused.value) == message


def test_a_list_that_holds_itself_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        to_json_value(endless)


def test_what_lies_on_another_device_stays_there_as_a_copy():
    tensor = torch.ones(3, device="meta", requires_grad=True)
    (found,) = to_json_value([tensor])
    assert (found.device.type, found.requires_grad, found is tensor) == ("meta", False, False)


def test_the_longest_integer_can_be_written():
    assert json.dumps(to_json_value(2**13_999))


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
NESTED = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


@settings(deadline=None, max_examples=40)
@given(NESTED)
def test_what_json_holds_anyway_is_not_changed(value):
    assert json.dumps(to_json_value(value)) == json.dumps(value)
