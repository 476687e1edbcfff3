"""Columns as collectors hold them become batches of the schema."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from modtrace.recording.arrow.arrays import Coded
from modtrace.recording.arrow.batches import null_misfits, to_batch
from modtrace.recording.schema import schema


def column(table: str, name: str, values: Any, **others: Any) -> list[Any]:
    return to_batch(table, {name: values, **others}).column(name).to_pylist()


def test_batch_has_the_schema_of_its_table() -> None:
    batch = to_batch("scalars", {"step": [1, 2], "name": ["loss", "lr"], "value": [0.5, 1e-3]})
    assert batch.schema.equals(schema("scalars"))
    assert batch.to_pylist() == [
        {"step": 1, "name": "loss", "value": 0.5},
        {"step": 2, "name": "lr", "value": 1e-3},
    ]


def test_column_left_out_is_null_or_empty() -> None:
    [row] = to_batch("modules", {"module_id": [7]}).to_pylist()
    assert row == {
        "module_id": 7,
        "root_id": 0,
        "path": "",
        "raw_path": "",
        "aliases": [],
        "name": None,
        "type": "",
        "parent_id": None,
        "parameters": None,
        "buffers": None,
    }


def test_word_left_out_is_empty_and_flag_is_false() -> None:
    [row] = to_batch("ops", {"op_id": [7]}).to_pylist()
    assert (row["name"], row["raised"], row["flops"], row["source"]) == ("", False, None, None)
    [row] = to_batch("tensors", {"tensor_id": [7]}).to_pylist()
    assert (row["dtype"], row["requires_grad"], row["shape"], row["storage"]) == (None, False, [], None)


@pytest.mark.parametrize(
    "phases",
    [
        ["backward", "optimizer"],
        [1, 3],
        np.array([1, 3]),
        np.array([1, 3], np.int8),
        np.array(["backward", "optimizer"]),
        pa.array(["backward", "optimizer"]),
        pa.array(["optimizer", "backward"]).dictionary_encode().take(pa.array([1, 0])),
    ],
)
def test_phase_is_given_as_word_or_code(phases: Any) -> None:
    batch = to_batch("calls", {"call_id": [1, 2], "phase": phases})
    assert batch.column("phase").to_pylist() == ["backward", "optimizer"]
    assert batch.column("phase").indices.to_pylist() == [1, 3]  # always the codes of PHASES


def test_masked_value_is_null() -> None:
    numbers = np.ma.MaskedArray([1, 2, 3], mask=[False, True, False])
    assert column("calls", "parent_call_id", numbers, phase=[0, 0, 0]) == [1, None, 3]
    assert column("ops", "phase", np.ma.MaskedArray([0, 9, 1], mask=[0, 1, 0])) == [
        "forward",
        None,
        "backward",
    ]


def test_nan_is_not_null() -> None:
    given = np.array([np.nan, 1.0])
    for values in (given, list(given), np.ma.MaskedArray(given, mask=[False, False])):
        batch = to_batch("values", {"min": values})
        assert batch.column("min").null_count == 0
        assert np.isnan(batch.column("min")[0].as_py())


def test_rows_of_a_two_dimensional_array_become_lists() -> None:
    assert column("values", "sketch", np.array([[1, 2], [3, 4]], np.float32)) == [[1.0, 2.0], [3.0, 4.0]]
    assert column("values", "shape", np.zeros((2, 0), np.int64)) == [[], []]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "eval"],
        np.array(["train", "eval"]),
        np.array(["train", "eval"], object),
        pa.array(["train", "eval"]),
        pa.array(["train", "eval"]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array(["eval", "train"])),
        pa.chunked_array([["train"], ["eval"]]),
    ],
)
def test_words_are_given_in_any_form(words: Any) -> None:
    assert column("steps", "kind", words) == ["train", "eval"]


def test_array_that_was_given_may_be_used_again() -> None:
    starts, phases, sketches = np.array([1, 2]), np.array([0, 1], np.int8), np.ones((2, 2), np.float32)
    batch = to_batch("values", {"order": starts, "phase": phases, "sketch": sketches})
    starts[:], phases[:], sketches[:] = 9, 2, 9
    assert batch.column("order").to_pylist() == [1, 2]
    assert batch.column("phase").to_pylist() == ["forward", "backward"]
    assert batch.column("sketch").to_pylist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({}, "table 'scalars' has no column (none was given)"),
        ({"stepp": [1]}, "table 'scalars' has no column 'stepp'"),
        (
            {"step": [1, 2], "value": [1.0]},
            "columns of table 'scalars' are of different lengths: {'step': 2, 'value': 1}",
        ),
        ({"value": [1.0, None]}, "scalars.value: 1 of 2 values are null; none may be"),
    ],
)
def test_columns_that_do_not_fit_are_told(columns: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        to_batch("scalars", columns)
    assert str(caught.value) == text


def test_value_of_another_type_is_told() -> None:
    with pytest.raises(ValueError, match=r"^scalars\.value: not a column of double: .*'high'"):
        to_batch("scalars", {"value": ["high"]})


@pytest.mark.parametrize("phases", [["upward"], [4], np.array([4]), np.array([256])])
def test_phase_that_is_none_is_told(phases: Any) -> None:
    with pytest.raises(ValueError, match=r"^calls\.phase: not a column of dictionary"):
        to_batch("calls", {"call_id": [1], "phase": phases})


def test_phase_of_a_call_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"^calls\.phase: must be given$"):
        to_batch("calls", {"call_id": [1]})


def test_table_that_is_none_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"^no table 'call' in a recording; there are: modules, sites, calls"
    ):
        to_batch("call", {"call_id": [1]})


CODED = {
    "shape": [(2, 3), (), (2, 3), (5,)],
    "dtype": ["float32", "int64", "float32", "float32"],  # equal words may stand there twice
    "note": ["sparse", None, None, "sparse"],
    "numel": [6, 1, 6, 5],
}


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("codes", [[0, 1, 2, 3, 3, 1, 0], []], ids=["rows", "no rows"])
def test_coded_column_is_the_column_of_its_values(name: str, codes: list[int]) -> None:
    values = CODED[name]
    expanded, coded = [values[code] for code in codes], Coded(values, np.array(codes, np.int64))
    assert column("values", name, coded) == column("values", name, expanded)
    assert list(coded[1:3]) == expanded[1:3]
    assert null_misfits("values", {name: coded}) == null_misfits("values", {name: expanded})


def test_coded_value_of_another_type_is_an_error_that_names_the_column() -> None:
    with pytest.raises(ValueError, match=r"values\.numel: not a column of int64"):
        to_batch("values", {"numel": Coded(["six"], np.zeros(2, np.int64))})
