"""Arrays made from buffers are those that `pa.array` makes."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modtrace.recording.arrow.arrays import (
    absent_column,
    from_codes,
    from_encoded,
    from_list,
    from_numpy,
    from_parts,
    null_below_zero,
    to_numpy,
)
from modtrace.recording.schema import schema, schemas

LISTS = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text()),
    (pa.dictionary(pa.int32(), pa.string()), st.text(max_size=2)),
    (pa.list_(pa.string()), st.lists(st.none() | st.text())),
    (pa.list_(pa.int64()), st.lists(st.none() | st.integers(-9, 9))),
    (pa.list_(pa.float32()), st.lists(st.floats(width=32, allow_nan=False))),
    (pa.binary(), st.binary()),
]


@pytest.mark.parametrize(("wanted", "value"), LISTS, ids=[str(wanted) for wanted, _ in LISTS])
@settings(max_examples=25)
@given(data=st.data())
def test_list_becomes_what_arrow_makes_of_it(
    wanted: pa.DataType, value: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.none() | value, max_size=20))
    array = from_list(values, wanted)
    array.validate(full=True)
    assert array.equals(pa.array(values, type=wanted))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([True], pa.int64()),
        ([float("nan")], pa.int32()),
        ([1.5], pa.int32()),  # `pa.array` cuts it to 1
        ([2**31], pa.int32()),
        ([2**64], pa.int64()),
        (["1"], pa.int64()),
        ([1], pa.bool_()),
        ([1], pa.string()),
        (["\ud800"], pa.string()),
        ([["a", 1]], pa.list_(pa.string())),
        ([object()], pa.float64()),
    ],
)
def test_value_of_another_type_is_refused(values: list[Any], wanted: pa.DataType) -> None:
    with pytest.raises((pa.ArrowException, ValueError, TypeError, OverflowError)):
        from_list(values, wanted)


@pytest.mark.parametrize(
    "wanted", [pa.int8(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()]
)
@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "i8", "u8", "f4", "f8", "?"])
def test_numbers_become_what_arrow_makes_of_them(dtype: str, wanted: pa.DataType) -> None:
    values = np.array([0, 1, 100, 0, 1, 1, 0, 1, 1, 7], dtype)
    mask = np.array([0, 1, 0, 0, 0, 0, 0, 0, 0, 1], bool)
    for given_values, expected in (
        (values, pa.array(values, type=wanted)),
        (np.ma.masked_array(values, mask), pa.array(values, type=wanted, mask=mask)),
        (np.ma.masked_array(values, False), pa.array(values, type=wanted)),
        (values[::-3], pa.array(values[::-3].copy(), type=wanted)),
        (values[:0], pa.array(values[:0], type=wanted)),
    ):
        array = from_numpy(given_values, wanted)
        array.validate(full=True)
        assert array.equals(expected)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (np.array([128]), pa.int8()),
        (np.array([2**63], np.uint64), pa.int64()),
        (np.array([0.5]), pa.int64()),
        (np.array([np.nan]), pa.int32()),
        (np.array([1]), pa.string()),
        (np.zeros((2, 2)), pa.float64()),
    ],
)
def test_number_that_does_not_fit_is_refused(values: Any, wanted: pa.DataType) -> None:
    with pytest.raises((pa.ArrowException, ValueError, TypeError)):
        from_numpy(values, wanted)


def test_number_that_does_not_fit_may_be_masked() -> None:
    values = np.ma.masked_array([1, 2**40], [False, True])
    assert from_numpy(values, pa.int32()).to_pylist() == [1, None]


@pytest.mark.parametrize("wanted", [pa.int32(), pa.int64(), pa.float64(), pa.bool_()])
def test_arrays_become_numpy(wanted: pa.DataType) -> None:
    values = pa.array([1, 0, None, 1, 1, 0, 0, 1, None, 1, 1], pa.int8()).cast(wanted)
    assert to_numpy(values, null=0).tolist() == [1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert to_numpy(values.slice(3, 5)).tolist() == [1, 1, 0, 0, 1]
    assert to_numpy(values.slice(3, 0)).tolist() == []
    assert to_numpy(pa.chunked_array([values.slice(0, 2), values.slice(9, 2)])).tolist() == [1, 0, 1, 1]
    assert to_numpy(pa.chunked_array([], wanted)).dtype == np.dtype(wanted.to_pandas_dtype())


def test_null_becomes_what_is_asked_for() -> None:
    assert to_numpy(pa.array([5, None], pa.int32())).tolist() == [5, -1]
    assert np.isnan(to_numpy(pa.array([None], pa.float64()), null=np.nan)[0])
    assert to_numpy(pa.array([5, None], pa.int32())).dtype == np.int32


def test_numbers_without_nulls_are_not_copied() -> None:
    values = pa.array([1, 2, 3])
    assert to_numpy(values.slice(1)).ctypes.data == values.buffers()[1].address + 8


FIELDS = [field for name in schemas() for field in schema(name)]


@pytest.mark.parametrize("rows", [0, 1, 100, 100_000])
def test_absent_column_is_null_or_empty(rows: int) -> None:
    for field in {(each.type, each.nullable): each for each in FIELDS}.values():
        column = absent_column(field, rows)
        column.validate(full=True)
        assert (column.type, len(column)) == (field.type, rows)
        assert column.null_count == (rows if field.nullable else 0)
        assert column.slice(0, 2).to_pylist() == [_empty(field)] * min(rows, 2)


def _empty(field: pa.Field) -> object:
    if field.nullable:
        return None
    if pa.types.is_list(field.type):
        return []
    return 0 if pa.types.is_primitive(field.type) else ""


def test_absent_columns_share_their_buffer() -> None:
    before = pa.total_allocated_bytes()
    columns = [absent_column(pa.field("flops", pa.int64()), rows) for rows in range(0, 5000, 7)]
    assert len({column.buffers()[1].address for column in columns}) == 1
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("wanted", [pa.int8(), pa.int32(), pa.uint64(), pa.int64()], ids=str)
@given(values=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200), max_size=20))
def test_integers_become_those_of_another_type_as_arrow_casts_them(
    wanted: pa.DataType, values: list[int]
) -> None:
    given_array, plain = np.array(values, np.int64), pa.array(values, pa.int64())
    try:
        expected = plain.cast(wanted)
    except pa.ArrowInvalid:
        with pytest.raises(pa.ArrowInvalid):
            from_numpy(given_array, wanted)
    else:
        assert from_numpy(given_array, wanted).equals(expected)


@given(values=st.lists(st.integers(-3, 300), max_size=20))
def test_integers_are_null_below_zero(values: list[int]) -> None:
    array = null_below_zero(np.array(values, np.int64), pa.int32())
    array.validate(full=True)
    assert array.type == pa.int32()
    assert array.to_pylist() == [None if value < 0 else value for value in values]


def test_codes_of_texts_become_a_dictionary_of_those_that_are_used() -> None:
    array = from_codes(np.array([4, 1, 2, 4, 0]), ["b", "a", None, "unused", "a"])
    array.validate(full=True)
    assert array.to_pylist() == ["a", "a", None, "a", "b"]
    assert array.dictionary.to_pylist() == ["b", "a"]


@given(texts=st.lists(st.text(max_size=3), max_size=9))
def test_strings_and_lists_are_made_of_their_lengths_and_parts(texts: list[str]) -> None:
    encoded = [text.encode() for text in texts]
    lengths = np.array([len(text) for text in encoded], np.int64)
    strings = from_encoded(lengths, b"".join(encoded))
    lists = from_parts(lengths, np.frombuffer(b"".join(encoded), np.uint8).astype(np.int64))
    for array in (strings, lists):
        array.validate(full=True)
    assert strings.to_pylist() == texts
    assert lists.to_pylist() == [[*text] for text in encoded]
