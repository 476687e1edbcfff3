"""Makes columns that were not given: all are slices of one buffer of zeros."""

import numpy as np
import pyarrow as pa

from .arrays import from_strings

_zeros = pa.py_buffer(b"")  # grows; it is never written to, so the system backs it with hardly any memory


def absent_column(field: pa.Field, rows: int) -> pa.Array:
    """What stands for a column that was not given: null, or "", [], 0, False where it may not be null."""
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
