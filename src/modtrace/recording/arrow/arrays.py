"""Makes Arrow arrays of what collectors hold, and numpy arrays of Arrow's, through their buffers.

`pa.array`, `pa.scalar` and `to_numpy` import pandas where it is installed. That would cost the process which is
being recorded half a second and tens of megabytes, so here they are left for types that are rare. Before pyarrow 26
`to_pandas_dtype` does not work without pandas, so the types of numpy are looked up here.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_zeros = pa.py_buffer(b"")  # shared zeros, replaced by more on demand; hardly any memory backs them


def absent_column(field: pa.Field, rows: int) -> pa.Array:
    """Returns a column that was not given: null, or "", [], 0 or False if the column may not be null."""
    kind, missing = field.type, rows if field.nullable else 0
    zeros = _shared_zeros(8 * (rows + 1))
    buffers = [zeros if field.nullable else None, zeros]
    if pa.types.is_primitive(kind):
        return pa.Array.from_buffers(kind, rows, buffers, missing)
    if pa.types.is_list(kind):
        inside = absent_column(kind.value_field.with_nullable(False), 0)
        return pa.Array.from_buffers(kind, rows, buffers, missing, children=[inside])
    if pa.types.is_dictionary(kind):
        codes = pa.Array.from_buffers(kind.index_type, rows, buffers, missing)
        return pa.DictionaryArray.from_arrays(codes, from_strings([] if field.nullable else [""]), safe=False)
    return pa.Array.from_buffers(kind, rows, [*buffers, pa.py_buffer(b"")], missing)  # strings: offsets are 0


def _shared_zeros(size_bytes: int) -> pa.Buffer:
    global _zeros
    if _zeros.size < size_bytes:
        _zeros = pa.py_buffer(np.zeros(max(size_bytes, 2 * _zeros.size, 2**16), np.uint8))
    return _zeros


class Coded(Sequence[Any]):
    """A column of few distinct values: row `row` holds `values[codes[row]]`."""

    def __init__(self, values: Sequence[Any], codes: npt.NDArray[np.integer[Any]]) -> None:
        """Holds the column.

        Args:
            values: the values of the rows; a value may occur more than once, and None is null.
            codes: for each row the position of its value.
        """
        self.values, self.codes = values, codes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return Coded(self.values, self.codes[row])
        return self.values[self.codes[row]]


def from_coded(column: Coded, wanted: pa.DataType) -> pa.Array:
    """Returns an array of a coded column, which takes the time for the values, and 10 ns a row.

    Raises:
        ArrowException, ValueError, TypeError, OverflowError: a value is not of the type.
    """
    if not pa.types.is_dictionary(wanted):
        return from_list(column.values, wanted).take(from_numpy(column.codes, pa.int64()))
    coded = from_list(column.values, wanted)
    codes = to_numpy(coded.indices, null=-1)[column.codes]
    return pa.DictionaryArray.from_arrays(null_below_zero(codes, wanted.index_type), coded.dictionary)


def from_codes(codes: npt.NDArray[np.int64], texts: Sequence[str | None]) -> pa.DictionaryArray:
    """Returns an array of texts, null for None, by their positions in `texts`, which may hold one twice.

    Its dictionary has only those that are used, in the order of their positions.
    """
    is_used = np.zeros(len(texts), bool)
    is_used[codes] = True
    numbers: dict[str, int] = {}
    new = np.full(len(texts), -1, np.int32)
    for code in np.flatnonzero(is_used).tolist():
        text = texts[code]
        if text is not None:
            new[code] = numbers.setdefault(text, len(numbers))
    return pa.DictionaryArray.from_arrays(null_below_zero(new[codes]), from_strings([*numbers]))


_INTEGERS = [np.dtype(f"{sign}{width}") for sign in "iu" for width in (1, 2, 4, 8)]
_ARROW_TYPES = {
    dtype: pa.from_numpy_dtype(dtype) for dtype in (*_INTEGERS, *map(np.dtype, ("?", "f2", "f4", "f8")))
}
_NUMPY_TYPES = {kind: dtype for dtype, kind in _ARROW_TYPES.items()}
_TRUTHS, _NUMBERS = (bool, np.bool_), (int, float, np.integer, np.floating)
_MOST = 2**31 - 1  # offsets are int32


def from_numpy(values: npt.NDArray[Any], wanted: pa.DataType | None = None) -> pa.Array:
    """Returns a copy of a 1-D array of numbers or bools, with their own type unless another is wanted.

    The result is null where a masked array is masked.

    Raises:
        ArrowInvalid: a value does not fit the type.
    """
    if isinstance(values, np.ma.MaskedArray):
        return _from_numbers(np.ma.getdata(values), np.ma.getmaskarray(values), wanted)
    return _from_numbers(values, None, wanted)


def null_below_zero(values: npt.NDArray[Any], wanted: pa.DataType | None = None) -> pa.Array:
    """Returns a copy of a 1-D array of integers that is null where they are negative; see `from_numpy`."""
    return _from_numbers(values, values < 0, wanted)


def _from_numbers(
    data: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None, wanted: pa.DataType | None
) -> pa.Array:
    natural = _ARROW_TYPES.get(data.dtype)
    wanted = natural if wanted is None else wanted
    if natural is None or data.ndim != 1 or not pa.types.is_primitive(wanted):
        return pa.array(np.array(data), type=wanted, mask=mask)
    missing = 0 if mask is None else np.count_nonzero(mask)
    if natural != wanted:
        narrowed = _narrowed(data, mask if missing else None, wanted)
        data, natural = (data, natural) if narrowed is None else (narrowed, wanted)
    content = _packed(data) if natural == pa.bool_() else np.array(data, order="C")
    valid = pa.py_buffer(_packed(~mask)) if mask is not None and missing else None  # most masks are empty
    array = pa.Array.from_buffers(natural, len(data), [valid, pa.py_buffer(content)], missing)
    return array if natural == wanted else array.cast(wanted)


def _narrowed(
    data: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None, wanted: pa.DataType
) -> npt.NDArray[Any] | None:
    """Returns integers as those of another type, as a cast of Arrow does in 50 us more; None if some do not fit."""
    kind = _NUMPY_TYPES.get(wanted)
    if kind is None or kind.kind not in "iu" or data.dtype.kind not in "iu":
        return None
    narrowed = data.astype(kind)
    fits = narrowed == data if mask is None else (narrowed == data) | mask
    return narrowed if fits.all() else None


def from_list(values: Sequence[Any], wanted: pa.DataType) -> pa.Array:
    """Returns an array of Python values; None is null.

    Raises:
        ArrowException, ValueError, TypeError, OverflowError: a value is not of the type.
    """
    kinds = set(map(type, values)) - {type(None)}
    if pa.types.is_string(wanted) and _are(kinds, (str,)):
        return from_strings(values)
    if pa.types.is_dictionary(wanted) and _are(kinds, (str,)):
        return to_dictionary(values, wanted)
    if pa.types.is_binary(wanted) and _are(kinds, (bytes,)):
        return _from_bytes(pa.binary(), values, [value or b"" for value in values])
    if pa.types.is_list(wanted) and _are(kinds, (list, tuple, np.ndarray)):
        return _from_lists(values, wanted)
    if pa.types.is_boolean(wanted):
        accepted = _are(kinds, _TRUTHS)
    else:
        accepted = pa.types.is_primitive(wanted) and _are(kinds, _NUMBERS) and bool not in kinds
    return from_numpy(_masked(values), wanted) if accepted else pa.array(values, type=wanted)


def from_strings(values: Sequence[str | None]) -> pa.Array:
    """Returns an array of strings; None is null."""
    return _from_bytes(pa.string(), values, [b"" if text is None else text.encode() for text in values])


def from_encoded(lengths: npt.NDArray[np.int64], encoded: bytes) -> pa.Array:
    """Returns an array of strings of these lengths, given one behind the other as UTF-8."""
    return pa.Array.from_buffers(pa.string(), len(lengths), [None, _offsets(lengths), pa.py_buffer(encoded)])


def to_dictionary(values: Sequence[str | None], wanted: pa.DictionaryType) -> pa.Array:
    """Returns a dictionary array whose dictionary is in the order of first occurrence; None is null."""
    codes: dict[str, int] = {}
    indices = [None if text is None else codes.setdefault(text, len(codes)) for text in values]
    return pa.DictionaryArray.from_arrays(from_list(indices, wanted.index_type), from_strings(list(codes)))


def from_rows(values: npt.NDArray[Any], wanted: pa.ListType) -> pa.Array:
    """Returns a copy of a 2-D array as one list a row."""
    rows, width = values.shape
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * np.int32(width))
    flat = from_numpy(values.reshape(-1), wanted.value_type)
    return pa.Array.from_buffers(wanted, rows, [None, offsets], children=[flat])


def from_parts(lengths: npt.NDArray[np.int64], flat: npt.NDArray[Any]) -> pa.Array:
    """Returns an array of lists of these lengths, given one behind the other."""
    inside = from_numpy(flat)
    offsets = _offsets(lengths)
    return pa.Array.from_buffers(pa.list_(inside.type), len(lengths), [None, offsets], children=[inside])


def to_numpy(column: pa.Array | pa.ChunkedArray, *, null: Any = -1) -> npt.NDArray[Any]:
    """Returns numbers or bools as numpy, with `null` in place of nulls, and without copying if that is possible."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_view(chunk, null) for chunk in chunks]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, _NUMPY_TYPES[column.type])


def last_of_each(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Returns the row in which each id occurs last, in the order of the ids."""
    _, from_end = np.unique(ids[::-1], return_index=True)
    return np.asarray(len(ids) - 1 - from_end)


def _are(kinds: set[type], wanted: tuple[type, ...]) -> bool:
    return all(issubclass(kind, wanted) for kind in kinds)


def _packed(truths: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    return np.packbits(truths, bitorder="little")


def _unpacked(bits: pa.Buffer, start: int, rows: int) -> npt.NDArray[np.bool_]:
    truths = np.unpackbits(np.frombuffer(bits, np.uint8), count=start + rows, bitorder="little")
    return truths[start:].view(np.bool_)


def _masked(values: Sequence[Any]) -> npt.NDArray[Any]:
    if None not in values:
        return np.array(values)
    missing = [value is None for value in values]
    return np.ma.masked_array(np.array([0 if value is None else value for value in values]), missing)


def _from_bytes(kind: pa.DataType, values: Sequence[Any], encoded: Sequence[bytes]) -> pa.Array:
    buffers = [_valid(values), _offsets([*map(len, encoded)]), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(kind, len(encoded), buffers)


def _from_lists(values: Sequence[Sequence[Any] | None], wanted: pa.ListType) -> pa.Array:
    lists = [() if value is None else value for value in values]
    arrays: list[Any] = [value for value in values if isinstance(value, np.ndarray) and value.ndim == 1]
    if arrays and len(arrays) == len(values) - sum(value is None for value in values):
        flat = from_numpy(np.concatenate(arrays), wanted.value_type)  # 10 ns a number, not 190
    else:
        flat = from_list(list(chain.from_iterable(lists)), wanted.value_type)
    offsets = _offsets([*map(len, lists)])
    return pa.Array.from_buffers(wanted, len(lists), [_valid(values), offsets], children=[flat])


def _valid(values: Sequence[Any]) -> pa.Buffer | None:
    valid = [value is not None for value in values]
    return None if all(valid) else pa.py_buffer(_packed(np.array(valid)))


def _offsets(lengths: Sequence[int] | npt.NDArray[np.int64]) -> pa.Buffer:
    """Returns the offset of each part in the concatenation of all parts, and the end of the last one."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > _MOST:
        raise ValueError(f"{offsets[-1]} bytes or elements in one batch; {_MOST} fit")
    return pa.py_buffer(offsets.astype(np.int32))


def _view(array: pa.Array, null: Any) -> npt.NDArray[Any]:
    rows, start, kind = len(array), array.offset, array.type
    if not rows:
        return np.empty(0, _NUMPY_TYPES[kind])
    valid, content = array.buffers()
    if pa.types.is_boolean(kind):
        values: npt.NDArray[Any] = _unpacked(content, start, rows)
    else:
        values = np.frombuffer(content, _NUMPY_TYPES[kind], start + rows)[start:]
    return np.where(_unpacked(valid, start, rows), values, null) if array.null_count else values
