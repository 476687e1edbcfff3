"""Turns columns as collectors hold them into Arrow batches of a table's schema."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from .arrays import from_numpy, from_string_lists, from_strings, is_plain, nulls
from .phase import PHASES
from .schema import schema

_PHASE_TYPE = pa.dictionary(pa.int8(), pa.string())
_WORD_TYPE = pa.dictionary(pa.int32(), pa.string())
_STRING_LIST = pa.list_(pa.string())


@cache
def _phase_words() -> pa.Array:
    return from_strings(PHASES)


def to_batch(table: str, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """One batch of `table` from its columns; see `Sink.write` for what may be given.

    A masked array means null where it is masked; integers given for a phase are codes of `PHASES`;
    a 2-D array given for a list column is one list a row. NaN stays NaN, and is not null. Numpy arrays
    are copied: the caller may use them again.

    Raises:
        ValueError: a column is not in the schema, none is given, lengths differ, a value is not of the
            column's type, or a null is in a column that may have none; the text names the column.
    """
    fields = schema(table)
    unknown = [name for name in columns if fields.get_field_index(name) < 0]
    if unknown or not columns:
        raise ValueError(
            f"table {table!r} has no column {', '.join(map(repr, unknown)) or '(none was given)'}"
        )
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of table {table!r} are of different lengths: {lengths}")
    rows = next(iter(lengths.values()))
    arrays = [
        _checked(table, each, columns[each.name]) if each.name in columns else _absent(table, each, rows)
        for each in fields
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=fields)


def absent_column(field: pa.Field, rows: int) -> pa.Array:
    """What stands for a column that was not given: null, or "", [], 0, False where it may not be null."""
    if field.nullable:
        return nulls(field.type, rows)
    if pa.types.is_list(field.type):
        return pa.array([[]] * rows, type=field.type)
    if pa.types.is_string(field.type):
        return from_strings([""] * rows)
    if pa.types.is_dictionary(field.type):
        return _words([""] * rows)
    return from_numpy(np.zeros(rows, np.int8), field.type)


def _absent(table: str, field: pa.Field, rows: int) -> pa.Array:
    if field.type == _PHASE_TYPE and not field.nullable:
        raise ValueError(f"{table}.{field.name}: must be given")
    return absent_column(field, rows)


def _checked(table: str, field: pa.Field, values: Any) -> pa.Array:
    try:
        array = _to_array(values, field.type)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{table}.{field.name}: not a column of {field.type}: {error}") from error
    if array.null_count and not field.nullable:
        raise ValueError(
            f"{table}.{field.name}: {array.null_count} of {len(array)} values are null; none may be"
        )
    return array


def _to_array(values: Any, wanted: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if wanted == _PHASE_TYPE:
        return _phases(values)
    if isinstance(values, pa.Array):
        return _as_type(values, wanted)
    if not isinstance(values, np.ndarray):
        return _from_list(list(values), wanted)
    if values.ndim == 2:
        return _lists(values, wanted)
    if values.dtype.kind in "OUS":  # Arrow makes no dictionary, and no string from `U`, of a numpy array
        return pa.array(values.tolist(), type=wanted)
    if is_plain(wanted):
        return from_numpy(values, wanted)
    mask = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
    return pa.array(np.array(values), type=wanted, mask=mask)


def _from_list(values: list[Any], wanted: pa.DataType) -> pa.Array:
    """What collectors write is made from buffers; the rest goes to `pa.array`."""
    kinds = {type(each) for each in values} - {type(None)}
    if is_plain(wanted) and kinds and kinds <= ({bool} if wanted == pa.bool_() else {int, float}):
        return from_numpy(_masked(values), wanted)
    if wanted == pa.string() and kinds <= {str}:
        return from_strings(values)
    if wanted == _WORD_TYPE and kinds <= {str}:
        return _words(values)
    if wanted == _STRING_LIST and kinds == {list} and None not in values and _are_words(values):
        return from_string_lists(values)
    return pa.array(values, type=wanted)


def _masked(values: list[Any]) -> np.ndarray:
    missing = [each is None for each in values]
    if not any(missing):
        return np.array(values)
    return np.ma.masked_array(np.array([0 if each is None else each for each in values]), missing)


def _are_words(lists: list[list[Any]]) -> bool:
    return all(type(word) is str for words in lists for word in words)


def _words(values: list[str | None]) -> pa.Array:
    codes: dict[str, int] = {}
    indices = [-1 if each is None else codes.setdefault(each, len(codes)) for each in values]
    masked = np.ma.masked_less(np.array(indices, np.int32), 0)
    return pa.DictionaryArray.from_arrays(from_numpy(masked, pa.int32()), from_strings(list(codes)))


def _as_type(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    if values.type == wanted:
        return values
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_dictionary(wanted):
        return values.cast(wanted.value_type).dictionary_encode()
    return values.cast(wanted)


def _lists(values: np.ndarray, wanted: pa.DataType) -> pa.Array:
    rows, width = values.shape
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(width))
    return pa.ListArray.from_arrays(offsets, pa.array(values.flatten(), type=wanted.value_type))


def _phases(values: Any) -> pa.Array:
    """The dictionary is always `PHASES`, so that the codes mean the same in every file."""
    if isinstance(values, pa.Array):
        if values.type == _PHASE_TYPE and values.dictionary.equals(_phase_words()):
            return values
        values = values.to_pylist()
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        codes = from_numpy(values, pa.int8())
    else:
        codes = _from_list([_phase_code(each) for each in values], pa.int8())
    return pa.DictionaryArray.from_arrays(codes, _phase_words())  # raises where a code has no phase


def _phase_code(phase: str | int | None) -> int | None:
    if not isinstance(phase, str):
        return phase
    if phase not in PHASES:
        raise ValueError(f"no phase {phase!r}; there are: {', '.join(PHASES)}")
    return PHASES.index(phase)
