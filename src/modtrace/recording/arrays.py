"""Makes Arrow arrays from buffers: quicker than `pa.array`, which moreover imports pandas where it is installed.

That import would cost the process that is being recorded half a second and tens of megabytes.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

_NUMPY_TYPES: dict[pa.DataType, np.dtype] = {
    pa.int8(): np.dtype(np.int8),
    pa.int32(): np.dtype(np.int32),
    pa.int64(): np.dtype(np.int64),
    pa.float32(): np.dtype(np.float32),
    pa.float64(): np.dtype(np.float64),
    pa.bool_(): np.dtype(np.bool_),
}
_nulls: dict[pa.DataType, pa.Array] = {}


def is_plain(wanted: pa.DataType) -> bool:
    """Whether `from_numpy` makes arrays of this type."""
    return wanted in _NUMPY_TYPES


def from_numpy(values: np.ndarray, wanted: pa.DataType) -> pa.Array:
    """An array of numbers or truth values; null where a masked array is masked. Copies.

    Raises:
        ValueError: a value does not fit the type.
    """
    data = np.ma.getdata(values)
    converted = data.astype(_NUMPY_TYPES[wanted])
    if data.dtype != converted.dtype and not _fits(data, converted, np.ma.getmaskarray(values)):
        raise ValueError(f"a value of {data.dtype} does not fit {wanted}")
    mask = np.ma.getmask(values)
    valid = None if mask is np.ma.nomask else pa.py_buffer(np.packbits(~mask, bitorder="little"))
    content = np.packbits(converted, bitorder="little") if wanted == pa.bool_() else converted
    return pa.Array.from_buffers(wanted, len(converted), [valid, pa.py_buffer(content)])


def from_strings(values: Sequence[str | None]) -> pa.Array:
    """An array of strings; None is null."""
    encoded = [b"" if each is None else each.encode() for each in values]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(each) for each in encoded], out=offsets[1:])
    missing = np.array([each is None for each in values], bool)
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little")) if missing.any() else None
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def from_string_lists(values: Sequence[Sequence[str]]) -> pa.Array:
    """An array of lists of strings."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(each) for each in values], out=offsets[1:])
    flat = from_strings([word for each in values for word in each])
    return pa.ListArray.from_arrays(from_numpy(offsets, pa.int32()), flat)


def nulls(wanted: pa.DataType, rows: int) -> pa.Array:
    """An array of nulls: a slice of one that is kept, so that columns nobody fills cost nothing."""
    kept = _nulls.get(wanted)
    if kept is None or len(kept) < rows:
        kept = _nulls[wanted] = pa.nulls(max(rows, 1024), wanted)
    return kept.slice(0, rows)


def _fits(data: np.ndarray, converted: np.ndarray, mask: np.ndarray) -> bool:
    if data.dtype.kind not in "iufb":
        return False
    same = (converted == data) | mask
    if converted.dtype.kind == "f":  # rounding is no misfit, and NaN stays NaN
        return True
    return bool(same.all())
