"""What was kept of tensors becomes columns, for what each row's captures want."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modtrace.collect.values.extra_columns import extra_columns, extra_notes
from modtrace.measure.measurers.extras import Extras
from modtrace.measure.measurers.user_functions import UserFunctions
from modtrace.measure.measurers.want import Extra, Want
from modtrace.recording.arrow.batches import to_columns
from modtrace.recording.statistics.fingerprints import hash_to_bytes


def first(tensor):
    return tensor


def second(tensor):
    return tensor


EVERYTHING = Want(stats=2, hash=True, sketch=True, sample=2, tensors=True, functions=(first,))
COLUMNS = [
    *("sumabs", "zero_count", "sum4", "argmax", "channel_max"),
    *("sample", "hash", "sketch", "histogram", "user", "blob"),
]


def typed(as_tensors=False):
    """An extra with a value in each field; on another device most are tensors."""
    there = torch.tensor if as_tensors else (lambda value, **options: value)
    arrays = (lambda values, kind: torch.from_numpy(np.array(values, kind))) if as_tensors else np.array
    extra = Extra()
    extra.sumabs, extra.sum4 = there(6.5, dtype=torch.float64), there(80.25, dtype=torch.float64)
    extra.zero_count, extra.argmax = there(3), there(7)
    extra.channel_max = {-1: arrays([1.0, 2.0], np.float32), 0: arrays([9.0], np.float32)}
    extra.histogram = arrays(np.arange(256), np.int64)
    extra.sample = {2: arrays([0.5, -0.5], np.float32), 5: arrays([0.0] * 5, np.float32)}
    extra.hash = there(-2) if as_tensors else 2**64 - 2
    extra.sketch = arrays(np.arange(64) / 2, np.float64)
    extra.user = [(first, {"a": there([1.5]), "b": [there(2)]})]
    extra.blob = "tensors-00000.safetensors:000001.it"
    return extra


EXPECTED = {
    "sumabs": 6.5,
    "zero_count": 3,
    "sum4": 80.25,
    "argmax": 7,
    "channel_max": [1.0, 2.0],
    "sample": [0.5, -0.5],
    "hash": b"\xfe\xff\xff\xff\xff\xff\xff\xff",
    "sketch": [number / 2 for number in range(64)],
    "histogram": list(range(256)),
    "user": '{"a": [1.5], "b": [2]}',
    "blob": "tensors-00000.safetensors:000001.it",
}


def rows(columns, count):
    """As the sink writes them, and reads them back."""
    if not columns:
        return [{}] * count
    written = to_columns("values", {"step": np.zeros(count, np.int32), "phase": [None] * count} | columns)
    del written["step"], written["phase"]
    return pa.table(written).to_pylist()


@pytest.mark.parametrize("as_tensors", [False, True], ids=["here", "on a device"])
def test_every_field_has_its_column(as_tensors):
    columns = extra_columns([None, typed(as_tensors), typed(as_tensors)], [None, EVERYTHING, EVERYTHING])
    assert list(columns) == COLUMNS
    assert rows(columns, 3) == [dict.fromkeys(COLUMNS), EXPECTED, EXPECTED]


def test_without_anything_there_is_no_column():
    assert extra_columns([], []) == {}
    assert extra_columns([None, Extra(), typed(), typed()], [None, EVERYTHING, None, Want()]) == {}


WANTS = {
    "tier 2": (Want(stats=2), {"sumabs", "zero_count", "sum4", "argmax", "channel_max", "histogram"}),
    "hash": (Want(hash=True), {"hash"}),
    "sketch": (Want(sketch=True), {"sketch"}),
    "sample": (Want(sample=2), {"sample"}),
    "another sample": (Want(sample=3), set()),
    "function": (Want(functions=(first,)), {"user"}),
    "another function": (Want(functions=(second,)), set()),
    "tensor": (Want(tensors=True), {"blob"}),
    "lazy tensor": (Want(lazy=True), {"blob"}),
}


@pytest.mark.parametrize("wanted", WANTS)
def test_what_is_not_wanted_of_a_row_is_null(wanted):
    want, names = WANTS[wanted]
    shared = typed()
    both = rows(extra_columns([shared, shared], [EVERYTHING, want]), 2)
    assert both == [EXPECTED, {name: EXPECTED[name] if name in names else None for name in COLUMNS}]


def test_rows_that_share_a_tensor_have_each_its_channels():
    shared = typed()
    wants = [Want(stats=2, channel_dim=0), Want(stats=2)]
    assert [row["channel_max"] for row in rows(extra_columns([shared, shared], wants), 2)] == [
        [9.0],
        [1.0, 2.0],
    ]


def test_of_several_functions_there_is_a_list_with_null_for_one_that_has_raised():
    extra, none = Extra(), Extra()
    extra.user = [(second, None), (first, 1)]
    wants = [Want(functions=(first, second)), Want(functions=(len, first)), Want(functions=(second,))]
    columns = extra_columns([extra, extra, extra, none], [*wants, wants[0]])
    assert columns == {"user": ["[1, null]", "[null, 1]", "null", None]}


def test_nan_of_a_function_is_read_back_by_json():
    extra = Extra()
    extra.user = [(first, [math.nan, math.inf])]
    (text,) = extra_columns([extra], [Want(functions=(first,))])["user"]
    assert str(json.loads(text)) == "[nan, inf]"


def test_a_sketch_beyond_float32_is_infinite_there():
    extra = Extra()
    extra.sketch = np.full(64, 1e300)
    (row,) = rows(extra_columns([extra], [Want(sketch=True)]), 1)
    assert row["sketch"] == [math.inf] * 64


def test_what_cannot_be_read_from_its_device_is_null_with_a_note():
    extra = typed()
    extra.sumabs = torch.ones((), device="meta")
    assert extra_notes([None], [extra], [EVERYTHING]) == ["not read from meta: NotImplementedError"]
    (row,) = rows(extra_columns([extra], [EVERYTHING]), 1)
    assert row == {name: value for name, value in EXPECTED.items() if name != "sumabs"}


def test_what_a_function_returns_on_a_device_is_of_any_dtype():
    for returned, expected in (
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "[1.5, -2.0]"),
        (torch.tensor([[True], [False]]), "[[true], [false]]"),
        (torch.tensor([3, 250], dtype=torch.uint8), "[3, 250]"),
    ):
        extra = Extra()
        extra.user = [(first, returned)]
        (row,) = rows(extra_columns([extra], [Want(functions=(first,))]), 1)
        assert row == {"user": expected}


def test_what_lies_on_a_device_is_read_in_one_transfer_a_kind(monkeypatch):
    stacked = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda tensors: stacked.append(len(tensors)) or stack(tensors))
    extras = [typed(True) for _ in range(5)]
    extra_columns([*extras, *extras], [EVERYTHING] * 10)
    # of 5 tensors: histograms, sketches, long samples; sumabs with sum4, short samples with channels, and those with
    # what a function has returned; single integers
    assert sorted(stacked) == [5, 5, 5, 10, 10, 10, 20]


def test_a_device_is_read_once_for_rows_of_several_batches():
    extra = typed(True)
    assert rows(extra_columns([extra], [EVERYTHING]), 1) == rows(extra_columns([extra], [EVERYTHING]), 1)
    assert extra.sumabs == 6.5


# Notes.


def test_notes_of_what_a_row_wants_are_joined_to_its_own():
    extra = Extra()
    extra.add_note("nested: its values()")
    extra.add_note("no channel_max: too many", "channel_max", 0)
    extra.add_note("no sample: broken", "sample", 5)
    extra.add_note("no hash: broken", "hash")
    extra.add_note("function first raised ValueError", "user", first)
    extra.add_note("not kept: dropped", "blob")
    wants = [
        Want(),
        Want(stats=2, channel_dim=0),
        Want(stats=2, channel_dim=1, sample=4),
        Want(sample=5, hash=True),
        Want(functions=(second,)),
        Want(functions=(second, first), lazy=True),
        None,
    ]
    own = ["nested: its values()", None, "a; b", None, None, "c", "d"]
    assert extra_notes(own, [extra] * 7, wants) == [
        "nested: its values()",
        "nested: its values(); no channel_max: too many",
        "a; b; nested: its values()",
        "nested: its values(); no sample: broken; no hash: broken",
        "nested: its values()",
        "c; nested: its values(); function first raised ValueError; not kept: dropped",
        "d",
    ]


def test_what_a_row_says_already_is_not_said_again():
    extra = Extra()
    extra.add_note("Outer: its inner; Outer: its inner")
    extra.add_note("complex: real and imaginary parts")
    own = "Outer: its inner; Outer: its inner; complex: real and imaginary parts"
    assert extra_notes([own], [extra], [Want()]) == [own]


# Laws.


@given(
    st.lists(st.none() | st.lists(st.floats(width=32, allow_nan=False), max_size=5), min_size=1),
    st.lists(st.booleans()),
)
def test_any_mixture_of_rows_is_read_back(numbers, hashed):
    want, extras = Want(stats=0, hash=True, functions=(first,)), []
    extras_of_ours = Extras(UserFunctions(lambda what, error: None))
    for at, each in enumerate(numbers):
        extra = None
        if each is not None:
            extra = Extra()
            here = Want(stats=0, hash=at < len(hashed) and hashed[at], functions=(lambda tensor: tensor,))
            extras_of_ours.measure(torch.tensor(each), here, extra)
            extra.user = [(first, value) for _, value in extra.user]
        extras.append(extra)
    found = rows(extra_columns(extras, [want] * len(extras)), len(extras))
    for extra, each, row in zip(extras, numbers, found, strict=True):
        kept = None if extra is None or extra.hash is None else hash_to_bytes(extra.hash)
        assert row.get("hash") == kept
        assert (None if row.get("user") is None else json.loads(row["user"])) == each
